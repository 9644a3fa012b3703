"""Tables, sizes and errors of the command `accordion-hvd`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click

SIZES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


class Misuse(click.ClickException):
    """A sentence about arguments that are not allowed; the exit status is 2."""

    exit_code = 2


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return the header and the rows as a table; all columns but `left` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [x.ljust(n) if i in left else x.rjust(n) for i, (x, n) in enumerate(cells)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def short(number: float) -> str:
    """Format a number with about three digits."""
    return f"{number:.0f}" if 100 <= abs(number) < 1e6 else f"{number:.3g}"


def size(count: float) -> str:
    """Format a number of bytes: "4.38 kB"."""
    unit = next((unit for unit, least in SIZES.items() if count >= least), "B")
    return f"{short(count / SIZES.get(unit, 1))} {unit}"


def number_of(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks" etc."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
