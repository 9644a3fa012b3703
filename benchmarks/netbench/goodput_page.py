"""Results of `netbench.py accuracy --page goodput`: docs/goodput.md and docs/goodput.png."""

from __future__ import annotations

import statistics
from pathlib import Path

import pandas as pd

from accordion_hvd.policies.gate import CHECK
from benchmarks import report
from benchmarks.netbench import accuracy_page
from benchmarks.netbench.accuracy_page import Place, places, runs, to_target
from benchmarks.netbench.accuracy_tasks import GOODPUT, LADDER
from benchmarks.report import digits, spread
from examples.results import Row
from examples.tables import as_markdown, as_text

HEAD = [
    "method", "target reached", "s to target", "s of trials", "relative time", "without trials",
    "steps to target", "ms/step", "MB sent",
]  # fmt: skip


def seconds(found: Row, place: Place, method: str) -> dict[int, float]:
    """Return the seconds to the target by seed; infinite where it was missed."""
    target = found["tasks"][place[0]]["target"]
    return {run["seed"]: to_target(run, target)[0] for run in runs(found, place, method)}


def fastest(found: Row, place: Place) -> str:
    """Return the fixed level with the least median time to the target."""
    fixed = [method for method in found["settings"]["methods"] if method != GOODPUT]
    medians = {m: statistics.median(seconds(found, place, m).values() or [1e9]) for m in fixed}
    return min(medians, key=lambda method: medians[method])


def relative(found: Row, place: Place, method: str, trials: bool = True) -> list[float]:
    """Return the times to the target divided by those of the fastest level, for each seed.

    Args:
        found: the results.
        place: task and rate.
        method: name of the method.
        trials: whether trials count.
    """
    least = seconds(found, place, fastest(found, place))
    rows = [run for run in runs(found, place, method) if run["seed"] in least]
    mine = seconds(found, place, method)
    return [
        (mine[run["seed"]] - (0.0 if trials else run["trials"][1])) / least[run["seed"]]
        for run in rows
    ]


def table(found: Row, place: Place) -> pd.DataFrame:
    """Return a table with a row for each method."""
    target, rows = found["tasks"][place[0]]["target"], []
    for method in found["settings"]["methods"]:
        mine = runs(found, place, method)
        if not mine:  # the benchmark was interrupted
            continue
        arrived = [to_target(run, target) for run in mine]
        tried = [run["trials"][1] for run in mine]
        rows.append(
            [
                method,
                f"{sum(time < float('inf') for time, _ in arrived)} of {len(mine)}",
                spread([time for time, _ in arrived]),
                spread(tried) if any(tried) else "-",
                spread(relative(found, place, method)),
                spread(relative(found, place, method, trials=False)) if any(tried) else "-",
                spread([steps for _, steps in arrived], digits(0)),
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
    parts = [
        f"{accuracy_page.title(found, place)}\n{as_text(table(found, place))}"
        for place in places(found)
    ]
    return "\n\n".join(parts)


def write(found: Row, folder: Path) -> list[Path]:
    """Write goodput.md and goodput.png; return their paths."""
    page, picture = folder / "goodput.md", folder / "goodput.png"
    report.write_page(page, text(found))
    accuracy_page.draw(found, picture)
    return [page, picture]


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
