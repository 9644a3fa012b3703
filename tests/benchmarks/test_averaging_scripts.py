"""Tests of the worked examples of averaging methods, with small settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import need

from accordion_hvd import COLD, DynaCOLD

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("horovod.torch")

from benchmarks.averaging import averaged, logistic, scale, waiting
from benchmarks.averaging import command as averaging_bench


def test_logistic_regression_reaches_the_optimum(tmp_path: Path) -> None:
    """NIDS and one-bit DynaCOLD reach the common optimum, although the ranks have unlike data.

    The regularisation is strong, so that few steps are enough.
    """
    problem = logistic.digits(4, penalty=10.0)
    slopes = [problem.gradient(rank, problem.optimum) for rank in range(4)]
    assert np.linalg.norm(np.mean(slopes, 0)) < 1e-13
    assert min(np.linalg.norm(slope) for slope in slopes) > 0.01, "no part's own optimum"
    numeric = np.eye(problem.size)[5] * 1e-6
    curvature = problem._curvature(1, problem.optimum)[:, 5]
    slope = problem.gradient(1, problem.optimum + numeric) - problem.gradient(1, problem.optimum)
    np.testing.assert_allclose(slope / 1e-6, curvature, atol=1e-6)
    lr, curves = 1.5 / problem.smoothness, []
    for name, method in (("NIDS", COLD("ring")), ("one bit", DynaCOLD("ring", 0.3, 0.88))):
        curves.append(logistic.run(name, method, problem, lr, 250, 0.9e-8))
        assert curves[-1].errors[-1] <= 1e-8
    bits = [curve.until(1e-8)[1] for curve in curves]  # type: ignore[index]
    assert bits[1] < bits[0] / 5
    assert curves[0].bits[0] == 64 * problem.size
    assert curves[1].bits[0] == 8 * (-(-problem.size // 8) + 1)
    rows = logistic.table([*curves, logistic.Curve("never", [1.0], [1.0])], 1e-8)
    assert rows["of NIDS'"][0] == "1.000" and rows.iloc[2, :4].tolist() == ["never", "-", "-", "-"]
    logistic.draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_scale_of_few_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "scale.png"
    scale.main(["--ranks", "4", "8", "--steps", "12", "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert printed.count("| WAGMA, wait-avoiding |") == 3 and "8 ranks" in printed
    assert picture.stat().st_size > 5000
    trace = tmp_path / "trace.txt"
    trace.write_text("0.1 0.3\n0.2 0.1\n")
    scale.main(["--ranks", "4", "--steps", "4", "--trace", str(trace)])
    scale.main(["--ranks", "4", "--steps", "4", "--sigma", "0.5"])
    assert "average of all each step" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.launch
def test_a_bench_of_real_ranks(tmp_path: Path) -> None:
    """Ranks start with small settings, and their measurements go between the marks of a page."""
    need("mpirun")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{averaging_bench.BEGIN}\nold\n{averaging_bench.END}\nafter\n")
    script = Path(__file__).resolve().parents[2] / "scripts" / "bench_averaging.py"
    small = ["--ranks", "4", "--group-size", "2", "--period", "4", "--steps", "8", "--pause", "0.2"]
    small += ["--sizes", "1000", "--repetitions", "1", "--output", str(tmp_path)]
    small += ["--tasks", "digits", "--seeds", "1", "--epochs", "2"]
    parts = ["waiting", "idle", "accuracy", "report"]
    run = [sys.executable, str(script), *parts, "--page", str(page), *small]
    ended = subprocess.run(
        run, timeout=200,
        env=dict(os.environ),  # not what libraries of C have put into the environment of the worker
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    inherited = subprocess.run(["env"], stdout=subprocess.PIPE, text=True, check=True).stdout
    mpi = [line for line in inherited.splitlines() if line.startswith(("OMPI", "OPAL", "PMI"))]
    assert ended.returncode == 0, (ended.stdout, mpi)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| 1,000 |")]
    assert [line[2].strip() for line in lines] == list(waiting.METHODS)
    assert all(0 < float(line[5].rstrip("% ")) < 130 for line in lines), "faster than time"
    assert "Sleeping ranks used" in text
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| digits |")]
    assert [line[2].strip() for line in lines] == list(averaged.methods(2, 4))
    assert all(20 < float(line[3].rstrip("% ")) < 100 for line in lines), "nothing was learnt"


def test_a_page_without_a_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="has no results yet"):
        averaging_bench.report(tmp_path, page)
    (tmp_path / "idle.json").write_text('{"settings": {"pause": 1}, "rows": []}')
    with pytest.raises(SystemExit, match="has no lines"):
        averaging_bench.report(tmp_path, page)
    assert page.read_text() == "no marks\n"


def test_differences_are_taken_seed_by_seed() -> None:
    rows = [
        {"task": "digits", "method": method, "seed": seed, "accuracy": right}
        for method, seed, right in (
            (averaged.GRADIENTS, 1, 0.90), (averaged.GRADIENTS, 2, 0.94),
            ("WAGMA", 1, 0.91), ("WAGMA", 2, 0.93),
        )
    ]  # fmt: skip
    plain, other = averaged.table(rows).to_numpy().tolist()
    assert plain == ["digits", averaged.GRADIENTS, "92.00 %", "", "2"]
    assert other[2:] == ["92.00 %", "+0.00 (-1.00 to +1.00)", "2"]
