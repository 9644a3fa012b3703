"""Tests of text tables: formats of columns, missing values, Markdown and the terminal."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from examples.tables import as_markdown, as_text, format_table

COLUMNS = {"name": "`{name}`", "range": "{low:.0f} to {pair[1]:.1f}", "number": "{number:,}"}
ROWS = [
    {"name": "a", "low": 1.2, "pair": (0, 2.34), "number": 1000},
    {"name": "b", "low": math.nan, "pair": (0, 5.0), "number": None},
]


@pytest.mark.parametrize("rows", [ROWS, pd.DataFrame(ROWS)], ids=["rows", "frame"])
def test_cells_are_formatted_and_missing_values_are_dashes(rows: object) -> None:
    table = format_table({**COLUMNS, "number": "{number:.0f}"}, rows)
    assert list(table.columns) == list(COLUMNS)
    assert table.to_numpy().tolist() == [["`a`", "1 to 2.3", "1000"], ["`b`", "- to 5.0", "-"]]


def test_a_name_that_is_missing_in_a_row_is_an_error() -> None:
    with pytest.raises(KeyError, match="number"):
        format_table(COLUMNS, [{"name": "a", "low": 1.0, "pair": (0, 1.0)}])


def test_tables_as_text() -> None:
    table = pd.DataFrame([["a", "long one", "1.50"], ["b", "", "10"]], columns=["n", "kind", "x"])
    assert as_markdown(table).splitlines() == [
        "| n | kind | x |", "|---|---|---:|", "| a | long one | 1.50 |", "| b |  | 10 |",
    ]  # fmt: skip
    assert as_markdown(table, left=[1]).splitlines()[1] == "|---:|---|---:|"
    assert as_markdown(table.iloc[:0]).splitlines() == ["| n | kind | x |", "|---|---|---:|"]
    assert as_text(table).splitlines() == [
        "n    kind         x", "---  --------  ----", "a    long one  1.50", "b                10",
    ]  # fmt: skip
