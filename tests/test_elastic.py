"""Elastic jobs: a rank joins while others train."""

from __future__ import annotations

import pytest
from launch import launch_elastic, need

LIMIT = 150


@pytest.mark.launch
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("compression", ["dense", "topk:0.1"])
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_third_rank_joins(framework: str, compression: str) -> None:
    """All three end with equal weights, having taken steps together, at rank 0's clock."""
    need("gloo")
    report, told = launch_elastic(f"elastic_{framework}.py", [compression], LIMIT)
    found = f"status {report.status} after {report.seconds:.0f} s; told: {told}\n{report.output}"
    assert report.status == 0, found
    assert sorted(row["rank"] for row in told) == [0, 1, 2], found
    assert all(row["size"] == 3 and row["joined"] >= 5 for row in told), found
    assert len({row["steps"] for row in told}) == 1, found
    assert all(row["weights"] == told[0]["weights"] for row in told), found
