"""What docs/compressors.md says is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from accordion_hvd import compressors
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


def test_compressors_without_a_row_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compressors, "__all__", [*compressors.__all__, "Newest"])
    volumes.main(["--output", str(tmp_path / "page.md")])
    assert "no row yet: Newest" in capsys.readouterr().out


def test_the_page_is_up_to_date() -> None:
    """Else: `python scripts/volumes.py`."""
    assert PAGE.read_text() == volumes.page() + "\n"
