"""Results of comparisons of samplers: docs/graph.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from examples.graph import report as graph_report
from examples.graph.report import COMPARED, LINKS, mean, methods
from examples.report import as_markdown, tabulate
from examples.results import Row, read_json


def write(folder: Path, output: Path) -> Path:
    """Write the page and the picture; return the page's path."""
    compared = [found for name in COMPARED if (found := _read(folder / name / "result.json"))]
    links = [found for name in LINKS if (found := _read(folder / name / "result.json"))]
    moments, speed = _read(folder / "moments.json"), _read(folder / "sampling.json")
    text = report.render(
        "graph/page",
        comparisons=report.join([_comparison(found) for found in compared]),
        links=_links(links) if links else "",
        moments=_moments(moments) if moments else "",
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
    """Name, in a sentence, the samplers that save a factor of three within half a point."""
    by_method = methods(found)
    base = by_method.get(("s", 1.0))
    if base is None:
        return ""
    good = []
    for (kind, value), runs in by_method.items():
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


ON_LINKS = {
    "rows travel as": "{wire}",
    "sampler": "{sampler}",
    "MB an epoch": "{megabytes:.2f}",
    "ms an epoch": "{ms:.0f}",
    "range": "{least:.0f} to {most:.0f}",
    "times as fast": "{faster:.2f}",
}
MOMENTS = {
    "mode": "{mode}",
    "D": "{budget:g}",
    "remote rows": "{remote:.0f}",
    "M(q) / M(p), equal": "{constant_ratio:.2f}",
    "M(q) / M(p), random": "{relu_ratio:.2f}",
    "second moment": "{moment:.3f}",
    "variance, equal": "{constant_1:.4f}",
    "variance, random": "{relu_1:.4f}",
    "2 hops, equal": "{constant_2:.4f}",
    "2 hops, random": "{relu_2:.4f}",
}
SAMPLING = {
    "sampler": "{sampler}",
    "D": "{budget:g}",
    "edges a batch": "{edges:,.0f}",
    "million edges a second": "{millions:.2f}",
}


def _links(found: Sequence[Row]) -> str:
    """Return the section with epochs on limited links."""
    rows = []
    for result in found:
        by_method = methods(result)
        base = statistics.median(_epochs(by_method[("s", 1.0)]))
        for (kind, value), runs in by_method.items():
            times = _epochs(runs)
            middle = statistics.median(times)
            row = {"wire": result["settings"]["wire"] or "fp32", "sampler": f"{kind} = {value:g}"}
            row |= {"megabytes": mean(runs, "received") / 1e6, "faster": base / middle}
            row |= {"ms": 1000 * middle, "least": 1000 * min(times), "most": 1000 * max(times)}
            rows.append(row)
    table = as_markdown(tabulate(ON_LINKS, rows))
    return report.render("graph/links", title=graph_report.title(found[0]), table=table)


def _epochs(runs: Sequence[Row]) -> list[float]:
    return [row["seconds"] for run in runs for row in run["epochs"][1:]]


def _moments(found: Row) -> str:
    """Return the section with second moments and variances."""
    rows = []
    for each in found["samplers"]:
        base = next(
            row for row in found["samplers"] if (row["mode"], row["budget"]) == (each["mode"], 1)
        )
        row = {key: each[key] for key in ("mode", "budget", "remote")}
        for key in ("constant_1", "relu_1", "constant_2", "relu_2"):
            row[key] = each[key]["variance"]
        row |= {f"{name}_ratio": each[f"{name}_1"]["ratio"] for name in ("constant", "relu")}
        row["moment"] = each["relu_1"]["moment"] / base["relu_1"]["moment"]
        rows.append(row)
    return report.render(
        "graph/moments",
        **{key: f"{found[key]:,}" for key in ("nodes", "edges", "targets", "fanout", "draws")},
        parts=found["parts"],
        table=as_markdown(tabulate(MOMENTS, rows), left=[0]),
        summary=_increase({(row["mode"], row["budget"]): row for row in rows}),
    )


def _increase(rows: dict[tuple[str, float], Row]) -> str:
    """State, in a sentence, how much the variance increases at D = 2; empty if not measured."""
    if not {("fixed", 1.0), ("fixed", 2.0)} <= rows.keys():
        return ""
    base, skewed = rows["fixed", 1.0], rows["fixed", 2.0]
    one, two = (skewed[key] / base[key] for key in ("relu_1", "relu_2"))
    return (
        f'In mode "fixed" at D = 2, the variance with random features is {one:.1f} times that of '
        f"the base sampler over one hop and {two:.1f} times over two hops."
    )


def _speed(found: Row) -> str:
    rows = [{**row, "millions": row["rate"] / 1e6} for row in found["samplers"]]
    return report.render(
        "graph/sampling",
        nodes=f"{found['nodes']:,}",
        edges=f"{found['edges']:,}",
        parts=found["parts"],
        table=as_markdown(tabulate(SAMPLING, rows)),
    )
