"""docs/compressors.md says what is so, of every compressor."""

from __future__ import annotations

from pathlib import Path

import pytest

import accordion_hvd
from benchmarks.compressors import volumes
from benchmarks.compressors.shelf import SHELF, Volume

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compressors.md"


@pytest.mark.parametrize("volume", SHELF, ids=lambda volume: repr(volume.compressor))
def test_formulas_are_what_is_counted(volume: Volume) -> None:
    for ranks in volumes.RANKS:
        sent, received = volumes.counted(volume, ranks)
        assert sent == pytest.approx(received, rel=0.01) or not volume.moved
        if volume.moved:
            assert volumes.by_formula(volume, ranks) == pytest.approx(sent, rel=0.01)


def test_a_wrong_formula_is_noticed() -> None:
    wrong = Volume(SHELF[0].compressor, "(n-1)/n * 4*d")
    with pytest.raises(AssertionError):
        test_formulas_are_what_is_counted(wrong)


def test_the_whole_shelf_is_there() -> None:
    shelf = {getattr(accordion_hvd.compressors, name) for name in accordion_hvd.compressors.__all__}
    assert shelf | {accordion_hvd.TopAgg} == {type(volume.compressor) for volume in SHELF}


def test_the_page_is_up_to_date() -> None:
    """Else: `python scripts/volumes.py`."""
    assert PAGE.read_text() == volumes.page() + "\n"
