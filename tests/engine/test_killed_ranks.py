"""Test that ranks killed while they save leave the last complete checkpoint usable."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch, need

LIMIT = 120  # seconds a launch may take
MOMENTS = {
    "rank 1 writes its file": ("torchrun", 1, 2),
    "rank 1 writes its file, over Horovod": ("gloo", 1, 2),
    "rank 0 writes the manifest": ("torchrun", 0, 9),
}
"""Launcher, which rank is killed, and in which of its operations on files."""


@pytest.mark.launch
@pytest.mark.timeout(2 * LIMIT + 30)
@pytest.mark.parametrize(
    ("launcher", "rank", "at"),
    [
        pytest.param(*moment, id=name, marks=[pytest.mark.nightly] if number else [])
        for number, (name, moment) in enumerate(MOMENTS.items())
    ],
)
def test_a_rank_is_killed(
    launcher: str, rank: int, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(launcher)
    monkeypatch.setenv("KILLED_RANK", str(rank))
    monkeypatch.setenv("KILLED_AT", str(at))
    monkeypatch.setenv("KILLED_FOLDER", str(tmp_path))
    run = launch.__wrapped__  # each time anew
    killed, loads = "check_a_rank_is_killed", "check_the_last_complete_checkpoint_is_loaded"
    report = run("killed_checks.py", launcher, 2, LIMIT, checks=(killed,), forked=False)
    assert report.problem(killed) and report.status not in (0, None), report.output
    assert (tmp_path / "state-00001" / "manifest.json").exists()
    problem = run("killed_checks.py", launcher, 2, LIMIT, checks=(loads,)).problem(loads)
    assert problem is None, problem
