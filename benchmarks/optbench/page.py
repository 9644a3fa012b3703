"""Results of `bench_optimizers.py`: docs/optimizers.md and docs/optimizers.png."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.netbench import tables
from benchmarks.netbench.contestants import OPTIMIZER
from benchmarks.netbench.picture import words
from benchmarks.optbench.methods import METHODS
from benchmarks.report import digits, spread
from examples.pictures import figure
from examples.report import as_markdown
from examples.results import Row

GOAL, BYTES = 1.03, 16
"""Goal: largest multiple of the uncompressed loss, and smallest factor of bytes saved."""

COLOURS = {
    "Adam": ("#000000", "-"),
    "AMSGrad": ("#7f7f7f", "--"),
    "OnebitAdam": ("#0072B2", "-"),
    "Birder": ("#E69F00", "-"),
    "SketchedAMSGrad": ("#CC79A7", "-"),
    "CDAdam": ("#009E73", "-"),
}
"""Colour and line, distinguishable by colour-blind readers (Okabe & Ito)."""


# ------------------------------------------------------------------------------------------ numbers
def runs(found: Row, task: str, method: str) -> list[Row]:
    """Return the trainings of a method on a task, by seed."""
    mine = [run for run in found["runs"] if (run["task"], run["method"]) == (task, method)]
    return sorted(mine, key=lambda run: run["seed"])


def methods(found: Row, task: str) -> list[str]:
    """Return the methods with trainings, in the order of `METHODS`."""
    return [name for name in METHODS if runs(found, task, name)]


def final(run: Row) -> float:
    """Return the last loss; infinite if training diverged."""
    return _number(run["loss"][-1])


def _number(loss: float | None) -> float:
    return math.inf if loss is None else loss


def pairs(found: Row, task: str, method: str, least: float = 0.0) -> list[float]:
    """Return the loss as a multiple of the uncompressed method's, for each common seed.

    `least` is subtracted from both losses.
    """
    dense = {run["seed"]: final(run) for run in runs(found, task, METHODS[method].beside)}
    return [
        (final(run) - least) / (dense[run["seed"]] - least)
        for run in runs(found, task, method)
        if run["seed"] in dense
    ]


def saved(run: Row) -> float:
    """Return uncompressed bytes / bytes sent after the warm-up.

    Bytes are counted from the first evaluation after the warm-up.
    """
    start = next(i for i, step in enumerate(run["steps"]) if step >= run["warm"])
    return (run["dense"][-1] - run["dense"][start]) / (run["sent"][-1] - run["sent"][start])


def target(found: Row, task: str) -> float | None:
    """Return the target loss: `GOAL` times Adam's final loss; None if Adam was not trained."""
    losses = [final(run) for run in runs(found, task, "Adam")]
    return GOAL * statistics.median(losses) if losses else None


def until(run: Row, loss: float) -> tuple[float, float] | None:
    """Return steps and bytes sent until the first evaluation at a loss; None if not reached."""
    for step, sent, now in zip(run["steps"], run["sent"], run["loss"], strict=True):
        if _number(now) <= loss:
            return step, sent
    return None


def reached(trainings: Sequence[Row], loss: float) -> list[tuple[float, float]] | None:
    """Return steps and bytes until a loss; None unless most seeds reach the loss."""
    pairs = [pair for run in trainings if (pair := until(run, loss))]
    return pairs if 2 * len(pairs) > len(trainings) else None


# ------------------------------------------------------------------------------------------- tables
def overview(found: Row) -> list[list[str]]:
    """Return a header and rows: whether each compressed method meets the goal on each task."""
    rows = [["optimizer", "task", "loss / uncompressed loss", "bytes saved after warm-up", "goal"]]
    for task in found["tasks"]:
        for name in methods(found, task):
            mine, ratios = (
                runs(found, task, name),
                METHODS[name].beside and pairs(found, task, name),
            )
            if not ratios:
                continue
            factors = [saved(run) for run in mine]
            parts = [
                "met" if statistics.median(ratios) <= GOAL else "loss missed",
                *(["bytes missed"] if statistics.median(factors) < BYTES else []),
            ]
            rows.append(
                [
                    f"`{name}`",
                    found["tasks"][task]["title"],
                    spread(ratios, digits(3)),
                    f"{statistics.median(factors):.1f} x",
                    parts[-1] if len(parts) == 1 or parts[0] == "met" else ", ".join(parts),
                ]
            )
    return rows


def table(found: Row, task: str) -> list[list[str]]:
    """Return a header and a row for each method of a task."""
    least, goal = found["tasks"][task]["least"], target(found, task)
    graded = any(run["accuracy"] is not None for run in found["runs"] if run["task"] == task)
    head = ["optimizer", "lr", "final loss", "/ uncompressed loss"]
    head += ["excess loss / uncompressed"] if least is not None else []
    head += ["test accuracy (%)"] if graded else []
    head += ["steps to target", "MB to target", "MB in total", "bytes saved after warm-up"]
    rows = [head]
    for name in methods(found, task):
        mine, method = runs(found, task, name), METHODS[name]
        to_goal = reached(mine, goal) if goal is not None else None
        row = [
            name,
            f"{mine[0]['lr']:g}",
            spread([final(run) for run in mine], digits(4)),
        ]
        row.append(spread(pairs(found, task, name), digits(3)) if method.beside else "-")
        if least is not None:
            row.append(spread(pairs(found, task, name, least), digits(2)) if method.beside else "-")
        if graded:
            row.append(spread([100 * run["accuracy"] for run in mine], digits(1)))
        for column, form in ((0, digits(0)), (1, lambda sent: f"{sent / 1e6:.2f}")):
            values = [pair[column] for pair in to_goal or ()]
            row.append(spread(values, form) if values else "not reached")
        row.append(f"{statistics.median(run['sent'][-1] for run in mine) / 1e6:.2f}")
        row.append(f"{statistics.median(map(saved, mine)):.1f} x")
        rows.append(row)
    return rows


def states(found: Row) -> list[list[str]]:
    """Return a header and rows: bytes of state per parameter."""
    tasks = list(found["tasks"])
    rows = [["optimizer", "state", *(found["tasks"][task]["title"] for task in tasks)]]
    for name in METHODS:
        cells = []
        for task in tasks:
            mine = runs(found, task, name)
            cells.append(f"{mine[0]['state'] / mine[0]['parameters']:.1f}" if mine else "-")
        rows.append([f"`{name}`", STATE[name], *cells])
    return rows


STATE = {
    "Adam": "m, v",
    "AMSGrad": "m, v, vmax",
    "OnebitAdam": "m, v, error, this rank's part of the server error",
    "Birder": "m, b, error, this rank's part of the owners' error (only m, b without `feedback`)",
    "SketchedAMSGrad": "m, v, vmax, error",
    "CDAdam": "m, v, vmax, estimate, replica, this rank's part of the server's difference; "
    "with `replica_lr` also errors",
}


def tried(tuning: Row, task: str, method: str) -> dict[float, float]:
    """Return the final loss by learning rate, as medians over seeds."""
    losses: dict[float, list[float]] = {}
    for run in runs(tuning, task, method):
        losses.setdefault(run["lr"], []).append(final(run))
    return {lr: statistics.median(losses[lr]) for lr in sorted(losses)}


def rates(tuning: Row, task: str) -> list[list[str]]:
    """Return a header and rows: final loss by learning rate."""
    grid = sorted({run["lr"] for run in tuning["runs"] if run["task"] == task})
    rows = [["optimizer", "best", *(f"{lr:g}" for lr in grid)]]
    for name in methods(tuning, task):
        losses = tried(tuning, task, name)
        cells = [f"{losses[lr]:.4f}" if lr in losses else "-" for lr in grid]
        rows.append([name, f"{min(losses, key=lambda lr: losses[lr]):g}", *cells])
    return rows


def links(timing: Row) -> list[list[str]]:
    """Return a header and rows: milliseconds per step at each rate, and the speedup over Adam."""
    wanted = timing["settings"]["rates"]
    rows = [["optimizer", "MB sent per step"]]
    for rate in wanted:
        rows[0] += [f"ms, {words(rate)}", "speedup over Adam"]
    summaries = {rate: tables.summary(timing, rate) for rate in wanted}
    plain = f"{OPTIMIZER}Adam"
    for method in timing["equal"]:
        if not method.startswith(OPTIMIZER):
            continue
        row = [method.removeprefix(OPTIMIZER), f"{summaries[wanted[0]][method]['sent'] / 1e6:.3f}"]
        for rate in wanted:
            row.append(f"{summaries[rate][method]['ms']:.0f}")
            row.append(spread(tables.ratios(timing, method, plain, rate), digits(2)))
        rows.append(row)
    return rows


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
        canvas.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))


def _panel(axis: Any, found: Row, task: str, key: str) -> None:
    least = found["tasks"][task]["least"] or 0.0
    scale = 1e6 if key == "sent" else 1
    for name in methods(found, task):
        mine = runs(found, task, name)
        curves = list(
            zip(*([_number(x) - least for x in run["loss"]] for run in mine), strict=True)
        )
        x = [value / scale for value in mine[0][key]]
        colour, line = COLOURS[name]
        middle = [statistics.median(values) for values in curves]
        start = 1 if key == "sent" else 0  # nothing has been sent before the first step
        axis.plot(x[start:], middle[start:], line, color=colour, lw=1.6, label=name)
        axis.fill_between(
            x[start:], [min(v) for v in curves][start:], [max(v) for v in curves][start:],
            color=colour, alpha=0.15, lw=0,
        )  # fmt: skip
    given = found["tasks"][task]
    above = " above the least" if given["least"] is not None else ""
    axis.set(yscale="log", title=given["title"])
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
    report.write_page(page, text(by_action["run"], by_action.get("tune"), by_action.get("links")))
    draw(by_action["run"], picture)
    return [page, picture]


def text(found: Row, tuning: Row | None, timing: Row | None) -> str:
    """Return the text of the page."""
    unequal = sum(not run["equal"] for run in found["runs"])
    return report.render(
        "optimizers/page",
        ranks=found["ranks"],
        trainings=len(found["runs"]),
        equality=f"in **{unequal} trainings ranks ended with different weights**"
        if unequal
        else "all ranks ended with bitwise equal weights",
        seeds=len({run["seed"] for run in found["runs"]}),
        goal=f"{GOAL:g}",
        bytes=BYTES,
        overview=as_markdown(overview(found)),
        tasks=report.join([section(found, task) for task in found["tasks"]]),
        links=on_links(timing) if timing else "",
        states=as_markdown(states(found)),
        settings=as_markdown(settings(found)),
        rates=tuned(tuning) if tuning else report.render("optimizers/untuned"),
        **report.machine(found["machine"]),
    )


def section(found: Row, task: str) -> str:
    """Return the section of a task."""
    given, goal = found["tasks"][task], target(found, task)
    return report.render(
        "optimizers/task",
        title=f"{given['title'][0].upper()}{given['title'][1:]}",
        parameters=f"{given['parameters']:,}",
        ranks=found["ranks"],
        **{key: given[key] for key in ("what", "tensors", "steps", "batch", "loss")},
        least=f" The minimum of the loss is {given['least']:.5f}." if given["least"] else "",
        aim=f" The target is a loss of {goal:.4f}." if goal is not None else "",
        table=as_markdown(table(found, task)),
    )


def settings(found: Row) -> list[list[str]]:
    """Return a header and rows."""
    rows = [["optimizer", "arguments", *(found["tasks"][task]["title"] for task in found["tasks"])]]
    for name in METHODS:
        mine = [run for run in found["runs"] if run["method"] == name]
        if not mine:
            continue
        arguments = dict.fromkeys(run["settings"] for run in mine)
        by_task = {run["task"]: f"{run['lr']:g}" for run in mine}
        rates = [by_task.get(task, "-") for task in found["tasks"]]
        rows.append([f"`{name}`", "; or ".join(f"`{text}`" for text in arguments if text), *rates])
    return rows


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
