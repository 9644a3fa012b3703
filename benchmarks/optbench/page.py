"""Results of `bench_optimizers.py`: docs/optimizers.md and docs/optimizers.png."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import report
from benchmarks.netbench import tables
from benchmarks.netbench.contestants import OPTIMIZER
from benchmarks.netbench.links import describe
from benchmarks.optbench.methods import METHODS, OURS
from benchmarks.report import digits, significant, spread
from examples.pictures import figure
from examples.results import Row
from examples.tables import as_markdown

GOAL = 0.97
"""Goal: least share of the uncompressed optimizer's further reduction of the loss."""

COLOURS = {
    "Adam": "#000000",
    "AMSGrad": "#999999",
    "Lamb": "#8B5A2B",
    "OnebitAdam": "#0072B2",
    "Birder": "#E69F00",
    "SketchedAMSGrad": "#CC79A7",
    "CDAdam": "#009E73",
    "OnebitLamb": "#D55E00",
    "ZeroOneAdam": "#56B4E9",
}
"""Colours of the optimizers, distinguishable by colour-blind readers (Okabe & Ito)."""

DIVERGED = "diverged"


# ------------------------------------------------------------------------------------------ numbers
def runs(found: Row, task: str, method: str) -> list[Row]:
    """Return the trainings of a method on a task, by seed."""
    mine = [run for run in found["runs"] if (run["task"], run["method"]) == (task, method)]
    return sorted(mine, key=lambda run: run["seed"])


def methods(found: Row, task: str) -> list[str]:
    """Return the methods with trainings, in the order of `METHODS`."""
    return [name for name in METHODS if runs(found, task, name)]


def final(run: Row) -> float:
    """Return the last loss; infinite if it is not finite or above the loss at the start."""
    last = _number(run["loss"][-1])
    return last if last <= _number(run["loss"][0]) else math.inf


def _number(loss: float | None) -> float:
    return math.inf if loss is None else loss


def twins(found: Row, task: str, method: str) -> list[tuple[Row, Row]]:
    """Return the trainings of a method, each with the uncompressed training of the same seed."""
    dense = {run["seed"]: run for run in runs(found, task, METHODS[method].beside)}
    mine = runs(found, task, method)
    return [(run, dense[run["seed"]]) for run in mine if run["seed"] in dense]


def kept(run: Row, dense: Row) -> float:
    """Return the share of the uncompressed training's further reduction of the loss that is kept.

    The reduction begins at the last evaluation before compression begins.
    """
    begins = dense["steps"].index(begin(run))
    return (dense["loss"][begins] - final(run)) / (dense["loss"][begins] - final(dense))


def excess(run: Row, dense: Row, least: float) -> float:
    """Return the excess over the least loss as a multiple of the uncompressed training's."""
    return (final(run) - least) / (final(dense) - least)


def begin(run: Row) -> int:
    """Return the step of the last evaluation before compression begins; 0 if it never does."""
    return max(step for step in run["steps"] if step <= (run["begins"] or 0))


def saved(run: Row) -> float:
    """Return uncompressed bytes / bytes sent, over the whole training."""
    return run["dense"][-1] / run["sent"][-1]


def saved_later(run: Row) -> float:
    """Return uncompressed bytes / bytes sent after the first evaluation in the compressed part."""
    start = next(i for i, step in enumerate(run["steps"]) if step >= (run["begins"] or 0))
    return (run["dense"][-1] - run["dense"][start]) / (run["sent"][-1] - run["sent"][start])


def told(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Format the median and the range of values, which are infinite where training diverged."""
    if values and not any(map(math.isfinite, values)):
        return DIVERGED
    return spread(
        values, lambda value: form(value) if math.isfinite(value) else DIVERGED, to=" to "
    )


# ------------------------------------------------------------------------------------------- tables
def titles(found: Row) -> list[str]:
    """Return the heads of the columns of the tasks."""
    return [given["title"] for given in found["tasks"].values()]


def overview(found: Row) -> pd.DataFrame:
    """Return a table of the goal, kept share and bytes saved of each compressed method."""
    rows = [
        [f"`{name}`", *(verdict(found, task, name) for task in found["tasks"])]
        for name in METHODS
        if any(twins(found, task, name) for task in found["tasks"])
    ]
    return pd.DataFrame(rows, columns=["optimizer", *titles(found)])


def verdict(found: Row, task: str, method: str) -> str:
    """Return whether a method meets the goal on a task, with the numbers; a dash if not trained."""
    pairs = twins(found, task, method)
    if not pairs:
        return "-"
    share = statistics.median(kept(*pair) for pair in pairs)
    if not math.isfinite(share):
        return f"missed: {DIVERGED}"
    factor = statistics.median(saved(run) for run, _ in pairs)
    return f"{_goal(share)}: {100 * share:.1f} %, {factor:.1f} x"


def _goal(share: float) -> str:
    return "met" if share >= GOAL else "missed"


def table(found: Row, task: str) -> pd.DataFrame:
    """Return a table with a row for each method of a task."""
    least = found["tasks"][task]["least"]
    graded = any(run["accuracy"] is not None for run in found["runs"] if run["task"] == task)
    head = ["optimizer", "lr", "seeds", "final loss"]
    head += ["test accuracy (%)"] if graded else []
    head += ["from step", "reduction kept (%)"]
    head += ["excess"] if least is not None else []
    head += ["bytes saved", "later", "goal"]
    rows = []
    for name in methods(found, task):
        mine, pairs = runs(found, task, name), twins(found, task, name)
        row = [name, f"{mine[0]['lr']:g}", str(len(mine))]
        row.append(told([final(run) for run in mine], digits(5)))
        if graded:
            row.append(spread([100 * run["accuracy"] for run in mine], digits(1), to=" to "))
        if pairs:
            shares = [kept(*pair) for pair in pairs]
            begins = statistics.median(run["begins"] or 0 for run in mine)
            row += [f"{begins:.0f}", told([100 * share for share in shares], digits(1))]
            if least is not None:
                row.append(told([excess(*pair, least) for pair in pairs], significant))
            row.append(f"{statistics.median(map(saved, mine)):.1f} x")
            row.append(f"{statistics.median(map(saved_later, mine)):.1f} x")
            row.append(_goal(statistics.median(shares)))
        rows.append([*row, *["-"] * (len(head) - len(row))])
    return pd.DataFrame(rows, columns=head)


def states(found: Row) -> pd.DataFrame:
    """Return a table of the bytes of state per parameter."""
    rows = []
    for name, method in METHODS.items():
        cells = []
        for task in found["tasks"]:
            mine = runs(found, task, name)
            cells.append(f"{mine[0]['state'] / mine[0]['parameters']:.1f}" if mine else "-")
        if any(cell != "-" for cell in cells):
            rows.append([f"`{name}`", STATE[method.optimizer], *cells])
    return pd.DataFrame(rows, columns=["optimizer", "state", *titles(found)])


STATE = {
    "Adam": "m, v",
    "AMSGrad": "m, v, vmax",
    "Lamb": "m, v",
    "OnebitAdam": "m, v, error, this rank's part of the server error",
    "Birder": "m, b; with `feedback` also error, this rank's part of the owners' error",
    "SketchedAMSGrad": "m, v, vmax, error",
    "CDAdam": "m, v, vmax, estimate, replica, this rank's part of the server's difference; "
    "with `replica_lr` also errors",
    "OnebitLamb": "m, v, the fresh v, error, this rank's part of the server error",
    "ZeroOneAdam": "m, v, error, steps since the last synchronization, weights at it, this rank's "
    "part of the server error",
}


def tried(tuning: Row, task: str, method: str) -> pd.Series:
    """Return the final loss by learning rate, as medians over seeds."""
    mine = runs(tuning, task, method)
    losses = pd.Series([final(run) for run in mine], [run["lr"] for run in mine], dtype=float)
    return losses.groupby(level=0).median()


def rates(tuning: Row, task: str) -> pd.DataFrame:
    """Return a table of the final loss by learning rate."""
    losses = pd.DataFrame({name: tried(tuning, task, name) for name in methods(tuning, task)}).T
    shown = losses.map(lambda loss: "-" if math.isnan(loss) else told([loss], digits(4)))
    shown.insert(0, "best", losses.idxmin(axis=1).map("{:g}".format))
    shown.columns = ["best", *map("{:g}".format, losses)]
    return shown.rename_axis("optimizer").reset_index()


def links(timing: Row) -> pd.DataFrame:
    """Return a table of milliseconds per step at each rate, and the speedup over Adam."""
    wanted = timing["settings"]["rates"]
    head = ["optimizer", "MB sent per step"]
    for rate in wanted:
        head += [f"ms, {describe(rate, timing['settings'])}", "speedup over Adam"]
    summaries = {rate: tables.summary(timing, rate) for rate in wanted}
    rows = []
    for method in timing["equal"]:
        if not method.startswith(OPTIMIZER):
            continue
        sent = summaries[wanted[0]].loc[method, "sent"]
        row = [method.removeprefix(OPTIMIZER), f"{sent / 1e6:.3f}"]
        for rate in wanted:
            row.append(f"{summaries[rate].loc[method, 'ms']:.0f}")
            row.append(spread(tables.ratios(timing, method, f"{OPTIMIZER}Adam", rate), digits(2)))
        rows.append(row)
    return pd.DataFrame(rows, columns=head)


# -------------------------------------------------------------------------------------- the picture
def draw(found: Row, path: Path) -> None:
    """Draw loss by steps (above) and by bytes sent (below) for each task: medians and ranges."""
    tasks = list(found["tasks"])
    size = (1 + 4.6 * len(tasks), 8.2)
    with figure(path, size, rows=2, columns=len(tasks), dpi=100) as (canvas, axes):
        for column, task in enumerate(tasks):
            for row, key in enumerate(("steps", "sent")):
                _panel(axes[row][column], found, task, key)
        handles, labels = axes[0][0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))


def style(method: str) -> tuple[str, str]:
    """Return a method's colour and line: dashed as published, solid for all others."""
    plain = METHODS[method].beside and not method.endswith(OURS)
    return COLOURS[METHODS[method].optimizer], "--" if plain else "-"


def _panel(axis: Any, found: Row, task: str, key: str) -> None:
    least = found["tasks"][task]["least"] or 0.0
    scale = 1e6 if key == "sent" else 1
    first = 0.0
    for name in methods(found, task):
        mine = runs(found, task, name)
        curves = pd.DataFrame([[_number(x) - least for x in run["loss"]] for run in mine])
        x = [value / scale for value in mine[0][key]]
        colour, line = style(name)
        middle = curves.median()
        first = max(first, middle[0])
        start = 1 if key == "sent" else 0  # nothing has been sent before the first step
        axis.plot(x[start:], middle[start:], line, color=colour, lw=1.4, label=name)
        axis.fill_between(
            x[start:], curves.min()[start:], curves.max()[start:], color=colour, alpha=0.1, lw=0
        )
    given = found["tasks"][task]
    above = " above the least" if given["least"] is not None else ""
    axis.set(yscale="log", title=given["title"])
    axis.set_ylim(top=1.5 * first)  # losses of trainings that diverge are far above it
    axis.set_ylabel(f"loss{above} (logarithmic)")
    axis.set_xlabel("steps" if key == "steps" else "MB sent by a rank (logarithmic)")
    if key == "sent":
        axis.set_xscale("log")
    axis.grid(alpha=0.3, which="both")


# ----------------------------------------------------------------------------------------- the page
def write(files: Sequence[Row], folder: Path) -> list[Path]:
    """Write optimizers.md and optimizers.png; return their paths.

    Args:
        files: results of `run` and, optionally, of `tune` and of `netbench.py bench`.
        folder: folder for page and picture.

    Raises:
        ValueError: if no file has results of `run`.
    """
    by_action = {result.get("action", "links"): result for result in files}
    if "run" not in by_action or not by_action["run"]["runs"]:
        raise ValueError("no file has results of `run`, which the page needs.")
    page, picture = folder / "optimizers.md", folder / "optimizers.png"
    parts = (by_action.get(part) for part in ("tune", "links"))
    report.write_page(page, text(by_action["run"], *parts))
    draw(by_action["run"], picture)
    return [page, picture]


def text(found: Row, tuning: Row | None, timing: Row | None) -> str:
    """Return the text of the page."""
    unequal = sum(not run["equal"] for run in found["runs"])
    return report.render(
        "optimizers/page",
        ranks=found["ranks"],
        trainings=len(found["runs"]),
        kind="simulated " if found["simulated"] else "",
        equality=""
        if found["simulated"]
        else f", in **{unequal} trainings ranks ended with different weights**"
        if unequal
        else ", all ranks ended with bitwise equal weights",
        goal=f"{100 * GOAL:g}",
        overview=as_markdown(overview(found)),
        tasks=report.join([section(found, task) for task in found["tasks"]]),
        links=on_links(timing) if timing else "",
        states=as_markdown(states(found)),
        settings=as_markdown(settings(found)),
        real=report.render("optimizers/simulated")
        if found["simulated"]
        else report.render("optimizers/real"),
        rates=tuned(tuning) if tuning else report.render("optimizers/untuned"),
        **report.machine(found["machine"]),
    )


def section(found: Row, task: str) -> str:
    """Return the section of a task."""
    given = found["tasks"][task]
    return report.render(
        "optimizers/task",
        title=f"{given['title'][0].upper()}{given['title'][1:]}",
        parameters=f"{given['parameters']:,}",
        ranks=found["ranks"],
        **{key: given[key] for key in ("what", "tensors", "steps", "batch", "loss")},
        least=f" The minimum of the loss is {given['least']:.5f}." if given["least"] else "",
        table=as_markdown(table(found, task)),
    )


def settings(found: Row) -> pd.DataFrame:
    """Return a table of the arguments and learning rates."""
    rows = []
    for name in METHODS:
        mine = [run for run in found["runs"] if run["method"] == name]
        if not mine:
            continue
        arguments = dict.fromkeys(run["settings"] for run in mine)
        by_task = {run["task"]: f"{run['lr']:g}" for run in mine}
        rates = [by_task.get(task, "-") for task in found["tasks"]]
        rows.append([f"`{name}`", "; or ".join(f"`{text}`" for text in arguments if text), *rates])
    return pd.DataFrame(rows, columns=["optimizer", "arguments", *titles(found)])


def tuned(tuning: Row) -> str:
    """Return the section with the results of the grids."""
    parts = []
    for task, given in tuning["tasks"].items():
        parts += [f"{given['title']}:", as_markdown(rates(tuning, task))]
    seeds = sorted({run["seed"] for run in tuning["runs"]})
    return report.render(
        "optimizers/tuned", seeds=", ".join(map(str, seeds)), grids=report.join(parts)
    )


def on_links(found: Row) -> str:
    """Return the section with milliseconds per step on limited links."""
    given, model = found["settings"], found["model"]
    return report.render(
        "optimizers/links",
        model=given["model"],
        parameters=f"{model['parameters']:,}",
        tensors=model["tensors"],
        batch=given["batch"],
        hosts=given["hosts"],
        table=as_markdown(links(found)),
    )
