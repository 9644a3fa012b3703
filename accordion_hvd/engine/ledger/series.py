"""Sums over consecutive steps, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("compute", "encode", "wait", "decode", "decide", "graph")
"""Parts of the time of a step; they add up to it."""

LIMIT = 512
"""Maximum number of rows of a series."""


class Series:
    """Numbers that are added up over windows of consecutive steps.

    All windows have the same number of steps, except the last one. When there are `limit` windows,
    each two neighbours are merged, and windows become twice as long. So memory is bounded, and no
    step is lost.

    Args:
        limit: maximum number of windows; even.

    Attributes:
        span: number of steps in a window.
        rows: for each window, the number of its steps and the sums of its columns.
    """

    def __init__(self, columns: Sequence[str], limit: int = LIMIT) -> None:
        self.columns, self.limit = tuple(columns), limit
        self.span = 1
        self.rows: list[list[float]] = []

    def add(self, values: Mapping[str, float], steps: int = 1) -> None:
        """Add the numbers of `steps` steps; columns that are not in `values` get 0.

        The steps stay together, so that a window may exceed its length by up to `steps` - 1.
        """
        row = [float(steps), *[values.get(column, 0.0) for column in self.columns]]
        if self.rows and self.rows[-1][0] + steps <= self.span:
            self.rows[-1] = _sum(self.rows[-1], row)
            return
        self.rows.append(row)
        if len(self.rows) == self.limit:
            pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
            self.rows = [_sum(first, second) for first, second in pairs]
            self.span *= 2

    def total(self, column: str) -> float:
        place = 1 + self.columns.index(column)
        return sum(row[place] for row in self.rows)

    @property
    def steps(self) -> int:
        return int(sum(row[0] for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the series for JSON: the columns `steps` and `columns`, one list each."""
        names = ("steps", *self.columns)
        return {name: [row[place] for row in self.rows] for place, name in enumerate(names)}


def thinned(rows: list[Any], limit: int) -> list[Any]:
    """Return `rows`, or if there are `limit` of them, every second one and the last."""
    return rows if len(rows) < limit else [*rows[:-1:2], rows[-1]]


def _sum(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]
