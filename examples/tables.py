"""Tables of text, made from values and written as Markdown or for a terminal."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pandas as pd
from tabulate import DataRow, TableFormat, tabulate


class _Cells(string.Formatter):
    """Formatter that writes a dash for a missing value."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Format one value."""
        return "-" if value is None or value != value else format(value, format_spec)


def format_table(
    columns: Mapping[str, str], rows: pd.DataFrame | Iterable[Mapping[str, Any]]
) -> pd.DataFrame:
    """Return a table of text.

    Args:
        columns: format of each column by its head, such as {"ms/step": "{ms:.1f}"}.
        rows: values by the names in the formats; a missing value becomes a dash.
    """
    found = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    cells = [[_Cells().vformat(cell, (), row) for cell in columns.values()] for row in found]
    return pd.DataFrame(cells, columns=list(columns))


def as_markdown(table: pd.DataFrame, left: Collection[int] = (0, 1)) -> str:
    """Write a table as Markdown, without padding, so that a change of a cell changes one line.

    Args:
        table: table of text.
        left: indices of the columns that are left-aligned; the others are right-aligned.
    """
    rule = "|".join("---" if column in left else "---:" for column in range(table.shape[1]))
    row = DataRow("| ", " | ", " |")
    compact = TableFormat(None, lambda *_: f"|{rule}|", None, None, row, row, 0, None)
    return table.to_markdown(index=False, tablefmt=compact, stralign=None, disable_numparse=True)


def as_text(table: pd.DataFrame) -> str:
    """Write a table of text for a terminal; the first two columns are left-aligned."""
    sides = ["left" if column < 2 else "right" for column in range(table.shape[1])]
    return tabulate(table, "keys", "simple", colalign=sides, showindex=False, disable_numparse=True)
