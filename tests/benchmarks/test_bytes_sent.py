"""Tests of docs/compressors.md: its formulas agree with the bytes that are counted."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from accordion_hvd import compressors
from accordion_hvd.compressors import QSGD, DoubleSqueeze
from benchmarks.compressors import bytes_sent, many_ranks
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


@pytest.mark.parametrize("row", CATALOG, ids=lambda row: repr(row.compressor))
def test_formulas_hold_on_a_thousand_ranks(row: CatalogRow) -> None:
    """Parts of 200 elements have some padding."""
    if row.moved:
        found = bytes_sent.recorded(row)
        assert bytes_sent.by_formula(row, bytes_sent.MANY) == pytest.approx(found, rel=0.05, abs=16)


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


def test_the_table_of_many_ranks_is_up_to_date() -> None:
    """The table and its section are up to date; if not, run `python scripts/bytes_sent.py`."""
    kept = pd.read_csv(many_ranks.TABLE)
    ranks = [8, 64]
    found = pd.DataFrame(many_ranks.rows(ranks=ranks))
    chosen = kept[kept.ranks.isin(ranks)].reset_index(drop=True)
    pd.testing.assert_frame_equal(chosen, found, check_dtype=False)
    assert len(kept) == len(many_ranks.FORMS) * len(many_ranks.RANKS) * len(many_ranks.PLACES)
    assert many_ranks.section() in PAGE.read_text()


def test_times_of_many_ranks_are_rounds_and_bytes() -> None:
    """On a slow link, time is bytes; on a fast one, parts take one round more for each group."""
    model = {"w": (512, 512)}
    slow, fast = many_ranks.Place(1e-3, 0.0), many_ranks.Place(1e9, 2.0)
    rounds = {QSGD(4): 6, DoubleSqueeze(QSGD(4)): 7}  # of log2 64, and an alltoall
    for form, count in rounds.items():
        program = many_ranks.recorded(form, 64, model)
        assert slow.seconds(program, 64) == pytest.approx(program.traffic.sent / 125e3, rel=1e-6)
        assert fast.seconds(program, 64) == pytest.approx(1e-3 * count, rel=1e-3)
