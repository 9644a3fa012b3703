"""Picture of milliseconds per step for each method and rate, with the limit of the link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netbench import tables
from benchmarks.netbench.contestants import (
    ALONE,
    COMPUTE,
    DDP,
    FP16,
    HOOK,
    OURS,
    OVER,
    SHARDED,
    STOCK,
    is_ours,
)
from benchmarks.netbench.links import describe
from examples.pictures import figure
from examples.report import FRAMEWORKS
from examples.results import Row

KINDS = {
    "computation alone": "#7f7f7f",
    "Horovod": "#0072B2",
    "PyTorch DDP": "#E69F00",
    "accordion_hvd": "#009E73",
}
"""Colours that colour-blind readers can distinguish (Okabe & Ito)."""

SHOWN = (
    COMPUTE, STOCK, STOCK + FP16, DDP, DDP + FP16, f"{DDP} powersgd:1", f"{DDP} powersgd:4",
    *(prefix + word for word in ("fp16", "powersgd:4") for prefix in (OURS, OVER)),
    *(HOOK + word for word in ("powersgd:1", "powersgd:4", "powersgd:4,alternate", "topk:0.01")),
)  # fmt: skip
"""Methods in PyTorch that the picture shows; the page has tables of all."""


def shown(found: Row) -> list[str]:
    """Return the methods that the picture shows: those in `SHOWN`, or all if some are missing."""
    methods = list(found["equal"])
    if not {*SHOWN} <= {*methods}:  # a selection, or Keras
        return methods
    return [method for method in methods if method in SHOWN]


def kind(method: str) -> str:
    """Return the key in `KINDS` of a method's implementation."""
    if method in ALONE:
        return "computation alone"
    if is_ours(method):
        return "accordion_hvd"
    return "PyTorch DDP" if method.startswith(DDP) else "Horovod"


def draw(found: Sequence[Row], path: Path) -> None:
    """Draw a panel for each result (rows) and rate (columns); sharded models have none."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    whole = [result for result in found if SHARDED not in result["equal"]]
    found = whole or found
    across = max(len(result["settings"]["rates"]) for result in found)
    heights = [len(shown(result)) + 2 for result in found]
    size = (2.2 + 3.9 * across, 1.2 + 0.31 * sum(heights))
    with figure(path, size, len(found), across, height_ratios=heights) as (canvas, axes):
        for row, result in enumerate(found):
            rates = result["settings"]["rates"]
            for column in range(across):
                if column < len(rates):
                    _panel(axes[row][column], result, rates[column], names=column == 0)
                else:
                    axes[row][column].set_axis_off()
        marks: list[Any] = [Patch(color=colour, label=name) for name, colour in KINDS.items()]
        mark = {"color": "black", "marker": "|", "ms": 13, "mew": 2, "ls": ""}
        limit = Line2D([], [], label="limit of link and computation", **mark)
        canvas.legend(handles=[*marks, limit], loc="outside lower center", ncols=len(marks) + 1)


def _panel(axis: Any, found: Row, rate: str, names: bool) -> None:
    """Draw the bars of one rate."""
    summaries = {
        each: tables.summary(found, each).loc[shown(found)] for each in found["settings"]["rates"]
    }
    rows = summaries[rate]
    most = max(each["most"].max() for each in summaries.values())
    least = min(each["least"].min() for each in summaries.values())
    for place, (method, row) in enumerate(rows.iterrows()):
        spread = [[row["ms"] - row["least"]], [row["most"] - row["ms"]]]
        axis.barh(
            place,
            row["ms"],
            color=KINDS[kind(method)],
            height=0.74,
            xerr=spread,
            error_kw={"lw": 0.8},
        )
        if method not in ALONE:
            axis.plot(row["limit"], place, "|", color="black", ms=13, mew=2)
        axis.annotate(
            f"{row['ms']:.0f}", (max(row["most"], row["limit"]), place), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), list(rows.index) if names else [""] * len(rows))
    axis.set_xticks([one * ten for ten in (1, 10, 100, 1000, 10000) for one in (1, 3)])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlim=(least / 2, most * 2.2), ylim=(len(rows) - 0.4, -0.6), axisbelow=True)
    axis.grid(alpha=0.3, axis="x")
    settings = found["settings"]
    name = f"{FRAMEWORKS[settings['framework']]}, {settings['model']}"
    axis.set_title(f"{name}, {describe(rate, settings)}", fontsize=11)
    axis.set_xlabel("ms a step (logarithmic)")
