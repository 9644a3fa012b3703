"""Results of `netbench.py accuracy`: tables, and the text of docs/accuracy.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TypeAlias

import pandas as pd

from benchmarks import report
from benchmarks.netbench.accuracy_tasks import HOOK, INTERVAL
from benchmarks.netbench.contestants import DDP, STOCK
from benchmarks.netbench.links import describe
from benchmarks.report import digits, spread
from examples.results import Row
from examples.tables import as_markdown, as_text

Place: TypeAlias = tuple[str, str]
"""Task and rate."""


# ------------------------------------------------------------------------------------------ numbers
def places(found: Row) -> list[Place]:
    """Return the (task, rate) pairs of all trainings, in order."""
    return list(dict.fromkeys((run["task"], run["rate"]) for run in found["runs"]))


def runs(found: Row, place: Place, method: str) -> list[Row]:
    """Return the trainings of a method for a task and rate, by seed."""
    mine = [run for run in found["runs"] if (run["task"], run["rate"]) == place]
    return sorted((run for run in mine if run["method"] == method), key=lambda run: run["seed"])


def trained(found: Row, place: Place) -> list[str]:
    """Return the methods with trainings; some are missing if the benchmark was interrupted."""
    return [method for method in found["settings"]["methods"] if runs(found, place, method)]


def to_target(run: Row, target: float) -> tuple[float, float]:
    """Return the training seconds and steps until the first evaluation at the target.

    Both are infinite if the target is not reached.
    """
    for seconds, steps, accuracy in zip(run["seconds"], run["steps"], run["accuracy"], strict=True):
        if accuracy >= target:
            return seconds, steps
    return math.inf, math.inf


def seconds_to_target(found: Row, place: Place, method: str) -> pd.Series:
    """Return the seconds to the target by seed; NaN where it is missed."""
    target = found["tasks"][place[0]]["target"]
    times = {run["seed"]: to_target(run, target)[0] for run in runs(found, place, method)}
    return pd.Series(times, dtype=float).replace(math.inf, math.nan)


def ratios(found: Row, place: Place, method: str, other: str) -> pd.Series:
    """Return how many times as fast as `other` a method reaches the target, for each seed.

    Seeds with which one of the two methods misses the target are left out.
    """
    slow, fast = (seconds_to_target(found, place, name) for name in (other, method))
    return (slow / fast).dropna()


def arrival(found: Row, place: Place, method: str) -> tuple[str, str, str]:
    """Return how many seeds reach the target, in how many seconds, and in how many steps."""
    task, mine = found["tasks"][place[0]], runs(found, place, method)
    arrived = [to_target(run, task["target"]) for run in mine]
    reached = [pair for pair in arrived if math.isfinite(pair[0])]
    best = max(max(run["accuracy"]) for run in mine)
    never = f"not in {task['limit']} steps, best {best:.1%}"
    # If most seeds fail, the median of the others would be too favourable.
    mostly = math.isfinite(statistics.median(seconds for seconds, _ in arrived))
    return (
        f"{len(reached)} of {len(mine)}",
        spread([seconds for seconds, _ in reached]) if mostly else never,
        spread([steps for _, steps in reached], digits(0)),
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


HEAD = [
    "method", "target reached", "s to target", "speedup over Horovod", f"speedup over {DDP}",
    f"speedup over {HOOK}", "steps to target", "ms/step", "MB sent", "final accuracy (%)",
]  # fmt: skip


def table(found: Row, place: Place) -> pd.DataFrame:
    """Return a table with a row for each method."""
    rows = []
    for method in trained(found, place):
        mine = runs(found, place, method)
        reached, seconds, steps = arrival(found, place, method)
        rows.append(
            [
                method,
                reached,
                seconds,
                *(spread(ratios(found, place, method, other)) for other in (STOCK, DDP, HOOK)),
                steps,
                spread([1000 * run["seconds"][-1] / run["steps"][-1] for run in mine]),
                spread([run["sent"][-1] / 1e6 for run in mine]),
                spread([run["accuracy"][-1] for run in mine], _percent),
            ]
        )
    return pd.DataFrame(rows, columns=HEAD)


def all_as_text(found: Row) -> str:
    """Return all tables for a terminal."""
    return tables_as_text(found, table)


def tables_as_text(found: Row, make: Callable[[Row, Place], pd.DataFrame]) -> str:
    """Return the table of each task and rate for a terminal."""
    parts = [f"{title(found, place)}\n{as_text(make(found, place))}" for place in places(found)]
    return "\n\n".join(parts)


def title(found: Row, place: Place) -> str:
    """Return a title with task, target and links."""
    task = found["tasks"][place[0]]
    return f"{task['title']} to {task['target']:.0%}, {describe(place[1], found['settings'])}"


# ----------------------------------------------------------------------------------------- the page
def text(found: Row) -> str:
    """Return the text of the page."""
    return report.render(
        "accuracy/page",
        noise=noise(found),
        seeds=found["settings"]["seeds"],
        hook=HOOK,
        interval=INTERVAL,
        places=report.join([_section(found, place) for place in places(found)]),
        **report.machine(found["machine"]),
        **report.hosts(found["settings"]),
    )


def noise(found: Row) -> str:
    """Return a sentence about the load of other processes."""
    cores = [run["foreign"] for run in found["runs"]]
    return report.noise(cores, "training", "the work of the links")


def _section(found: Row, place: Place) -> str:
    window = found["tasks"][place[0]]["window"]
    windows = f" A window of Accordion is {window} steps."
    return section(found, place, as_markdown(table(found, place)), windows)


def section(found: Row, place: Place, shown: str, windows: str = "") -> str:
    """Return the section of a task at a rate.

    Args:
        found: the results.
        place: task and rate.
        shown: the table of the section.
        windows: sentence about the windows of a policy.
    """
    task, rate = found["tasks"][place[0]], found["bandwidth"].get(place[1])
    return report.render(
        "accuracy/place",
        title=title(found, place),
        goodput=f"TCP goodput {rate * 8 / 1e6:.0f} Mbit/s. " if rate else "",
        windows=windows,
        parameters=f"{task['parameters']:,}",
        tensors=task["tensors"],
        train=f"{task['train']:,}",
        test=f"{task['test']:,}",
        shift=f", shifted by up to {task['shift']} pixel" if task["shift"] else "",
        ranks=report.hosts(found["settings"])["ranks"],
        **{key: task[key] for key in ("batch", "lr", "every", "limit")},
        table=shown,
        levels=levels(found, place),
    )


def levels(found: Row, place: Place) -> str:
    """List decisions of Accordion and its gate, and methods whose ranks disagree."""
    lines = []
    for method in found["settings"]["methods"]:
        mine = runs(found, place, method)
        if any(run["high"] for run in mine):
            share = spread([100 * run["high"] for run in mine], digits(0))
            lines.append(f"- `{method}`: {share} % of layers and steps were at the high level.")
        for run in mine:
            if run["verdict"]:
                verdict = run["verdict"].removeprefix("accordion_hvd: ")
                text = f"- `{method}`, seed {run['seed']}, last decision of the gate: {verdict}"
                steps, seconds = run.get("trials", (0, 0.0))
                text += f"; {steps} steps were trials, which took {seconds:.1f} s" if steps else ""
                lines.append(f"{text}.")
        if not all(run["equal"] for run in mine):
            lines.append(f"- `{method}`: ranks ended with **different weights**.")
    return "\n".join(lines)
