"""Tests of docs/compressors.md: its formulas agree with the bytes that are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from accordion_hvd import compressors
from benchmarks.compressors import bytes_sent
from benchmarks.compressors.catalog import CATALOG, CatalogRow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compressors.md"


RANKS = [pytest.param(n, marks=[pytest.mark.nightly] if n > 16 else []) for n in bytes_sent.RANKS]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("row", CATALOG, ids=lambda row: repr(row.compressor))
def test_formulas_are_what_is_counted(row: CatalogRow, ranks: int) -> None:
    sent, received = bytes_sent.counted(row, ranks)
    assert sent == pytest.approx(received, rel=0.01) or not row.moved
    if row.moved:
        flag = 2 * (ranks - 1) / ranks * 8  # of an allreduce; formulas exclude it
        assert bytes_sent.by_formula(row, ranks) == pytest.approx(sent, rel=0.01, abs=flag)


def test_a_wrong_formula_is_noticed() -> None:
    wrong = CatalogRow(CATALOG[0].compressor, "(n-1)/n * 4*d")
    with pytest.raises(AssertionError):
        test_formulas_are_what_is_counted(wrong, 4)


@pytest.mark.nightly
def test_compressors_without_a_row_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compressors, "__all__", [*compressors.__all__, "Newest"])
    bytes_sent.main(["--output", str(tmp_path / "page.md")])
    assert "no row yet: Newest" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_page_is_up_to_date() -> None:
    """The page is up to date; if this fails, run `python scripts/bytes_sent.py`."""
    assert PAGE.read_text() == bytes_sent.page() + "\n"
