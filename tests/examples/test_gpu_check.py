"""Tests of scripts/gpu_check.py: its rehearsal on the CPU, and the check if there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *words],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.launch
def test_the_rehearsal_passes() -> None:
    done = check("--device", "cpu", "--side", "256")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout and "all passed" in done.stdout
    assert done.stdout.count("replicas equal") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed() -> None:
    done = check()
    assert done.returncode == 2 and "no GPU, so nothing was checked" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_gpu_passes() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
