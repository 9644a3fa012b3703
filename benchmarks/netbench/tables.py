"""Tables of the benchmark's results: medians, limits and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks import report
from benchmarks.netbench.contestants import ALONE, COMPUTE
from benchmarks.netbench.links import describe
from examples.report import as_text, tabulate
from examples.results import Row

COLUMNS = {
    "method": "{method}",
    "weights equal": "{equal}",
    "ms/step": "{ms:.0f}",
    "(range)": "{least:.0f}-{most:.0f}",
    "CPU ms": "{cpu_ms:.0f}",
    "MB sent": "{megabytes_sent:.3f}",
    "MB received": "{megabytes_received:.3f}",
    "limit ms": "{limit:.0f}",
    "no overlap ms": "{one_by_one:.0f}",
    "time / limit": "{times:.2f}",
}


def summary(found: Row, rate: str) -> dict[str, Row]:
    """Return the medians of each method at a rate, as method -> row.

    A row has the keys:

    - `ms`: milliseconds per step of the slowest rank;
    - `least` and `most`: range of `ms` over repetitions;
    - `cpu_ms`: mean over ranks;
    - `sent` and `received`: bytes per step of the host with the most;
    - `wire`: milliseconds that the larger of these two takes at the measured goodput;
    - `limit`: time of a step if computation and links overlapped completely;
    - `one_by_one`: time of a step if they never overlapped;
    - `times`: `ms` / `limit`.
    """
    compute = statistics.median(slowest(row) for row in repetitions(found, COMPUTE))
    rows = {}
    for method in found["equal"]:
        own = [row for row in repetitions(found, method) if row["rate"] == rate]
        ms = [slowest(row) for row in own]
        sent = _median(own, lambda row: max(row["sent"]))
        received = _median(own, lambda row: max(row["received"]))
        wire = 1000 * max(sent, received) / found["bandwidth"][rate] if method not in ALONE else 0.0
        row = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "sent": sent,
               "received": received, "wire": wire, "limit": max(compute, wire),
               "one_by_one": compute + wire}  # fmt: skip
        row["cpu_ms"] = _median(own, lambda repetition: statistics.mean(repetition["cpu_ms"]))
        row["times"] = row["ms"] / row["limit"]
        rows[method] = row
    return rows


def repetitions(found: Row, method: str) -> list[Row]:
    """Return the rows of all repetitions of a method."""
    return [row for row in found["turns"] if row["method"] == method]


def slowest(row: Row) -> float:
    """Return the milliseconds per step of the slowest rank, for which all ranks wait."""
    return max(row["ms"])


def _median(found: Sequence[Row], value: Callable[[Row], float]) -> float:
    return statistics.median(value(row) for row in found)


def ratios(found: Row, method: str, other: str, rate: str) -> list[float]:
    """Return how many times as fast as `other` a method is, for each repetition.

    Both methods run within minutes of each other, so other load on the machine affects them alike.
    """
    ms: dict[str, dict[int, float]] = {}
    for name in (method, other):
        own = [row for row in repetitions(found, name) if row["rate"] == rate]
        ms[name] = {row["repetition"]: slowest(row) for row in own}
    return [ms[other][number] / ms[method][number] for number in ms[method] if number in ms[other]]


def excesses(
    found: Row, method: str, other: str, rate: str, value: Callable[[Row], float] | None = None
) -> list[float]:
    """Return the excess of a method as a multiple of that of `other`, for each repetition.

    The excess of a step is its time minus that of computing alone, in the same repetition.

    Args:
        found: results.
        method: the method.
        other: the method to compare with.
        rate: rate of the links.
        value: function that returns the time of a row. Default: that of the slowest rank.
    """
    value = value or slowest
    times: dict[str, dict[int, float]] = {}
    for name in (method, other, COMPUTE):
        own = [row for row in repetitions(found, name) if row["rate"] == rate]
        times[name] = {row["repetition"]: value(row) for row in own}
    alone = times[COMPUTE]
    numbers = [n for n in times[method] if n in times[other] and n in alone]
    pairs = [(times[method][n] - alone[n], times[other][n] - alone[n]) for n in numbers]
    return [mine / theirs for mine, theirs in pairs if theirs > 0]


def cpu(row: Row) -> float:
    """Return the processor milliseconds per step, the mean over ranks."""
    return statistics.mean(row["cpu_ms"])


def excess(found: Row, pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return a header and rows: ratio of the excesses of each (method, other) pair at each rate.

    The last column compares processor times, over all rates.
    """
    rates = found["settings"]["rates"]
    rows = [["method", "compared with", *rates, "processor time"]]
    for method, other in pairs:
        if method in found["equal"] and other in found["equal"]:
            cells = [report.interval(excesses(found, method, other, rate)) for rate in rates]
            busy = [x for rate in rates for x in excesses(found, method, other, rate, cpu)]
            rows.append([method, other, *cells, report.interval(busy)])
    return rows


def comparison(found: Row, pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return a header and rows: speedup of each (method, other) pair at each rate."""
    rates = found["settings"]["rates"]
    rows = [["method", "compared with", *rates]]
    for method, other in pairs:
        if method in found["equal"] and other in found["equal"]:
            cells = [report.spread(ratios(found, method, other, rate)) for rate in rates]
            rows.append([method, other, *cells])
    return rows


def limits(found: Row) -> list[list[str]]:
    """Return a header and rows: time of each method as a multiple of the limit, at each rate."""
    rates = found["settings"]["rates"]
    all_rates = {rate: summary(found, rate) for rate in rates}
    rows = [["method", "MB sent", *rates]]
    for method in found["equal"]:
        cells = [f"{all_rates[rate][method]['times']:.2f}" for rate in rates]
        rows.append([method, f"{all_rates[rates[0]][method]['sent'] / 1e6:.3f}", *cells])
    return rows


def table(found: Row, rate: str) -> list[list[str]]:
    """Return a header and rows."""
    rows = []
    for method, row in summary(found, rate).items():
        megabytes = {f"megabytes_{key}": row[key] / 1e6 for key in ("sent", "received")}
        equal = "yes" if found["equal"][method] else "no"
        rows.append({**row, **megabytes, "method": method, "equal": equal})
    return tabulate(COLUMNS, rows)


def all_as_text(found: Row) -> str:
    """Return the tables of all rates."""
    parts = []
    for rate in found["settings"]["rates"]:
        goodput = found["bandwidth"][rate] * 8 / 1e6
        title = f"{describe(rate, found['settings'])} ({goodput:.0f} Mbit/s of goodput)"
        parts.append(f"{title}\n{as_text(table(found, rate))}")
    return "\n\n".join(parts)
