"""Tests of scripts/gpu_check.py: its rehearsal on the CPU, and the check if there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import command

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *words],
        capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.launch
def test_the_rehearsal_passes() -> None:
    done = check("--device", "cpu", "--commit", "abc", "--before", str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and "all passed" in done.stdout
    assert done.stdout.count("training, DDP hook") == 2 and "commit abc" in done.stdout
    assert done.stdout.count("ours, powersgd:4") == 8  # half of them with residuals in 16 bits
    assert done.stdout.count("ours, powersgd:4, bfloat16 residuals") == 4
    assert done.stdout.count("  sketchedsgd") == 3


@pytest.mark.nightly
@pytest.mark.launch
def test_a_law_that_does_not_hold_fails() -> None:
    spoiled = (
        "import sys, numpy; sys.path.insert(0, sys.argv.pop(1));"
        "from benchmarks.gpu import command, laws; apart = laws._apart;"
        "laws._apart = lambda found, wanted: apart(found, {k: x + 1 for k, x in wanted.items()});"
        "laws.SPECS = ('dense',); laws.METHODS = (); laws.optimizers.NATIVE.clear();"
        "command._run_rank('laws', 'cpu')"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", spoiled, str(ROOT)], env={**os.environ, **own},
            stdout=subprocess.PIPE, text=True,
        )
        for own in command._two_ranks()
    ]  # fmt: skip
    output, _ = ranks[0].communicate(timeout=100)
    assert ranks[0].returncode == 1 and ranks[1].wait(100) == 1
    assert output.count("FAILED") == 1 and "dense" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed() -> None:
    done = check()
    assert done.returncode == 2 and "no GPU, so nothing was checked" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_gpu_passes() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
