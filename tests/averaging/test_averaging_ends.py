"""Tests of wait-avoiding averaging if a rank dies, hangs or ends: the job ends and says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import RANKS, ROOT, command_for, need


def run(how: str, folder: Path, ranks: int = 4) -> tuple[int, str, float]:
    """Launch a training that ends as `how` says; return its status, output and seconds."""
    need("mpirun")
    program = [sys.executable, str(RANKS / "averaging_ends.py"), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CPP_MIN_LOG_LEVEL")
    environment |= dict.fromkeys([*names, "CHECK_LIMIT", "PYTHONUNBUFFERED"], "1")
    environment["CHECK_FOLDER"] = str(folder)
    began = time.monotonic()
    done = subprocess.run(
        command_for("mpirun", ranks, program), env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - began


@pytest.mark.launch
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "rank 1 with PID"),  # the launcher's words
        ("stopped", "ends the job: rank 1 did not take part in "),
        ("moving", "ends the job: rank 1 did not take part in "),
        ("asleep", "ends the job: rank 1 did not take part in the average of all ranks"),
        ("uncaught", "the averaging has ended on all ranks (rank 1: ValueError('intended'))"),
        ("exit", "the averaging has ended on all ranks (rank 1: ended after 12 steps)"),
        ("interrupt", "KeyboardInterrupt"),
        ("threads", "needs MPI_THREAD_MULTIPLE, but MPI was started without"),
    ],
)
def test_the_end_is_named(how: str, words: str, tmp_path: Path) -> None:
    status, output, seconds = run(how, tmp_path)
    assert status != 0
    assert words in output, output[-4000:]
    assert seconds < 30
    assert output.count("MPI_ABORT was invoked") <= 1, "one reason, not a storm of them"
    assert "rank 0 did not" not in output, "it waits for rank 1 itself"
    if how in ("uncaught", "exit", "interrupt"):
        assert "MPI_ABORT" not in output


@pytest.mark.launch
@pytest.mark.timeout(90)
def test_horovod_ends_mpi_when_no_rank_needs_it(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch")
    status, output, _ = run("horovod", tmp_path, ranks=2)
    assert status == 0, output[-4000:]
