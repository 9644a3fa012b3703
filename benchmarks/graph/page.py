"""docs/graph.md: what comparisons of samplers have shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.graph import report as graph_report
from examples.graph.report import COMPARED, LINKS, mean, ways
from examples.report import as_markdown, write_page
from examples.results import Row, read_json

INTRODUCTION = """
# Skewed neighbour sampling

Written by `make bench-graph` from what it measured, but for notes at the end. Each rank samples
neighbours for its own training nodes and fetches the features of those that other ranks own. Local
nodes are s times as likely as by the base sampler, s constant or found for each batch from a
variance budget D, and everything is weighted by the probability with which it was drawn.

![test accuracy against rows from other ranks](graph.png)

Dotted: half a point below the base sampler. Rows are distinct rows a fetch, of all ranks together;
MB are what all ranks received for them, the numbers of nodes included, and without headers.
Accuracy is that at the epoch with the best validation accuracy; its difference to the base sampler
is taken seed by seed, with the standard error of the mean. Evaluations use all neighbours.
"""

HONESTLY = """
## What the words mean

- The idea (prefer local nodes, keep the estimate unbiased, choose the skew so that training still
  converges) is that of Jiang & Rumi, "Communication-Efficient Sampling for Distributed Training of
  Graph Convolutional Networks" (arXiv 2101.07706), whose abstract is all that we could read. The
  budget and its closed forms are our own.
- D bounds the second moment of the estimate, relative to the base sampler's, for i.i.d. draws and
  features of equal norm. s is at most 20, so on graphs with few cut edges larger budgets change
  little.
- Several ranks share this machine's cores: times of an epoch say little without limited links, and
  are those of the slowest rank, evaluations left out.
"""


def write(folder: Path, output: Path) -> Path:
    """Make the page and the picture; returns the page's path."""
    compared = [found for name in COMPARED if (found := _read(folder / name / "result.json"))]
    links = [found for name in LINKS if (found := _read(folder / name / "result.json"))]
    speed = _read(folder / "sampling.json")
    parts = [INTRODUCTION]
    for found in compared:
        parts += [f"## {_heading(found)}", f"{graph_report.title(found)}.", _table(found)]
        parts.append(summary(found))
    parts += [_links(links)] if links else []
    parts += [_speed(speed)] if speed else []
    parts.append(HONESTLY)
    output.mkdir(parents=True, exist_ok=True)
    if compared:
        graph_report.picture(compared, output / "graph.png")
    page = output / "graph.md"
    write_page(page, parts)
    return page


def _read(path: Path) -> Row | None:
    return read_json(path) if path.exists() else None


def _heading(found: Row) -> str:
    name = graph_report.NAMES[found["settings"]["data"]].removeprefix("a ")
    return name[0].upper() + name[1:]


def _table(found: Row) -> str:
    rows = graph_report.table(found)
    return as_markdown(rows).replace("|---|---|", "|---|---:|", 1)


def summary(found: Row) -> str:
    """Which samplers save a factor of three within half a point, in a sentence."""
    by_way = ways(found)
    base = by_way.get(("s", 1.0))
    if base is None:
        return ""
    good = []
    for (kind, value), runs in by_way.items():
        points, _ = graph_report.difference(runs, base)
        remote = mean(runs, "remote")
        if runs is not base and points >= -0.5 and remote * 3 <= mean(base, "remote"):
            good.append(f"{kind} = {value:g}")
    if not good:
        return "No sampler fetches a third of the rows or less within half a point of accuracy."
    return (
        f"At least 3 times fewer rows, and at most half a point of accuracy less in the mean: "
        f"{', '.join(good)}."
    )


def _links(found: Sequence[Row]) -> str:
    """Epochs on limited links."""
    head = ["rows travel as", "sampler", "MB an epoch", "ms an epoch", "range", "times as fast"]
    rows = [head]
    for one in found:
        by_way = ways(one)
        base = statistics.median(_epochs(by_way[("s", 1.0)]))
        for (kind, value), runs in by_way.items():
            times = _epochs(runs)
            middle = statistics.median(times)
            rows.append(
                [
                    one["settings"]["wire"] or "fp32",
                    f"{kind} = {value:g}",
                    f"{mean(runs, 'received') / 1e6:.2f}",
                    f"{1000 * middle:.0f}",
                    f"{1000 * min(times):.0f} to {1000 * max(times):.0f}",
                    f"{base / middle:.2f}",
                ]
            )
    first = found[0]
    return "\n\n".join(
        [
            "## Epochs at 200 Mbit/s",
            f"{graph_report.title(first)}. Each rank is a host of its own, whose link is limited "
            "to 200 Mbit/s both ways (`scripts/netbench.py run`). Medians over epochs and seeds, "
            "the first epoch of each training left out.",
            as_markdown(rows),
        ]
    )


def _epochs(runs: Sequence[Row]) -> list[float]:
    return [row["seconds"] for run in runs for row in run["epochs"][1:]]


def _speed(found: Row) -> str:
    rows = [["sampler", "D", "edges a batch", "million edges a second"]]
    for row in found["samplers"]:
        rate = f"{row['rate'] / 1e6:.2f}"
        rows.append([row["sampler"], f"{row['budget']:g}", f"{row['edges']:,.0f}", rate])
    return "\n\n".join(
        [
            "## What sampling costs",
            f"Two layers for 1,024 nodes of a block model ({found['nodes']:,} nodes, "
            f"{found['edges']:,} edges, {found['parts']}), on one core.",
            as_markdown(rows),
        ]
    )
