"""Bytes that a rank sends and receives, as counted in simulation.

`scripts/bytes_sent.py` writes docs/compressors.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from accordion_hvd import Compressor, simulate
from accordion_hvd.simulation import Link, simulate_job
from benchmarks.compressors import many_ranks
from benchmarks.compressors.catalog import CATALOG, first_usual_step
from benchmarks.report import render, write_page
from examples.command_line import read_options
from examples.tables import as_markdown

SHAPE = (500, 400)
"""The gradient whose bytes the tables show."""

RANKS = (2, 4, 16, 64)
MANY = 1024
"""Number of ranks whose requests are recorded, since their simulation would be large."""


@functools.cache
def counted(compressor: Compressor, ranks: int) -> tuple[float, float]:
    """Return the bytes that `stats()` counts in a step, sent and received: means over ranks.

    If phases repeat, they are means over a period, too.
    """
    period = compressor.period or 1
    world = simulate(compressor, ranks, local_size=1 + compressor.topology_aware)
    draw = np.random.default_rng(0)
    totals = [(0.0, 0.0)]
    for _ in range(first_usual_step(compressor) + period):
        world.step([{"w": draw.standard_normal(SHAPE, np.float32)} for _ in range(ranks)], lr=0.1)
        stats = [exchange.stats() for exchange in world.exchanges]
        totals.append((_mean(stats, "sent"), _mean(stats, "received")))
    (sent, received), (sent_before, received_before) = totals[-1], totals[-1 - period]
    return (sent - sent_before) / period, (received - received_before) / period


def recorded(compressor: Compressor) -> float:
    """Return the bytes that one of `MANY` ranks sends, or about, if they depend on the values."""
    if getattr(compressor, "uneven", False):
        return counted(compressor, RANKS[-1])[0] * (MANY - 1) / (RANKS[-1] - 1)
    link = Link(local_size=1 + compressor.topology_aware)
    start = first_usual_step(compressor)
    period = compressor.period or 1
    before, after = (
        steps * simulate_job({"w": SHAPE}, compressor, MANY, steps, link=link).sent_by_rank
        if steps
        else 0.0
        for steps in (start, start + period)
    )
    return (after - before) / period


def _mean(stats: Sequence[dict[str, Any]], key: str) -> float:
    return sum(entry[key] for entry in stats) / len(stats)


def table(chosen: Sequence[Compressor] = CATALOG) -> pd.DataFrame:
    """Return a table with a row for each compressor."""
    rows = [
        [
            f"`{compressor!r}`",
            *(_cell(*counted(compressor, ranks)) for ranks in RANKS),
            f"{recorded(compressor) / 1e3:.1f}",
        ]
        for compressor in chosen
    ]
    return pd.DataFrame(rows, columns=["compressor", *(f"n = {n}" for n in (*RANKS, MANY))])


def _cell(sent: float, received: float) -> str:
    """Format bytes in kB; list both numbers if they differ."""
    if abs(sent - received) <= 0.005 * sent:
        return f"{sent / 1e3:.1f}"
    return f"{sent / 1e3:.1f} / {received / 1e3:.1f}"


def page(chosen: Sequence[Compressor] = CATALOG) -> str:
    """Return the text of docs/compressors.md."""
    rows, columns = SHAPE
    size = f"{4e-3 * rows * columns:.0f}"
    cells = as_markdown(table(chosen), left=(0,))
    text = render("compressors", rows=rows, columns=columns, size=size, table=cells)
    return f"{text}\n\n{many_ranks.section()}"


@dataclass(frozen=True)
class Options:
    """Write a page with the bytes that each compressor sends, and docs/data/many_ranks.csv.

    Args:
        output: page to write.
    """

    output: Path = Path("docs/compressors.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    path = read_options(Options, arguments, owner="bytes_sent.py").output
    many_ranks.write()
    write_page(path, page())
    print(f"page: {path}")


if __name__ == "__main__":
    main()
