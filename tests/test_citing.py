"""The page on citing names the paper of each public method."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "citing.md").read_text()
CATALOGS = ("compressors", "averaging", "optimizers", "policies")
WITHOUT_A_PAPER = {
    "BF16": "a cast",
    "Dense": "no compression",
    "Displacement": "ours",
    "FP16": "a cast",
    "Fixed": "one compressor throughout",
    "Gate": "ours",
    "Gathered": "sends a codec's messages as they are",
    "Nesterov": "the outer optimizer of DiLoCo",
    "Policy": "base class",
    "Replay": "repeats recorded decisions",
    "StepSchedule": "a schedule that the user writes",
    "Topology": "a graph of the ranks",
    "UpdateRule": "base class",
}
METHODS = [
    (catalog, name)
    for catalog in CATALOGS
    for name in importlib.import_module(f"accordion_hvd.{catalog}").__all__
]


def captions(page: str) -> list[str]:
    """Return the paragraphs that stand before entries and name our classes."""
    return re.findall(r"^(.+):\n\n```bibtex$", page, re.MULTILINE)


def cited(page: str) -> set[str]:
    return {name for line in captions(page) for name in re.findall(r"`(\w+)", line)}


@pytest.mark.parametrize(("catalog", "name"), METHODS)
def test_each_method_is_cited_or_has_no_paper(catalog: str, name: str) -> None:
    assert (name in cited(PAGE)) != (name in WITHOUT_A_PAPER), f"{catalog}.{name}"


def test_exceptions_exist() -> None:
    assert set(WITHOUT_A_PAPER) <= {name for _, name in METHODS}


def test_entries_are_complete_and_keys_differ() -> None:
    entries = re.findall(r"^```bibtex\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    keys = [re.match(r"@\w+\{(\w+),", entry) for entry in entries]
    assert all(keys)
    assert len({key[1] for key in keys if key}) == len(entries)
    for entry in entries:
        assert entry.count("{") == entry.count("}"), entry
        assert all(f"  {field} = {{" in entry for field in ("title", "author", "year")), entry


def test_version_is_that_of_the_citation_file() -> None:
    citation = (Path(__file__).resolve().parent.parent / "CITATION.cff").read_text()
    version = re.search(r"^version: (\S+)$", citation, re.MULTILINE)
    assert version
    assert f"version = {{{version[1]}}}" in PAGE
