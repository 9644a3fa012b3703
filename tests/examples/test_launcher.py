"""Tests of the launchers of ranks: MPI where Horovod has it, otherwise Gloo, otherwise an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples import launcher

PROGRAM = ["train.py", "--epochs", "1"]


def executables(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which launchers are searched for."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    return tmp_path


def has_mpi(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    monkeypatch.setattr(launcher, "_has_mpi", lambda: built)


def test_mpi_is_preferred(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executables(alone, "mpirun", "horovodrun")
    has_mpi(monkeypatch, True)
    expected = [str(alone / "mpirun"), "-np", "4", sys.executable, *PROGRAM]
    assert launcher.command(4, PROGRAM) == expected


@pytest.mark.parametrize(
    ("found", "built", "wanted"),
    [
        (["horovodrun"], True, True),
        (["mpirun", "horovodrun"], False, True),
        (["mpirun", "horovodrun"], True, False),
    ],
    ids=["no mpirun", "Horovod without MPI", "Gloo wanted"],
)
def test_gloo_is_used_otherwise(
    alone: Path, monkeypatch: pytest.MonkeyPatch, found: list[str], built: bool, wanted: bool
) -> None:
    executables(alone, *found)
    has_mpi(monkeypatch, built)
    words = launcher.command(2, PROGRAM, mpi=wanted)
    assert words[:4] == [str(alone / "horovodrun"), "--gloo", "-np", "2"]


def test_missing_launchers_are_named(alone: Path) -> None:
    with pytest.raises(launcher.NoLauncher, match="horovodrun was not found .*; run make setup"):
        launcher.command(2, PROGRAM)


def test_the_environment_finds_the_project_and_keeps_the_callers_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = launcher.environment()
    assert found["OMP_NUM_THREADS"] == "3" and found["TF_NUM_INTEROP_THREADS"] == "1"
    assert found["PYTHONPATH"].startswith(str(launcher.ROOT))


def test_torchrun_is_that_of_this_python() -> None:
    words = launcher.torchrun(4, PROGRAM)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-4:] == ["4", *PROGRAM]
