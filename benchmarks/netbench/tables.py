"""Tables of the benchmark's results: medians, limits and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pandas as pd

from benchmarks import report
from benchmarks.netbench.contestants import ALONE, COMPUTE, DDP, FP16, HOOK, OURS, OVER
from benchmarks.netbench.links import describe
from examples.results import Row
from examples.tables import as_text, format_table

COLUMNS = {
    "method": "{method}",
    "weights equal": "{equal}",
    "ms/step": "{ms:.0f}",
    "(range)": "{least:.0f}-{most:.0f}",
    "CPU ms": "{cpu_ms:.0f}",
    "MB sent": "{sent:.3f}",
    "MB received": "{received:.3f}",
    "limit ms": "{limit:.0f}",
    "no overlap ms": "{one_by_one:.0f}",
    "time / limit": "{times:.2f}",
}


def repetitions(found: Row) -> pd.DataFrame:
    """Return a row for each repetition of a method at a rate.

    `ms` is that of the slowest rank, for which all ranks wait; `cpu_ms` is the mean over ranks;
    `sent` and `received` are the bytes of the host with the most.
    """
    turns = pd.DataFrame(found["turns"])
    merged = {"ms": max, "cpu_ms": statistics.mean, "sent": max, "received": max}
    return turns.assign(**{key: turns[key].map(function) for key, function in merged.items()})


def summary(found: Row, rate: str) -> pd.DataFrame:
    """Return the medians of each method at a rate; the index is the method.

    The columns are:

    - `ms`: milliseconds per step of the slowest rank;
    - `least` and `most`: range of `ms` over repetitions;
    - `cpu_ms`: mean over ranks;
    - `sent` and `received`: bytes per step of the host with the most;
    - `wire`: milliseconds that the larger of these two takes at the measured goodput;
    - `limit`: time of a step if computation and links overlapped completely;
    - `one_by_one`: time of a step if they never overlapped;
    - `times`: `ms` / `limit`.
    """
    turns = repetitions(found)
    compute = turns["ms"][turns["method"] == COMPUTE].median()
    by_method = turns[turns["rate"] == rate].groupby("method")
    rows = by_method[["ms", "cpu_ms", "sent", "received"]].median().reindex(list(found["equal"]))
    wire = 1000 * rows[["sent", "received"]].max(axis=1) / found["bandwidth"][rate]
    rows["wire"] = wire.mask(rows.index.isin(ALONE), 0.0)
    rows["limit"] = rows["wire"].clip(lower=compute)
    return rows.assign(
        least=by_method["ms"].min(),
        most=by_method["ms"].max(),
        one_by_one=compute + rows["wire"],
        times=rows["ms"] / rows["limit"],
    )


def times(found: Row, method: str, rate: str, key: str = "ms") -> pd.Series:
    """Return a value of a method at a rate for each repetition, which is the index."""
    turns = repetitions(found)
    mine = turns[(turns["method"] == method) & (turns["rate"] == rate)]
    return mine.set_index("repetition")[key]


def ratios(found: Row, method: str, other: str, rate: str) -> pd.Series:
    """Return how many times as fast as `other` a method is, for each repetition.

    Both methods run within minutes of each other, so other load on the machine affects them alike.
    """
    return (times(found, other, rate) / times(found, method, rate)).dropna()


def excesses(found: Row, method: str, other: str, rate: str, key: str = "ms") -> pd.Series:
    """Return the excess of a method as a multiple of that of `other`, for each repetition.

    The excess of a step is its time minus that of computing alone, in the same repetition.

    Args:
        found: results.
        method: the method.
        other: the method to compare with.
        rate: rate of the links.
        key: the time, "ms" or "cpu_ms".
    """
    alone = times(found, COMPUTE, rate, key)
    mine, theirs = (times(found, name, rate, key) - alone for name in (method, other))
    return (mine / theirs.where(theirs > 0)).dropna()


def excess(found: Row, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return a table of the ratio of the excesses of each (method, other) pair at each rate.

    The last column compares processor times, over all rates.
    """
    rates, rows = found["settings"]["rates"], []
    for pair in _measured(found, pairs):
        cells = [report.interval(excesses(found, *pair, rate)) for rate in rates]
        busy = pd.concat(excesses(found, *pair, rate, "cpu_ms") for rate in rates)
        rows.append([*pair, *cells, report.interval(busy)])
    return pd.DataFrame(rows, columns=["method", "compared with", *rates, "processor time"])


def excess_pairs(methods: Sequence[str]) -> list[tuple[str, str]]:
    """Return each method of this package with DDP's own hook of the same compression.

    `PowerSGD(4, alternate=True)` sends the bytes of PowerSGD(2) and is compared with DDP's
    PowerSGD(4), at whose accuracy it aims.
    """
    pairs = []
    for method in methods:
        for prefix in (OVER, HOOK, OURS):
            if method.startswith(prefix):
                word = method.removeprefix(prefix).removesuffix(",alternate")
                pairs.append((method, f"{DDP}{FP16}" if word == "fp16" else f"{DDP} {word}"))
                break
    return pairs


def comparison(found: Row, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return a table of the speedup of each (method, other) pair at each rate."""
    rates = found["settings"]["rates"]
    rows = [
        [*pair, *(report.spread(ratios(found, *pair, rate)) for rate in rates)]
        for pair in _measured(found, pairs)
    ]
    return pd.DataFrame(rows, columns=["method", "compared with", *rates])


def _measured(found: Row, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if set(pair) <= found["equal"].keys()]


def limits(found: Row) -> pd.DataFrame:
    """Return a table of the time of each method as a multiple of the limit, at each rate."""
    rows = {rate: summary(found, rate) for rate in found["settings"]["rates"]}
    sent = next(iter(rows.values()))["sent"] / 1e6
    table = pd.DataFrame({rate: row["times"].map("{:.2f}".format) for rate, row in rows.items()})
    table.insert(0, "MB sent", sent.map("{:.3f}".format))
    return table.reset_index()


def table(found: Row, rate: str) -> pd.DataFrame:
    """Return a table with a row for each method."""
    rows = summary(found, rate)
    rows[["sent", "received"]] /= 1e6
    rows["equal"] = ["yes" if found["equal"][method] else "no" for method in rows.index]
    return format_table(COLUMNS, rows.reset_index())


def all_as_text(found: Row) -> str:
    """Return the tables of all rates, and that of the excesses if there is something to compare."""
    parts = []
    for rate in found["settings"]["rates"]:
        goodput = found["bandwidth"][rate] * 8 / 1e6
        title = f"{describe(rate, found['settings'])} ({goodput:.0f} Mbit/s of goodput)"
        parts.append(f"{title}\n{as_text(table(found, rate))}")
    against = excess(found, excess_pairs(list(found["equal"])))
    if len(against):
        parts.append(f"Excess over computing alone\n{as_text(against)}")
    return "\n\n".join(parts)
