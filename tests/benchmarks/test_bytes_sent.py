"""Tests of docs/compressors.md: its rows are the bytes that are counted."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from accordion_hvd import TopAgg, compressors
from accordion_hvd.compressors import QSGD, DoubleSqueeze
from benchmarks.compressors import bytes_sent, catalog, many_ranks
from benchmarks.compressors.catalog import CATALOG

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compressors.md"


def test_a_compressor_without_a_setting_is_measured_in_its_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {type(compressor) for compressor in CATALOG} == {
        TopAgg, *(getattr(compressors, name) for name in compressors.__all__)
    }  # fmt: skip
    monkeypatch.setattr(catalog, "SETTINGS", "Dense()")
    assert {*compressors.__all__} == {type(compressor).__name__ for compressor in catalog.usual()}


@pytest.mark.nightly
def test_the_page_is_up_to_date() -> None:
    """The rows of the page are right; if not, run `python scripts/bytes_sent.py`.

    The page may lack rows of new compressors.
    """
    text = PAGE.read_text()
    chosen = [compressor for compressor in CATALOG if f"| `{compressor!r}` |" in text]
    assert text == bytes_sent.page(chosen) + "\n" and len(chosen) > 30


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
