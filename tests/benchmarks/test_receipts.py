"""Tests of the table that holds a receipt's estimates against the jobs that they are about."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.netbench.receipts import Options, table


def row(repetition: int, method: str, ms: float, **estimates: list[float]) -> dict[str, Any]:
    found = {"Dense()": estimates["dense"]} if estimates else {}
    return {"repetition": repetition, "rate": "1gbit", "method": method, "ms": ms, "own": 1.02 * ms,
            "estimates": found}  # fmt: skip


def test_an_estimate_is_compared_with_the_job_of_the_same_repetition() -> None:
    rows = [
        row(0, "ours powersgd:4", 50.0, dense=[90.0, 105.0, 110.0]),
        row(0, "ours dense", 100.0),
        row(1, "ours powersgd:4", 50.0, dense=[210.0, 240.0, 260.0]),
        row(1, "ours dense", 200.0),
    ]
    lines = [line.split("  ") for line in table(rows).splitlines()]
    found = {tuple(x.strip() for x in line[:6] if x.strip())[1:3]: line for line in lines[1:]}
    text = " ".join(found["ours powersgd:4", "Dense()"])
    assert "1.12 (1.05 to 1.20)" in text and text.count("50%") == 2
    assert "1.02 (1.02 to 1.02)" in " ".join(found["ours dense", "itself"])


def test_jobs_of_both_engines_are_the_default() -> None:
    assert len(Options().methods) == 6 and len(Options(framework="keras").methods) == 3
    with pytest.raises(ValueError, match="at least 2"):
        Options(hosts=1)
