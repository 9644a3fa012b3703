"""The answers of a receipt, computed from the records of a ledger."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_hvd.comm.tcp import address
from accordion_hvd.engine.ledger.samples import PARTS

Found = Mapping[str, Any]
"""The content of `ledger.json`."""

CRITICAL = ("Accordion", "AdaQS")
"""Policies whose first level serves layers in critical regimes."""

UNEVEN, SMALL = 0.1, 0.05
"""Shares from which on a slow rank, and communication, are worth mentioning."""

WARM = 10
"""Steps that are not typical: connections are made, and graphs are traced."""

EXCHANGE = ("encode", "wait", "decode", "graph")
"""Parts of the time of a step that an exchange takes."""

DENSE, HALF, OWN = "Dense()", "FP16()", "own"
"""Names of rehearsed exchanges: two compressors, and the job's own exchange."""


@dataclass(frozen=True)
class Rank:
    """Means of one rank per step, and its slowest connection.

    Attributes:
        parts: seconds per step of each part of the time, as in a `Ledger`.
        rate: bytes per second that its slowest connection attains; 0 if it is not known.
        rtt: least round-trip time of that connection in seconds.
        peer: address of its other end; "" if it is not known.
        wire: bytes that the rank has sent over TCP, in all.
    """

    number: int
    parts: Mapping[str, float]
    rate: float
    rtt: float
    peer: str
    wire: float

    @property
    def own(self) -> float:
        """Return the seconds per step in which the rank does not wait for messages."""
        return self.parts["compute"] + self.parts["encode"] + self.parts["decode"]


@dataclass(frozen=True)
class Estimate:
    """The seconds by which a step with another exchange would exceed one of the job.

    Attributes:
        name: the compressor that would serve all tensors.
        more: the estimate; negative if the other exchange is faster.
        low, high: its range.
    """

    name: str
    more: float
    low: float
    high: float

    @property
    def slower(self) -> bool | None:
        """Return whether a step would take longer; None if the range spans both answers."""
        if self.low < 0 < self.high or self.low == self.high == 0:
            return None
        return self.low >= 0


@dataclass(frozen=True)
class Summary:
    """The answers of a receipt. Means are those of the steps after the first `WARM` ones.

    Attributes:
        steps: number of all steps.
        total: seconds of all steps.
        seconds: mean seconds per step, without rehearsals.
        parts: mean seconds per step of each part of the time.
        sent, dense: bytes that a rank sends per step, and would send uncompressed.
        ranks: the ranks; empty if replicas were never compared.
        rates: bytes per second that a rank sends in a large allreduce, each time that they were
            measured.
        exchange: seconds per step that the training thread spends on the exchange.
        alone: the same in rehearsals; None without rehearsals.
        estimates: other exchanges, by compressor; empty without rehearsals.
        price: price of an hour of the job; None if it is not known.
    """

    steps: int
    total: float
    seconds: float
    parts: Mapping[str, float]
    sent: float
    dense: float
    ranks: Sequence[Rank]
    rates: Sequence[float]
    exchange: float
    alone: float | None
    estimates: Mapping[str, Estimate]
    price: float | None

    @property
    def communication(self) -> float:
        return self.exchange + self.parts["decide"]

    @property
    def share(self) -> float:
        return self.communication / self.seconds if self.seconds else 0.0

    @property
    def ratio(self) -> float:
        return self.dense / self.sent if self.sent else 1.0

    @property
    def bought(self) -> tuple[float, float] | None:
        """Return the range of the seconds of the whole job that compression has saved.

        None if it is not known, or if nothing is compressed.
        """
        dense = self.estimates.get(DENSE)
        return None if dense is None else (dense.low * self.steps, dense.high * self.steps)

    @property
    def slowest(self) -> Rank | None:
        """Return the rank with the most own work per step; None if ranks are not known."""
        return max(self.ranks, key=lambda rank: rank.own, default=None)

    @property
    def delay(self) -> float:
        """Return the seconds per step by which the slowest rank exceeds the median rank."""
        if self.slowest is None:
            return 0.0
        return self.slowest.own - statistics.median(rank.own for rank in self.ranks)

    @property
    def thinnest(self) -> Rank | None:
        """Return the rank with the slowest connection; None if no connection is known."""
        known = [rank for rank in self.ranks if rank.rate]
        return min(known, key=lambda rank: rank.rate, default=None)


def summarize(found: Found) -> Summary:
    every = found["steps"]
    rows = _typical(every)
    columns = {name: sum(row[name] for row in rows) for name in every}
    parts, steps = _parts(columns), max(columns["steps"], 1.0)
    exchange = sum(parts[part] for part in EXCHANGE)
    alone = [x - row["pause"] for row in found["rehearsals"] for x in row["seconds"][OWN]]
    return Summary(
        steps=int(sum(every["steps"])),
        total=sum(every["seconds"]),
        seconds=sum(parts.values()) - parts["measure"],
        parts=parts,
        sent=columns["sent"] / steps,
        dense=columns["dense"] / steps,
        ranks=_ranks(found),
        rates=[link["bandwidth"] for link in found["links"]],
        alone=statistics.median(alone) if alone else None,
        exchange=exchange,
        estimates=_estimates(found, _wander(rows), exchange),
        price=found["job"]["price"],
    )


def _typical(columns: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Return the windows after the first `WARM` steps, or all if there are no others."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    ends = itertools.accumulate(row["steps"] for row in rows)
    return [row for row, end in zip(rows, ends, strict=True) if end - row["steps"] >= WARM] or rows


def _wander(rows: Sequence[Mapping[str, float]]) -> float:
    """Return by how much the mean step of an eighth of the job differs from another's, in seconds.

    It is half the distance of their quartiles, so that single long pauses do not count.
    """
    size = -(-len(rows) // 8)
    blocks = [rows[i : i + size] for i in range(0, len(rows), size)]
    means = [
        sum(row["seconds"] - row["measure"] for row in block) / sum(row["steps"] for row in block)
        for block in blocks
    ]
    if len(means) < 4:
        return 0.0
    first, _, third = statistics.quantiles(means, n=4)
    return (third - first) / 2


def _estimates(found: Found, wander: float, exchange: float) -> dict[str, Estimate]:
    """Return what steps with other exchanges would take more, by the rehearsals.

    Turns of one rehearsal followed one another, so each is compared with the job's own exchange in
    the same turn. The range is that of four out of five turns, widened by `wander`. No exchange can
    save more than the seconds that the job's own takes.
    """
    turns: dict[str, list[float]] = {}
    for row in found["rehearsals"]:
        own = row["seconds"][OWN]
        for name, seconds in row["seconds"].items():
            if name != OWN:
                more = [other - mine for other, mine in zip(seconds, own, strict=True)]
                turns.setdefault(name, []).extend(more)
    estimates = {}
    for name, more in turns.items():
        low, *_, high = statistics.quantiles(more * 2, n=10, method="inclusive")  # also of one turn
        bounds = (statistics.median(more), low - wander, high + wander)
        estimates[name] = Estimate(name, *(max(x, -exchange) for x in bounds))
    return estimates


def _ranks(found: Found) -> list[Rank]:
    tables = found["ranks"]["tables"]
    if not tables:
        return []
    ranks = []
    for number, numbers in enumerate(tables[-1][1]):
        row = dict(zip(found["ranks"]["columns"], numbers, strict=True))
        link = {"rate": row["rate"], "rtt": row["rtt"], "peer": address(row["peer"])}
        ranks.append(Rank(number, _parts(row), **link, wire=row["wire"]))
    return ranks


def _parts(sums: Mapping[str, float]) -> dict[str, float]:
    return {part: sums[part] / max(sums["steps"], 1.0) for part in PARTS}


# ------------------------------------------------------------------------------------------- levels
def timeline(found: Found) -> dict[str, list[tuple[int, int, str]]]:
    """Return the spans (first step, end, compressor) of each bucket in which one compressor served.

    Buckets that are never compressed are left out.
    """
    marks = {name: [(0, found["job"]["buckets"][name]["first"])] for name in compressed(found)}
    for event in found["events"]:
        if event["kind"] == "level" and event["bucket"] in marks:
            marks[event["bucket"]].append((event["step"], event["compressor"]))
    return {name: _spans(found, each) for name, each in marks.items()}


def critical(found: Found) -> list[tuple[int, int, int]]:
    """Return (first step, end, number of critical layers) of the spans between decisions.

    The list is empty if the policy has no critical regimes.
    """
    if not found["job"]["policy"].startswith(CRITICAL):
        return []
    current = dict.fromkeys(compressed(found), 0)
    marks = [(0, len(current))]
    decisions = sorted(found["decisions"], key=lambda row: row["step"])
    for step, rows in itertools.groupby(decisions, key=lambda row: row["step"]):
        current |= {row["name"]: row["level"] for row in rows if row["name"] in current}
        count = sum(level == 0 for level in current.values())
        if count != marks[-1][1]:
            marks.append((step, count))
    return _spans(found, marks)


def compressed(found: Found) -> list[str]:
    """Return the names of the buckets that are compressed."""
    return [name for name, facts in found["job"]["buckets"].items() if facts["compress"]]


def steps_of(found: Found) -> int:
    return int(sum(found["steps"]["steps"]))


def _spans(found: Found, marks: Sequence[tuple[int, Any]]) -> list[tuple[int, int, Any]]:
    ends = [*(step for step, _ in marks[1:]), steps_of(found)]
    return [(began, end, x) for (began, x), end in zip(marks, ends, strict=True) if end > began]


# ------------------------------------------------------------------------------------------- advice
def advice(summary: Summary) -> list[str]:
    """Return three sentences: what communication costs, what compression buys, who is slow."""
    return [_about_share(summary), _about_compression(summary), _about_ranks(summary)]


def _about_share(summary: Summary) -> str:
    step, parts = ms(summary.seconds), summary.parts
    working = parts["encode"] + parts["decode"]
    if summary.share < SMALL:
        return (
            f"Communication takes {percent(summary.share)} of a step of {step}, so a faster "
            "network or stronger compression would save hardly anything."
        )
    if parts["graph"] > parts["wait"] + working:
        return (
            f"Exchanges take {ms(parts['graph'])} of a step of {step}; graphs do not show which "
            "part of this time is waiting."
        )
    if working > parts["wait"]:
        return (
            f"Encoding and decoding take {ms(working)} of a step of {step}, more than the "
            f"{ms(parts['wait'])} of waiting: a cheaper compressor could be faster."
        )
    text = (
        f"The training thread waits for messages in {ms(parts['wait'])} of a step of {step} "
        f"({percent(parts['wait'] / summary.seconds)})"
    )
    if summary.alone is None or summary.exchange - summary.alone < SMALL * summary.seconds:
        return f"{text}, which is the most that fewer bytes or a faster network could save."
    return (
        f"{text}. The exchange takes {ms(summary.alone)} where all ranks begin it together; in the "
        "rest, ranks wait for each other or for a free core."
    )


def _about_compression(summary: Summary) -> str:
    if not summary.estimates:
        return "Exchanges were not rehearsed, so no other job can be estimated: see docs/ledger.md."
    texts = [f"{between(summary, x)} {_without(x)}" for x in summary.estimates.values()]
    listed = ", ".join(texts[:-1]) + (" and " if texts[1:] else "") + texts[-1]
    return (
        f"A step would take an estimated {listed}, instead of {ms(summary.seconds)}: "
        f"{_verdict(summary.estimates)}."
    )


def _without(estimate: Estimate) -> str:
    usual = {DENSE: "without compression", HALF: "with 16 bits"}
    return usual.get(estimate.name, f"with {estimate.name}")


def between(summary: Summary, estimate: Estimate) -> str:
    """Return the range of a step's duration with another exchange, as text."""
    low, high = (ms(summary.seconds + x) for x in (estimate.low, estimate.high))
    return low if low == high else f"{low} to {high}"


def _verdict(estimates: Mapping[str, Estimate]) -> str:
    dense, half = estimates.get(DENSE), estimates.get(HALF)
    if dense is None:  # nothing is compressed
        faster = [_without(x) for x in estimates.values() if x.slower is False]
        unclear = [_without(x) for x in estimates.values() if x.slower is None]
        if not faster and unclear:
            return f"the measurements cannot tell whether steps {' or '.join(unclear)} are faster"
        return f"steps {' or '.join(faster)} are faster" if faster else "compression would not pay"
    if dense.slower is None:
        return "the measurements cannot tell whether compression pays"
    if not dense.slower:
        return "compression does not pay"
    if half is None or half.slower:
        return "compression pays"
    if half.slower is False:
        return "16 bits would be faster"
    return "compression pays, but the measurements cannot tell whether 16 bits would be faster"


def _about_ranks(summary: Summary) -> str:
    rank, link = summary.slowest, summary.thinnest
    if rank is None or len(summary.ranks) < 2:
        return "Ranks were not compared with each other, so it is not known which one is slow."
    if summary.delay > UNEVEN * summary.seconds:
        return (
            f"Rank {rank.number} works {ms(summary.delay)} longer per step than the median rank, "
            "and the others wait for it: look at its input, processor or GPU first."
        )
    even = f"Ranks are even: the slowest, rank {rank.number}, takes {ms(summary.delay)} more"
    if link is None:
        return f"{even} than the median."
    to = f" to {link.peer}" if link.peer else ""
    return f"{even} than the median; the slowest connection, of rank {link.number}{to}, attains " \
           f"{mbit(link.rate)}."  # fmt: skip


# --------------------------------------------------------------------------------------------- text
def ms(seconds: float) -> str:
    """Return a duration in milliseconds, with three digits."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def mbit(rate: float) -> str:
    bits = 8e-6 * rate
    return f"{bits:.3g} Mbit/s" if bits < 1000 else f"{bits / 1e3:.3g} Gbit/s"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1e3
    return f"{count:,.3g} TB"


def duration(seconds: float) -> str:
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if abs(minutes) < 120 else f"{minutes / 60:.3g} h"
