"""The worked examples of averaging methods, in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accordion_hvd import COLD, DynaCOLD

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from accordion_hvd.experiment import logistic, scale  # noqa: E402


def test_logistic_regression_reaches_the_optimum(tmp_path: Path) -> None:
    """Strongly regularised, so that it takes few steps; parts of the data are unlike."""
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
    rows = logistic.table([*curves, logistic.Curve("never", [1.0], [1.0])], 1e-8).splitlines()
    assert len(rows) == 5 and rows[-1].startswith("| never | - |")
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
