"""Pictures of step times, times to an accuracy and goodput, drawn from the tables of their pages.

Bars start at 0, are to scale within a panel, and have their values beside them. At a width of 400
pixels and without colour, the pictures can still be read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.netbench.accuracy_tasks import ADAPTIVE, GOODPUT
from benchmarks.netbench.contestants import (
    ALONE,
    COMPUTE,
    DDP,
    GROUPED,
    HOOK,
    OURS,
    SHARDED,
    STOCK,
    is_ours,
)
from benchmarks.report import Table, read_tables
from examples.pictures import figure

LABELS = {
    f"{DDP} powersgd:4": "PowerSGD(4) of DDP",
    f"{OURS}powersgd:4": "ours: PowerSGD(4)",
    f"{HOOK}powersgd:4": "ours: as DDP hook",
    f"{OURS}powersgd:1": "ours: PowerSGD(1)",
    f"{OURS}topk:0.01": "ours: TopK(0.01)",
    f"{OURS}fp16": "ours: FP16()",
    f"{OURS}none": "no compression",
    GROUPED: "grouped allreduce",
    ADAPTIVE: "ours: Accordion",
    GOODPUT: "Goodput",
}
"""What the pictures call methods; others have the names of the tables."""

SHOWN = (
    (STOCK, DDP, f"{DDP} powersgd:4", f"{OURS}powersgd:4", f"{HOOK}powersgd:4"),
    (STOCK, DDP, f"{DDP} powersgd:4", f"{OURS}powersgd:4", ADAPTIVE),
    (GROUPED, *(OURS + word for word in ("fp16", "topk:0.01", "powersgd:4", "powersgd:1"))),
)
"""Methods that are shown; a table that has none of these selections is shown as a whole."""


@dataclass(frozen=True)
class Bar:
    """A bar: its label, value as text, value, range, and whether it is what the page is about."""

    label: str
    text: str
    value: float
    least: float
    most: float
    own: bool


@dataclass(frozen=True)
class Panel:
    """Bars under a title, and the value of computing alone, if there is one."""

    title: str
    bars: tuple[Bar, ...]
    alone: float | None = None


Panels: TypeAlias = list[list[Panel]]
"""Rows of panels; bars of a row have the same labels."""


def draw(rows: Panels, path: Path, unit: str) -> None:
    """Draw panels to a file, whose description is their digest."""
    heights = [len(row[0].bars) + 1.2 for row in rows]
    size, columns = (4.4, 0.35 + 0.16 * sum(heights)), max(map(len, rows))
    options = {"dpi": 220, "metadata": {"Description": digest(rows)}, "height_ratios": heights}
    with figure(path, size, len(rows), columns, **options) as (canvas, axes):
        for row, panels in zip(axes, rows, strict=True):
            for number, axis in enumerate(row):
                if number < len(panels):
                    _panel(axis, panels[number], named=number == 0)
                else:
                    axis.set_axis_off()
        alone = any(panel.alone for row in rows for panel in row)
        canvas.supxlabel(f"{unit}; dotted: computing alone" if alone else unit, fontsize=8)


def digest(rows: Panels) -> str:
    """Return a hash of what panels show."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _panel(axis: Any, panel: Panel, named: bool) -> None:
    bars = panel.bars
    for place, bar in enumerate(bars):
        spread = [[bar.value - bar.least], [bar.most - bar.value]]
        look = {"color": "#00543f"} if bar.own else {"color": "0.85", "edgecolor": "0.3"}
        axis.barh(place, bar.value, height=0.7, xerr=spread, error_kw={"lw": 0.7}, **look)
        axis.annotate(
            bar.text, (bar.most, place), xytext=(2, 0), textcoords="offset points", va="center",
            fontsize=7.5,
        )  # fmt: skip
    if panel.alone:
        axis.axvline(panel.alone, color="black", lw=0.9, ls=":")
    axis.set_yticks(range(len(bars)), [bar.label if named else "" for bar in bars], fontsize=8)
    axis.set_xticks([])
    axis.set(xlim=(0, 1.45 * max(bar.most for bar in bars)), ylim=(len(bars) - 0.5, -0.6))
    axis.set_title(panel.title, fontsize=8, pad=2)
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def write(folder: Path) -> list[Path]:
    """Draw the pictures of the pages that a folder has; return their paths."""
    drawn = []
    for name, (page, panels, unit) in PICTURES.items():
        if (folder / page).is_file() and (rows := panels(folder / page)):
            drawn.append(folder / name)
            draw(rows, drawn[-1], unit)
    return drawn


# ------------------------------------------------------------------------------ what the pages have
def performance(page: Path) -> Panels:
    """Return a row of panels for each framework and model, with a panel for each rate."""
    rows: dict[str, list[Panel]] = {}
    for (_, model, *rate), table in read_tables(page).items():
        if rate and "ms/step" in table[0] and all(SHARDED not in row["method"] for row in table):
            name = model.replace("PyTorch, ", "").replace("Keras, ", "Keras ").replace("`", "")
            title = rate[0] if model in rows else f"{name}, {rate[0]}"
            rows.setdefault(model, []).append(_of(title, table, "ms/step", "(range)", is_ours))
    return list(rows.values())


def steps(page: Path) -> Panels:
    """Return one panel: the first network of a page on performance at the second rate."""
    rows = performance(page)
    return [[replace(p, title=f"links of {p.title}") for p in rows[0][:2][-1:]]] if rows else []


def accuracy(page: Path) -> Panels:
    """Return a panel for each task and rate, in rows of two or three."""
    own: Callable[[str], bool] = is_ours
    panels = []
    for (_, *title), table in read_tables(page).items():
        if title and "s to target" in table[0]:
            own = GOODPUT.__eq__ if any(row["method"] == GOODPUT for row in table) else own
            task, links = title[0].removeprefix("scikit-learn's ").rsplit(", ", 1)
            links = "changing rate" if links.startswith("rates of") else links
            panels.append(_of(f"{task},\n{links}", table, "s to target", "s to target", own))
    across = 3 if len(panels) == 3 else 2
    return [panels[start : start + across] for start in range(0, len(panels), across)]


def _of(title: str, table: Table, value: str, spread: str, own: Callable[[str], bool]) -> Panel:
    """Return a panel of the methods that are shown, with values and ranges of two columns."""
    by_method = {row["method"]: row for row in table}
    alone = _numbers(by_method[COMPUTE][value])[0] if COMPUTE in by_method else None
    every = [name for name in by_method if name not in ALONE]
    bars = []
    for name in next((names for names in SHOWN if {*names} <= {*by_method}), every):
        row = by_method[name]
        text, numbers = "not reached", [0.0]
        if not row[value].startswith("not"):
            text = row[value].split()[0]
            numbers = [float(text), *_numbers(row[spread])[-2:]]
        label = LABELS.get(name, name)
        bars.append(Bar(label, text, numbers[0], min(numbers), max(numbers), own(name)))
    return Panel(title, tuple(bars), alone)


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


PICTURES: dict[str, tuple[str, Callable[[Path], Panels], str]] = {
    "performance.png": ("data/performance_steps.csv", performance, "ms a step"),
    "steps.png": ("data/performance_steps.csv", steps, "ms a step"),
    "accuracy.png": ("accuracy.md", accuracy, "seconds to the accuracy"),
    "goodput.png": ("goodput.md", accuracy, "seconds to the accuracy"),
}
"""The page, the panels and the unit of each picture."""
