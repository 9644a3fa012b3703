"""Tests of templates, of pages that keep notes, and of the format of ranges."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import report

ROOT = Path(__file__).resolve().parents[2]


def test_an_empty_place_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("# $title\n\n$middle\n\nA word: `$$epoch`.\n\n$end\n")
    monkeypatch.setattr(report, "TEMPLATES", tmp_path)
    text = report.render("page", title="A", middle="", end="")
    assert text == "# A\n\nA word: `$epoch`."
    assert report.render("page", title="$end", middle="B\n", end="") == text.replace(
        "# A\n", "# $end\n\nB\n"
    )
    with pytest.raises(KeyError, match="middle"):
        report.render("page", title="A", end="")


def test_every_template_is_rendered_somewhere() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    named = set(re.findall(r'render\(\s*f?"([\w/{}]+)"', sources))
    parts = {f"averaging/{part}" for part in ("waiting", "horovod")}
    named = (named | parts) - {"averaging/{part}"}
    there = {str(path.relative_to(report.TEMPLATES))[:-3] for path in report.TEMPLATES.rglob("*.*")}
    assert named == there


def test_what_was_written_by_hand_stays(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    report.write_page(page, "first")
    assert page.read_text() == "first\n"
    page.write_text(f"first\n\n{report.END}\n\nNotes.\n")
    report.write_page(page, "second")
    assert page.read_text() == f"second\n\n{report.END}\n\nNotes.\n"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], "-"), ([0.5], "0.50"), ([3, 1, 200], "3.00 (1.00-200)"), ([10, 30], "20.0 (10.0-30.0)")],
)
def test_median_and_range(values: list[float], wanted: str) -> None:
    assert report.spread(values) == report.spread(pd.Series(values, dtype=float)) == wanted


def test_ranges_as_they_are_asked_for() -> None:
    told = report.spread([1, 2, 6], "{:+.1f}".format, statistics.fmean, " to ")
    assert told == "+3.0 (+1.0 to +6.0)"
    assert report.spread([1, 2, 6], report.digits(0)) == "2 (1-6)"
