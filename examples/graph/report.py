"""Comparisons of samplers: from settings to a table and a plot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from examples.command_line import stop
from examples.data import DataError, load_graph
from examples.graph.config import GraphSettings
from examples.pictures import figure
from examples.report import FRAMEWORKS
from examples.results import Row
from examples.tables import as_text, format_table

COLUMNS = {
    "sampler": "{sampler}",
    "test accuracy": "{accuracy:.2f} %",
    "points against s = 1": "{against}",
    "remote rows an epoch": "{remote:.1f}",
    "times fewer": "{fewer}",
    "MB an epoch": "{received:.3f}",
    "ms an epoch": "{seconds:.1f}",
}
COMPARED = ("cora", "citeseer", "blocks")
LINKS = ("links", "links_int8")
"""Names of the comparisons in `make bench-graph`."""

NAMES = {"cora": "Cora", "citeseer": "Citeseer", "blocks": "a stochastic block model"}


def start(settings: GraphSettings) -> Row:
    """Train with all samplers and print the results; exit at once if the data are missing."""
    try:
        data = load_graph(settings.data, settings.nodes)
    except DataError as error:
        stop(str(error))
    from examples.graph import training

    result = training.run(settings, data)
    if result["rank"] == 0:
        folder = Path(settings.output) / settings.name
        picture([result], folder / "result.png")
        sys.stdout.write(f"{title(result)}\n\n{as_text(table(result))}\n\nsee {folder}/\n")
        sys.stdout.flush()
    return result


def method_of(run: Row) -> tuple[str, float]:
    """Return the sampler of a training, such as ("s", 2.0) or ("D", 1.5)."""
    return ("s", run["skew"]) if "skew" in run else ("D", run["budget"])


def methods(result: Row) -> dict[tuple[str, float], pd.DataFrame]:
    """Return the trainings of each sampler, in order of first appearance."""
    runs = pd.DataFrame(result["runs"])
    samplers = pd.Series([method_of(run) for run in result["runs"]])
    return dict(iter(runs.groupby(samplers, sort=False)))


def difference(runs: pd.DataFrame, base: pd.DataFrame) -> tuple[float, float]:
    """Return the mean difference in accuracy to the base sampler, and its standard error.

    The difference, in percentage points, is taken between trainings of the same seed.
    """
    mine, other = (found.set_index("seed")["accuracy"] for found in (runs, base))
    points = 100 * (mine - other).dropna()
    return points.mean(), points.sem()


def table(result: Row) -> pd.DataFrame:
    """Return the table, with means over seeds."""
    rows: list[Row] = []
    by_method = methods(result)
    base = by_method.get(("s", 1.0))
    for (kind, value), runs in by_method.items():
        means = runs[["accuracy", "remote", "received", "seconds"]].mean() * [100, 1, 1e-6, 1e3]
        row: Row = {"sampler": f"{kind} = {value:g}", "against": "", "fewer": "", **means}
        if runs is base:
            row["sampler"] += " (base)"
        elif base is not None:
            points, error = difference(runs, base)
            row["against"] = f"{points:+.2f}" + (f" ± {error:.2f}" if error == error else "")
            remote = base["remote"].mean()
            row["fewer"] = f"{remote / row['remote']:.1f}" if row["remote"] else "-"
        rows.append(row)
    return format_table(COLUMNS, rows)


def title(result: Row) -> str:
    """Describe the framework, the data and the settings in a line."""
    settings = result["settings"]
    hops = ", ".join(map(str, settings["sizes"]))
    count = max(map(len, methods(result).values()))
    seeds = f"{count} seed" if count == 1 else f"{count} seeds"
    kind = "nodes a layer" if settings["sampling"] == "layer" else "neighbours of a node"
    return (
        f"{FRAMEWORKS[settings['framework']]} on {NAMES[settings['data']]} "
        f"({result['nodes']:,} nodes, {result['edges']:,} edges, {result['features']} features), "
        f"{result['ranks']} ranks, parts by {settings['partition']} ({result['cut_share']:.1%} of "
        f"edges cut), {hops} {kind}, "
        f"mode {settings['mode']}, {settings['epochs']} epochs, {seeds}"
    )


# ----------------------------------------------------------------------------------------- the plot
COLOURS = {"s": "#0072B2", "D": "#D55E00"}
"""Colours that colour-blind readers can distinguish (Okabe & Ito)."""


def picture(results: Sequence[Row], path: Path) -> None:
    """Plot test accuracy against remote rows, with a panel for each comparison."""
    with figure(path, (5.2 * len(results), 4.6), columns=len(results)) as (_, axes):
        for axis, result in zip(axes[0], results, strict=True):
            _panel(axis, result)
        axes[0][0].set_ylabel("test accuracy (%), mean and standard deviation over seeds")


def _panel(axis: Any, result: Row) -> None:
    by_method = methods(result)
    for kind, label in (("s", "constant skew s"), ("D", "second-moment budget D")):
        points = sorted((x, runs) for (which, x), runs in by_method.items() if which == kind)
        rows = [runs["remote"].mean() for _, runs in points]
        accuracy = [100 * runs["accuracy"].mean() for _, runs in points]
        spread = [100 * runs["accuracy"].std(ddof=0) for _, runs in points]
        axis.errorbar(
            rows, accuracy, yerr=spread, color=COLOURS[kind], marker="o", capsize=3, lw=1.4,
            label=label,
        )  # fmt: skip
        for (value, _), x, y in zip(points, rows, accuracy, strict=True):
            axis.annotate(
                f"{kind} = {value:g}", (x, y), xytext=(0, 8 if kind == "s" else -14),
                textcoords="offset points", ha="center", fontsize=9, color=COLOURS[kind],
            )  # fmt: skip
    base = by_method.get(("s", 1.0))
    if base is not None:
        axis.axhline(100 * base["accuracy"].mean() - 0.5, color="grey", ls=":", lw=1)
    settings = result["settings"]
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlabel("rows from other ranks an epoch (logarithmic)")
    axis.set_title(f"{NAMES[settings['data']]}, {result['ranks']} ranks", fontsize=11)
    axis.margins(x=0.12, y=0.15)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
