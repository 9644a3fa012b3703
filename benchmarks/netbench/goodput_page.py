"""Results of `netbench.py accuracy --page goodput`: tables, and the text of docs/goodput.md."""

from __future__ import annotations

import pandas as pd

from accordion_hvd.policies.gate import CHECK
from benchmarks import report
from benchmarks.netbench import accuracy_page
from benchmarks.netbench.accuracy_page import (
    Place,
    arrival,
    places,
    runs,
    seconds_to_target,
    trained,
)
from benchmarks.netbench.accuracy_tasks import GOODPUT, LADDER
from benchmarks.report import spread
from examples.results import Row
from examples.tables import as_markdown

HEAD = [
    "method", "target reached", "s to target", "s of trials", "relative time", "without trials",
    "steps to target", "ms/step", "MB sent",
]  # fmt: skip


def fastest(found: Row, place: Place) -> str:
    """Return the fixed level with the least median time to the target; a missed target is late."""
    fixed = [method for method in trained(found, place) if method != GOODPUT]
    late = found["tasks"][place[0]]["limit"] * 1e3
    return min(fixed, key=lambda m: seconds_to_target(found, place, m).fillna(late).median())


def relative(found: Row, place: Place, method: str, trials: bool = True) -> pd.Series:
    """Return the times to the target divided by those of the fastest level, for each seed.

    Seeds with which one of the two methods misses the target are left out.

    Args:
        found: the results.
        place: task and rate.
        method: name of the method.
        trials: whether trials count.
    """
    times = seconds_to_target(found, place, method)
    if not trials:
        times -= pd.Series({run["seed"]: run["trials"][1] for run in runs(found, place, method)})
    return (times / seconds_to_target(found, place, fastest(found, place))).dropna()


def table(found: Row, place: Place) -> pd.DataFrame:
    """Return a table with a row for each method."""
    rows = []
    for method in trained(found, place):
        mine = runs(found, place, method)
        tried = [run["trials"][1] for run in mine]
        reached, seconds, steps = arrival(found, place, method)
        rows.append(
            [
                method,
                reached,
                seconds,
                spread(tried) if any(tried) else "-",
                spread(relative(found, place, method)),
                spread(relative(found, place, method, trials=False)) if any(tried) else "-",
                steps,
                spread([1000 * run["seconds"][-1] / run["steps"][-1] for run in mine]),
                spread([run["sent"][-1] / 1e6 for run in mine]),
            ]
        )
    return pd.DataFrame(rows, columns=HEAD)


def summary(found: Row) -> str:
    """Return a table with the policy's relative time for each task and rate."""
    head = ["task and links", "fastest level", "relative time", "without trials"]
    rows = [
        [
            accuracy_page.title(found, place),
            fastest(found, place),
            spread(relative(found, place, GOODPUT)),
            spread(relative(found, place, GOODPUT, trials=False)),
        ]
        for place in places(found)
    ]
    return as_markdown(pd.DataFrame(rows, columns=head))


def all_as_text(found: Row) -> str:
    """Return all tables for a terminal."""
    return accuracy_page.tables_as_text(found, table)


def text(found: Row) -> str:
    """Return the text of the page."""
    sections = [
        accuracy_page.section(found, place, as_markdown(table(found, place)))
        for place in places(found)
    ]
    return report.render(
        "goodput/page",
        noise=accuracy_page.noise(found),
        seeds=found["settings"]["seeds"],
        ladder=LADDER,
        window=CHECK,
        summary=summary(found),
        places=report.join(sections),
        **report.machine(found["machine"]),
        **report.hosts(found["settings"]),
    )
