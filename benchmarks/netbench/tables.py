"""What the benchmark found, in numbers: medians, limits and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks import report
from benchmarks.netbench.contestants import COMPUTE
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
    """Method -> medians at a rate.

    Each has `ms` (of the slowest rank), `least` and `most` (over the turns), `cpu_ms` (mean of the
    ranks), `sent` and `received` (bytes a step of the host with most), `wire` (ms that the larger
    of these takes at the measured goodput), `limit` (if computation and links were busy at the same
    time throughout), `one_by_one` (if they never were), and `times` (`ms` over `limit`).
    """
    alone = statistics.median(slowest(turn) for turn in turns(found, COMPUTE))
    rows = {}
    for method in found["equal"]:
        mine = [turn for turn in turns(found, method) if turn["rate"] == rate]
        ms = [slowest(turn) for turn in mine]
        sent = _median(mine, lambda turn: max(turn["sent"]))
        received = _median(mine, lambda turn: max(turn["received"]))
        wire = 1000 * max(sent, received) / found["bandwidth"][rate] if method != COMPUTE else 0.0
        row = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "sent": sent,
               "received": received, "wire": wire, "limit": max(alone, wire),
               "one_by_one": alone + wire}  # fmt: skip
        row["cpu_ms"] = _median(mine, lambda turn: statistics.mean(turn["cpu_ms"]))
        row["times"] = row["ms"] / row["limit"]
        rows[method] = row
    return rows


def turns(found: Row, method: str) -> list[Row]:
    """All turns of a method."""
    return [turn for turn in found["turns"] if turn["method"] == method]


def slowest(turn: Row) -> float:
    """Milliseconds of a step: all wait for the slowest."""
    return max(turn["ms"])


def _median(found: Sequence[Row], value: Callable[[Row], float]) -> float:
    return statistics.median(value(turn) for turn in found)


def ratios(found: Row, method: str, other: str, rate: str) -> list[float]:
    """How many times as fast as another method it is: one ratio for each repetition.

    Both took their turns within minutes then, so that what else the machine did hit them alike.
    """
    ms: dict[str, dict[int, float]] = {}
    for name in (method, other):
        mine = [turn for turn in turns(found, name) if turn["rate"] == rate]
        ms[name] = {turn["repetition"]: slowest(turn) for turn in mine}
    return [ms[other][number] / ms[method][number] for number in ms[method] if number in ms[other]]


def comparison(found: Row, pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Head and rows: for each (method, other), how many times as fast it is at each rate."""
    rates = found["settings"]["rates"]
    rows = [["method", "compared with", *rates]]
    for method, other in pairs:
        if method in found["equal"] and other in found["equal"]:
            cells = [report.spread(ratios(found, method, other, rate)) for rate in rates]
            rows.append([method, other, *cells])
    return rows


def limits(found: Row) -> list[list[str]]:
    """Head and rows: how many times the limit each method takes at each rate."""
    rates = found["settings"]["rates"]
    all_rates = {rate: summary(found, rate) for rate in rates}
    rows = [["method", "MB sent", *rates]]
    for method in found["equal"]:
        cells = [f"{all_rates[rate][method]['times']:.2f}" for rate in rates]
        rows.append([method, f"{all_rates[rates[0]][method]['sent'] / 1e6:.3f}", *cells])
    return rows


def table(found: Row, rate: str) -> list[list[str]]:
    """Head and rows."""
    rows = []
    for method, row in summary(found, rate).items():
        megabytes = {f"megabytes_{key}": row[key] / 1e6 for key in ("sent", "received")}
        equal = "yes" if found["equal"][method] else "no"
        rows.append({**row, **megabytes, "method": method, "equal": equal})
    return tabulate(COLUMNS, rows)


def all_as_text(found: Row) -> str:
    """The tables of all rates."""
    parts = []
    for rate in found["settings"]["rates"]:
        goodput = found["bandwidth"][rate] * 8 / 1e6
        parts.append(f"{rate} ({goodput:.0f} Mbit/s of goodput)\n{as_text(table(found, rate))}")
    return "\n\n".join(parts)
