"""Tests of elastic jobs: ranks join, leave in order, and die; hosts vanish and return."""

from __future__ import annotations

import pytest
from launch import launch_elastic, need

LIMIT = 150

CASES = [
    ("torch", "topk:0.1", ["join", "leave"]),
    pytest.param("torch", "powersgd:2", ["vanish", "kill"], marks=pytest.mark.nightly),
    pytest.param("torch", "local", ["vanish", "leave"], marks=pytest.mark.nightly),
    pytest.param("keras", "topk:0.1", ["vanish", "kill"], marks=pytest.mark.nightly),
]


@pytest.mark.launch
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("framework, compression, stages", CASES)
def test_ranks_come_and_go(framework: str, compression: str, stages: list[str]) -> None:
    """All ranks have equal weights, and orderly changes conserve the mean of all residuals.

    If ranks average models, orderly changes conserve that of the models instead.
    """
    need("gloo")
    report, told = launch_elastic(f"elastic_{framework}.py", [compression, *stages], LIMIT)
    found = f"status {report.status} after {report.seconds:.0f} s; told: {told}\n{report.output}"
    sizes = [2, *(3 if stage in ("join", "vanish") else 2 for stage in stages)]
    assert report.status == 0, found
    assert sorted(row["rank"] for row in told) == list(range(sizes[-1])), found
    assert all(row["sizes"] == sizes for row in told), found
    leaders = [0, *(1 if stage == "vanish" else 0 for stage in stages)]
    assert all(row["leaders"] == leaders for row in told), found
    assert len({row["steps"] for row in told}) == 1, found
    assert all(row["weights"] == told[0]["weights"] for row in told), found
    for stage, (norm, drift) in zip(stages, told[0]["changes"], strict=True):
        assert norm > 0, found
        assert drift < (1e-5 if stage != "kill" else 1.5), found
    reported = "ended without a handover" in report.output
    assert reported == ("kill" in stages and compression != "local"), found
