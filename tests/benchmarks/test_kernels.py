"""Tests of the measurements of compressors: all of them run, and times and memory are right."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, parameters

from accordion_hvd import Allgather, Allreduce, Compressor, PowerSGD, TopK
from benchmarks.compressors import kernels
from benchmarks.compressors.catalog import CATALOG


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_all_compressors_can_be_measured(framework: Framework) -> None:
    bench = kernels.make_bench(framework.backend, 64, 2)
    for compressor in CATALOG:
        cost = bench.measure(compressor)
        assert cost.encode >= 0 and cost.decode > 0
    assert bench.measure(TopK(0.1)).state == 1
    assert bench.measure(PowerSGD(16)).state == 1.5


class Slow(Compressor):
    """Compressor that does a known amount of work before and after its requests."""

    def exchange(self, grad: Any, state: Any, info: Any) -> Any:
        work = np.copy(grad)
        assert len((yield Allgather(work))) == info.size
        kept = [np.full_like(grad, i) for i in range(6)]
        total, mean = yield Allreduce(work, op="sum"), Allreduce(work)
        np.testing.assert_array_equal(total, info.size * mean)
        return mean + kept[5], state


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
def test_costs_are_about_what_was_done() -> None:
    """The measured times and the peak of memory are about those of the work of `Slow`.

    `Slow` copies the gradient before its first request. Later it holds six tensors at once, besides
    four answers and more. The measurement runs in a new process, since this one may hold memory
    that other tests have freed.
    """
    code = "import test_kernels as t; c = t.kernels.Bench('numpy', 3000, 3).measure(t.Slow())"
    command = [sys.executable, "-c", code + "; print(c.encode, c.decode, c.peak)"]
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join(map(str, (here, here.parent / "support", here.parents[1])))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    encode, decode, peak = map(float, done.stdout.split())
    assert encode > 0.5 and decode > 3 * encode
    assert 9 < peak < 15 or math.isnan(peak)


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "docs" / "kernels.md"
    arguments = ["--side", "40", "--rounds", "1", "--frameworks", "numpy"]
    kernels.main([*arguments, "--only", "topk:0.1", "dense", "--output", str(path)])
    text = path.read_text()
    assert "of 40 x 40 elements" in " ".join(text.split()) and str(path) in capsys.readouterr().out
    rows = pd.read_csv(path.parent / "data" / "kernels.csv")
    assert rows["compressor"].tolist() == ["TopK(ratio=0.1)", "Dense()"]
