"""Tables, sizes, rates, times and errors of the command `accordion-hvd`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import click

SIZES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Misuse(click.ClickException):
    """A sentence about arguments that are not allowed; the exit status is 2."""

    exit_code = 2


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), sparse: bool = False) -> str:
    """Return the header and the rows as a table; all columns but `left` are numbers.

    If `sparse`, columns that have nothing below their header are left out.
    """
    columns = enumerate(zip(*rows, strict=True))
    widths = {i: max(map(len, x)) for i, x in columns if not sparse or any(x[1:])}
    lines = []
    for row in rows:
        aligned = [row[i].ljust(n) if i in left else row[i].rjust(n) for i, n in widths.items()]
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


def parse_rate(word: str) -> float | None:
    """Return the bits per second of "50mbit", "1gbit" etc.; None for "none", an unlimited link.

    Raises:
        ValueError: if `word` is not a rate.
    """
    if word == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", word.lower())
    if match is None or not float(match[1]):
        raise ValueError(f"rate {word!r} is invalid; write '200mbit', '1gbit' or 'none'.")
    return float(match[1]) * RATES[match[2]]


def parse_time(word: str) -> float:
    """Return the seconds of "20ms" etc.; 0 for "none" and "0".

    Raises:
        ValueError: if `word` is not a time.
    """
    if word in ("none", "0"):
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", word.lower())
    if match is None:
        raise ValueError(f"time {word!r} is invalid; write '20ms', '1.5s' or 'none'.")
    return float(match[1]) * TIMES[match[2]]
