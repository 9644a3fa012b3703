"""docs/graph.md: what comparisons of samplers have shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from examples.graph import report as graph_report
from examples.graph.report import COMPARED, LINKS, mean, ways
from examples.report import as_markdown
from examples.results import Row, read_json


def write(folder: Path, output: Path) -> Path:
    """Make the page and the picture; returns the page's path."""
    compared = [found for name in COMPARED if (found := _read(folder / name / "result.json"))]
    links = [found for name in LINKS if (found := _read(folder / name / "result.json"))]
    speed = _read(folder / "sampling.json")
    text = report.render(
        "graph/page",
        comparisons=report.join([_comparison(found) for found in compared]),
        links=_links(links) if links else "",
        sampling=_speed(speed) if speed else "",
    )
    page = output / "graph.md"
    report.write_page(page, text)
    if compared:
        graph_report.picture(compared, output / "graph.png")
    return page


def _read(path: Path) -> Row | None:
    return read_json(path) if path.exists() else None


def _comparison(found: Row) -> str:
    name = graph_report.NAMES[found["settings"]["data"]].removeprefix("a ")
    return report.render(
        "graph/comparison",
        heading=name[0].upper() + name[1:],
        title=graph_report.title(found),
        table=as_markdown(graph_report.table(found), left=[0]),
        summary=summary(found),
    )


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
    return report.render("graph/links", title=graph_report.title(found[0]), table=as_markdown(rows))


def _epochs(runs: Sequence[Row]) -> list[float]:
    return [row["seconds"] for run in runs for row in run["epochs"][1:]]


def _speed(found: Row) -> str:
    rows = [["sampler", "D", "edges a batch", "million edges a second"]]
    for row in found["samplers"]:
        rate = f"{row['rate'] / 1e6:.2f}"
        rows.append([row["sampler"], f"{row['budget']:g}", f"{row['edges']:,.0f}", rate])
    return report.render(
        "graph/sampling",
        nodes=f"{found['nodes']:,}",
        edges=f"{found['edges']:,}",
        parts=found["parts"],
        table=as_markdown(rows),
    )
