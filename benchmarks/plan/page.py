"""Errors of the predictions: docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from accordion_hvd.simulation.prediction import Prediction
from accordion_hvd.tools.plan.table import GAIN
from benchmarks import report
from benchmarks.netbench.links import describe
from benchmarks.plan.cells import HOSTS, MODELS, RATES, TIMES, Cell, held_out
from benchmarks.plan.judge import split
from examples.tables import as_markdown, format_table

NEAR = 0.05
"""Excess over the fastest configuration up to which a choice counts as right."""

LARGE = 1e6
"""Bytes of a step from which headers outweigh the engine's own messages."""


COLUMNS = {
    "": "{name}",
    "cells": "{cells}",
    "median error, %": "{median:.0f}",
    "90th percentile, %": "{tenth:.0f}",
    "choice within 5 % of the fastest, % of cells": "{chosen:.0f}",
    "right about whether compression pays, %": "{pays:.0f}",
}
WORST = {
    "model": "{model}",
    "hosts": "{hosts}",
    "link": "{link}",
    "engine": "{engine}",
    "configuration": "{configuration}",
    "measured ms": "{measured:.0f}",
    "predicted ms": "{predicted:.0f}",
}


def compare(
    cell: Cell, rows: Sequence[Mapping[str, Any]], steps: Mapping[str, Prediction]
) -> pd.DataFrame:
    """Return a row for each method of a cell.

    `measured` and `predicted` are milliseconds per step; `counted` and `sent` are the bytes per
    step that interfaces counted, and the predicted ones.
    """
    found = pd.DataFrame(rows).rename(columns={"ms": "measured", "sent": "counted"})
    found[["engine", "configuration"]] = [split(method) for method in found["method"]]
    found["predicted"] = [1000 * steps[method].seconds for method in found["method"]]
    found["sent"] = [steps[method].sent for method in found["method"]]
    return found.assign(cell=cell.name, **vars(cell))


def _pays(times: pd.Series) -> bool:
    """Return whether a configuration, the last level of the index, is faster than dense."""
    by_name = times.droplevel([0, 1])
    return by_name.drop("dense").min() < (1 - GAIN) * by_name["dense"]


def summary(compared: pd.DataFrame) -> dict[str, float]:
    """Return the figures of some cells: errors in %, and shares of right choices in %.

    The choice in a cell is the method with the least prediction.
    """
    errors = 100 * (compared["predicted"] / compared["measured"] - 1).abs()
    cells = compared.set_index("method").groupby("cell")
    chosen = compared.set_index(["cell", "method"])["measured"][cells["predicted"].idxmin().items()]
    excess = chosen.droplevel("method") / cells["measured"].min() - 1
    engines = compared.set_index(["cell", "engine", "configuration"]).groupby(level=[0, 1])
    pays = engines[["measured", "predicted"]].agg(_pays)
    return {
        "cells": len(cells),
        "median": errors.median(),
        "tenth": errors.quantile(0.9),
        "chosen": 100 * (excess <= NEAR).mean(),
        "pays": 100 * (pays["measured"] == pays["predicted"]).mean(),
    }


def text(found: Mapping[str, Any], cells: Sequence[pd.DataFrame]) -> str:
    """Return the page."""
    compared = pd.concat(cells, ignore_index=True)
    unseen = compared["cell"].isin(held_out())
    return report.render(
        "plan",
        **report.machine(found["machine"]),
        cells=len(cells),
        all=len(MODELS) * len(RATES) * len(TIMES) * len(HOSTS),
        summary=_table({"fitted to": compared[~unseen], "held out": compared[unseen]}),
        parts=_table(_parts(compared[unseen])),
        worst=_worst(compared[unseen]),
        **_bytes(compared),
    )


def _bytes(compared: pd.DataFrame) -> dict[str, str]:
    """Return the bytes that interfaces counted besides the predicted ones."""
    more, large = compared["counted"] - compared["sent"], compared["sent"] >= LARGE
    percent, kilobytes = 100 * more[large] / compared["sent"][large], more[~large] / 1000
    return {
        "large": f"{percent.median():.1f}",
        "large_tenth": f"{percent.quantile(0.9):.1f}",
        "small": f"{kilobytes.median():.0f}",
        "small_tenth": f"{kilobytes.quantile(0.9):.0f}",
    }


def _table(parts: Mapping[str, pd.DataFrame]) -> str:
    rows = [{"name": name, **summary(part)} for name, part in parts.items() if len(part)]
    return as_markdown(format_table(COLUMNS, rows), left=[0])


def _parts(compared: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each model, number of hosts, rate and round-trip time."""
    names = {"model": "{}", "hosts": "{} hosts", "rate": "{}", "rtt": "RTT {}"}
    values = (MODELS, sorted(HOSTS), RATES, TIMES)
    return {
        name.format(value): compared[compared[key] == value]
        for (key, name), order in zip(names.items(), values, strict=True)
        for value in order
    }


def _worst(compared: pd.DataFrame) -> str:
    """Return a table of the five predictions that are farthest from the measurement."""
    off = np.log(compared["predicted"] / compared["measured"]).abs()
    worst = compared.loc[off.nlargest(5).index]
    links = [
        describe(rate, {"rtt": rtt}) for rate, rtt in zip(worst["rate"], worst["rtt"], strict=True)
    ]
    return as_markdown(format_table(WORST, worst.assign(link=links)), left=[0, 2, 3, 4])


def write(found: Mapping[str, Any], cells: Sequence[pd.DataFrame], output: Path) -> Path:
    """Write the page; return its path."""
    path = output / "plan.md"
    report.write_page(path, text(found, cells))
    return path
