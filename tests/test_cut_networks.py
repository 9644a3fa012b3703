"""Tests of jobs of which one host is cut off: every rank ends, or goes on without that host.

Packets are lost without a word, as after a pulled cable: no connection is closed.
"""

from __future__ import annotations

from typing import Any

import pytest
from cut_hosts import HOSTS, LIMIT, START, TIMEOUT
from launch import launch_job, need

from benchmarks.netbench import sandbox

MOST = TIMEOUT + 10.0
"""Seconds after which every rank has ended, or goes on."""

AGAIN = 5.0
"""Seconds more for Horovod to connect the rest: ten in all on two slow and busy cores."""

HELD = 6.0
"""Seconds for which Horovod's launcher tries to reach a rank 0 that is cut off: three times two."""

pytestmark = [
    pytest.mark.nightly, pytest.mark.quiet, pytest.mark.launch, pytest.mark.timeout(300)
]  # fmt: skip


def cut_off(kind: str, script: str, *words: str) -> tuple[dict[str, Any], list[dict], str]:
    """Run a job that is cut; return facts about its processes and of its ranks, and the output."""
    if (why := sandbox.obstacle()) is not None:
        pytest.skip(why)
    report, told = launch_job("../support/cut_hosts.py", [kind, script, *words], START + LIMIT + 20)
    found = f"status {report.status} after {report.seconds:.0f} s; told: {told}\n{report.output}"
    rigs = [row for row in told if "ended" in row]
    assert rigs, found
    return rigs[0], [row for row in told if "ended" not in row], found


@pytest.mark.parametrize("backend", ["gloo", "mpi", "torch"])
def test_all_ranks_end(backend: str) -> None:
    need({"gloo": "gloo", "mpi": "mpirun", "torch": "torchrun"}[backend])
    rig, _, found = cut_off(backend, "cut_off.py")
    assert all(seconds is not None and 1 < seconds < MOST for seconds in rig["ended"]), found
    assert "Traceback" in rig["output"] or "does not answer" in rig["output"], found


@pytest.mark.parametrize(
    ("framework", "kind"), [("torch", "elastic"), ("torch", "elastic-first"), ("keras", "elastic")]
)
def test_ranks_of_an_elastic_job_go_on(framework: str, kind: str) -> None:
    """Weights stay equal; the residual of the rank that is cut off is lost, which a rank logs."""
    need("gloo")
    rig, told, found = cut_off(kind, f"elastic_{framework}.py", "topk:0.1", "cut")
    most = MOST + AGAIN + (HELD if kind == "elastic-first" else 0.0)
    assert len(told) == HOSTS - 1, found
    for row in told:
        assert row["sizes"] == [HOSTS, HOSTS - 1] and row["resumed"] < most, found
        assert row["steps"] == told[0]["steps"] and row["weights"] == told[0]["weights"], found
        ((norm, drift),) = row["changes"]
        assert norm > 0 and drift < 1.5, found
    assert "ended without a handover" in found
    assert rig["ended"][-1] is not None and rig["ended"][-1] < MOST, found


def test_replicas_of_torchft_go_on() -> None:
    rig, told, found = cut_off("torchft", "cut_replica.py", "topk:0.1")
    assert [row["number"] for row in sorted(told, key=lambda row: row["number"])] == [0, 1], found
    for row in told:
        assert row["steps"] == told[0]["steps"] and row["weights"] == told[0]["weights"], found
        assert row["commits"][-1][1] == 2, found
        pauses = [b[0] - a[0] for a, b in zip(row["commits"], row["commits"][1:], strict=False)]
        assert max(pauses) < MOST, found
    assert rig["ended"][-1] is not None and rig["ended"][-1] < MOST, found
