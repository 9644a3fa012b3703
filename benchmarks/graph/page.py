"""Results of comparisons of samplers: docs/graph.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks import report
from examples.graph import report as graph_report
from examples.graph.report import COMPARED, LINKS, methods
from examples.results import Row, read_json
from examples.tables import as_markdown, format_table


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
        fewer = 3 * runs["remote"].mean() <= base["remote"].mean()
        if runs is not base and points >= -0.5 and fewer:
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
    "ms an epoch": "{median:.0f}",
    "range": "{min:.0f} to {max:.0f}",
    "times as fast": "{faster:.2f}",
}
MOMENTS = {
    "mode": "{mode}",
    "D": "{budget:g}",
    "remote rows": "{remote:.0f}",
    "M(q) / M(p), equal": "{constant_1_ratio:.2f}",
    "M(q) / M(p), random": "{relu_1_ratio:.2f}",
    "second moment": "{moment:.3f}",
    "variance, equal": "{constant_1_variance:.4f}",
    "variance, random": "{relu_1_variance:.4f}",
    "2 hops, equal": "{constant_2_variance:.4f}",
    "2 hops, random": "{relu_2_variance:.4f}",
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
        for (kind, value), runs in by_method.items():
            row = {"wire": result["settings"]["wire"] or "fp32", "sampler": f"{kind} = {value:g}"}
            times = _epoch_ms(runs).agg(["median", "min", "max"])
            faster = _epoch_ms(by_method["s", 1.0]).median() / times["median"]
            megabytes = runs["received"].mean() / 1e6
            rows.append({**row, **times, "faster": faster, "megabytes": megabytes})
    table = as_markdown(format_table(ON_LINKS, rows))
    return report.render("graph/links", title=graph_report.title(found[0]), table=table)


def _epoch_ms(runs: pd.DataFrame) -> pd.Series:
    """Return the milliseconds of each epoch but the first, of all trainings."""
    return pd.Series([1000 * row["seconds"] for rows in runs["epochs"] for row in rows[1:]])


def _moments(found: Row) -> str:
    """Return the section with second moments and variances."""
    rows = pd.json_normalize(found["samplers"], sep="_")
    base = rows[rows["budget"] == 1].set_index("mode")["relu_1_moment"]
    rows["moment"] = rows["relu_1_moment"] / rows["mode"].map(base)
    return report.render(
        "graph/moments",
        **{key: f"{found[key]:,}" for key in ("nodes", "edges", "targets", "fanout", "draws")},
        parts=found["parts"],
        table=as_markdown(format_table(MOMENTS, rows), left=[0]),
        summary=_increase(rows.set_index(["mode", "budget"])),
    )


def _increase(rows: pd.DataFrame) -> str:
    """State, in a sentence, how much the variance increases at D = 2; empty if not measured."""
    variances = rows[["relu_1_variance", "relu_2_variance"]]
    if not {("fixed", 1.0), ("fixed", 2.0)} <= set(variances.index):
        return ""
    one, two = variances.loc["fixed", 2.0] / variances.loc["fixed", 1.0]
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
        table=as_markdown(format_table(SAMPLING, rows)),
    )
