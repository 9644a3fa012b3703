"""Bytes that a rank sends and receives, by formula and as counted in simulation.

`scripts/bytes_sent.py` writes docs/compressors.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from accordion_hvd import simulate
from accordion_hvd.ops import indices
from accordion_hvd.simulation import Link, simulate_job
from benchmarks.compressors import many_ranks
from benchmarks.compressors.catalog import CATALOG, CatalogRow, missing
from benchmarks.report import render, write_page
from examples.command_line import read_options
from examples.tables import as_markdown

SHAPE = (500, 400)
"""The gradient whose bytes the tables show."""

RANKS = (2, 4, 16, 64)
MANY = 1024
"""Number of ranks whose requests are recorded, since their simulation would be large."""


@functools.cache
def counted(row: CatalogRow, ranks: int) -> tuple[float, float]:
    """Return the bytes that `stats()` counts in a step, sent and received: means over ranks.

    If phases repeat, they are means over a period, too.
    """
    period = row.compressor.period or 1
    world = simulate(row.compressor, ranks, local_size=row.local)
    draw = np.random.default_rng(0)
    totals = [(0.0, 0.0)]
    for _ in range(row.after + period):
        world.step([{"w": draw.standard_normal(SHAPE, np.float32)} for _ in range(ranks)], lr=0.1)
        stats = [exchange.stats() for exchange in world.exchanges]
        totals.append((_mean(stats, "sent"), _mean(stats, "received")))
    (sent, received), (sent_before, received_before) = totals[-1], totals[-1 - period]
    return (sent - sent_before) / period, (received - received_before) / period


def recorded(row: CatalogRow) -> float:
    """Return the bytes that one of `MANY` ranks sends, or about, if they depend on the values."""
    if not row.moved:
        return counted(row, RANKS[-1])[0] * (MANY - 1) / (RANKS[-1] - 1)
    period, link = row.compressor.period or 1, Link(local_size=row.local)
    before, after = (
        steps * simulate_job({"w": SHAPE}, row.compressor, MANY, steps, link=link).sent_by_rank
        if steps
        else 0.0
        for steps in (row.after, row.after + period)
    )
    return (after - before) / period


def _mean(stats: Sequence[dict[str, Any]], key: str) -> float:
    return sum(entry[key] for entry in stats) / len(stats)


def by_formula(row: CatalogRow, ranks: int) -> float:
    """Return the bytes that a rank sends in a step, according to `CatalogRow.moved`."""
    outer, (a, b) = row.compressor, SHAPE
    compressor = getattr(outer, "codec", outer)
    names: dict[str, Any] = {
        f.name: getattr(compressor, f.name)
        for f in fields(compressor)  # type: ignore[arg-type]
    }
    names |= {"n": ranks, "d": a * b, "a": a, "b": b, "packed": indices.packed_length}
    names |= {"L": row.local, "m": ranks // row.local}
    if hasattr(compressor, "kept"):
        names["k"] = compressor.kept(a * b)
    return float(eval(row.moved, {"__builtins__": {}}, names))


def table() -> pd.DataFrame:
    """Return a table with a row for each compressor."""
    rows = []
    for row in CATALOG:
        formula = f"`{row.moved}`" if row.moved else "depends on the values"
        cells = [_cell(*counted(row, ranks)) for ranks in RANKS]
        cells.append(f"{recorded(row) / 1e3:.1f}")
        rows.append([f"`{row.compressor!r}`", formula, *cells])
    head = [
        "compressor",
        "bytes sent by each of n ranks",
        *(f"n = {ranks}" for ranks in (*RANKS, MANY)),
    ]
    return pd.DataFrame(rows, columns=head)


def _cell(sent: float, received: float) -> str:
    """Format bytes in kB; list both numbers if they differ."""
    if abs(sent - received) <= 0.005 * sent:
        return f"{sent / 1e3:.1f}"
    return f"{sent / 1e3:.1f} / {received / 1e3:.1f}"


def page() -> str:
    """Return the text of docs/compressors.md."""
    rows, columns = SHAPE
    size = f"{4e-3 * rows * columns:.0f}"
    text = render("compressors", rows=rows, columns=columns, size=size, table=as_markdown(table()))
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
    if names := missing():
        print(f"no row yet: {', '.join(names)}")


if __name__ == "__main__":
    main()
