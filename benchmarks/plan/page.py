"""Errors of the predictions: docs/plan.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd.simulation.prediction import Prediction
from accordion_hvd.tools.plan.table import GAIN
from benchmarks import report
from benchmarks.netbench.links import describe
from benchmarks.plan.cells import HOSTS, MODELS, RATES, TIMES, Cell, held_out
from benchmarks.plan.judge import split
from examples.report import as_markdown

NEAR = 0.05
"""Excess over the fastest configuration up to which a choice counts as right."""

LARGE = 1e6
"""Bytes of a step from which headers outweigh the engine's own messages."""


@dataclass(frozen=True)
class Compared:
    """Measured and predicted milliseconds and bytes per step of each method in a cell."""

    cell: Cell
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    counted: Mapping[str, float]
    sent: Mapping[str, float]

    def errors(self, engine: str = "") -> list[float]:
        """Return |predicted / measured - 1| of each method, of one engine if it is given."""
        return [
            abs(self.predicted[method] / measured - 1)
            for method, measured in self.measured.items()
            if engine in ("", split(method)[0])
        ]

    @property
    def excess(self) -> float:
        """Return the excess of the method with the least prediction over the fastest method."""
        chosen = min(self.predicted, key=self.predicted.__getitem__)
        return self.measured[chosen] / min(self.measured.values()) - 1

    def pays(self) -> list[bool]:
        """Return, for each engine, whether the prediction is right that compression pays or not."""
        found = []
        for engine in ("horovod", "torch"):
            truth, guess = (
                _pays({split(m)[1]: x for m, x in times.items() if split(m)[0] == engine})
                for times in (self.measured, self.predicted)
            )
            found.append(truth == guess)
        return found


def compare(
    cell: Cell, rows: Sequence[Mapping[str, Any]], steps: Mapping[str, Prediction]
) -> Compared:
    """Return a comparison of the rows of a cell with predicted steps."""
    return Compared(
        cell,
        {row["method"]: row["ms"] for row in rows},
        {method: 1000 * step.seconds for method, step in steps.items()},
        {row["method"]: row["sent"] for row in rows},
        {method: step.sent for method, step in steps.items()},
    )


def _pays(times: Mapping[str, float]) -> bool:
    return min(x for name, x in times.items() if name != "dense") < (1 - GAIN) * times["dense"]


def summary(compared: Sequence[Compared]) -> dict[str, float]:
    """Return the figures of some cells: errors in %, and shares of right choices in %."""
    errors = [error for x in compared for error in x.errors()]
    return {
        "cells": len(compared),
        "median": 100 * float(np.median(errors)),
        "tenth": 100 * float(np.percentile(errors, 90)),
        "chosen": 100 * float(np.mean([x.excess <= NEAR for x in compared])),
        "pays": 100 * float(np.mean([right for x in compared for right in x.pays()])),
    }


HEAD = {
    "cells": "cells",
    "median": "median error, %",
    "tenth": "90th percentile, %",
    "chosen": "choice within 5 % of the fastest, % of cells",
    "pays": "right about whether compression pays, %",
}


def text(found: Mapping[str, Any], compared: Sequence[Compared]) -> str:
    """Return the page."""
    unseen = held_out()
    judged = [x for x in compared if x.cell.name in unseen]
    seen = [x for x in compared if x.cell.name not in unseen]
    return report.render(
        "plan",
        **report.machine(found["machine"]),
        cells=len(compared),
        all=len(MODELS) * len(RATES) * len(TIMES) * len(HOSTS),
        summary=_table([("fitted to", seen), ("held out", judged)]),
        parts=_table(list(_parts(judged))),
        worst=_worst(judged),
        **_bytes(compared),
    )


def _bytes(compared: Sequence[Compared]) -> dict[str, str]:
    """Return the bytes that interfaces counted besides the predicted ones."""
    pairs = [(x.counted[m], x.sent[m]) for x in compared for m in x.measured]
    large = [counted / sent - 1 for counted, sent in pairs if sent >= LARGE]
    small = [counted - sent for counted, sent in pairs if sent < LARGE]
    return {
        "large": f"{100 * np.median(large):.1f}",
        "large_tenth": f"{100 * np.percentile(large, 90):.1f}",
        "small": f"{np.median(small) / 1000:.0f}",
        "small_tenth": f"{np.percentile(small, 90) / 1000:.0f}",
    }


def _table(rows: Sequence[tuple[str, Sequence[Compared]]]) -> str:
    lines = [["", *HEAD.values()]]
    for name, compared in rows:
        if compared:
            figures = summary(compared)
            lines.append([name, *(f"{figures[key]:.0f}" for key in HEAD)])
    return as_markdown(lines, left=[0])


def _parts(compared: Sequence[Compared]) -> Any:
    """Yield names and cells of parts of the table."""
    kinds: list[tuple[str, Sequence[Any], Callable[[Cell], Any]]] = [
        ("{}", MODELS, lambda cell: cell.model),
        ("{} hosts", sorted(HOSTS), lambda cell: cell.hosts),
        ("{}", RATES, lambda cell: cell.rate),
        ("RTT {}", TIMES, lambda cell: cell.rtt),
    ]
    for name, values, of in kinds:
        for value in values:
            yield name.format(value), [x for x in compared if of(x.cell) == value]


def _worst(compared: Sequence[Compared]) -> str:
    """Return a table of the five predictions that are farthest from the measurement."""
    rows = [
        (abs(np.log(x.predicted[m] / ms)), x.cell, m, ms, x.predicted[m])
        for x in compared
        for m, ms in x.measured.items()
    ]
    lines = [["model", "hosts", "link", "engine", "configuration", "measured ms", "predicted ms"]]
    for _, cell, method, ms, predicted in sorted(rows, key=lambda row: -row[0])[:5]:
        place = describe(cell.rate, {"rtt": cell.rtt})
        names = [cell.model, str(cell.hosts), place, *split(method)]
        lines.append([*names, f"{ms:.0f}", f"{predicted:.0f}"])
    return as_markdown(lines, left=[0, 2, 3, 4])


def write(found: Mapping[str, Any], compared: Sequence[Compared], output: Path) -> Path:
    """Write the page; return its path."""
    path = output / "plan.md"
    report.write_page(path, text(found, compared))
    return path
