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
class Summary:
    """The answers of a receipt.

    Attributes:
        seconds: mean seconds per step.
        parts: mean seconds per step of each part of the time.
        sent, dense: bytes that a rank sends per step, and would send uncompressed.
        ranks: the ranks; empty if replicas were never compared.
        rate: bytes per second that a rank sends in a large allreduce; 0 if it is not known.
        latency: seconds of a small allreduce.
        rounds: messages per step that follow one another, each of which costs the latency.
        overlap: seconds per step in which messages travel while the training thread computes.
        price: price of an hour of the job; None if it is not known.
    """

    steps: int
    seconds: float
    parts: Mapping[str, float]
    sent: float
    dense: float
    ranks: Sequence[Rank]
    rate: float
    latency: float
    rounds: float
    overlap: float
    price: float | None

    @property
    def communication(self) -> float:
        """Return the seconds per step that the training thread spends on communication."""
        return sum(value for part, value in self.parts.items() if part != "compute")

    @property
    def share(self) -> float:
        """Return the part of a step that is communication."""
        return self.communication / self.seconds if self.seconds else 0.0

    @property
    def ratio(self) -> float:
        """Return how many times fewer bytes are sent than without compression."""
        return self.dense / self.sent if self.sent else 1.0

    @property
    def explained(self) -> float:
        """Return the seconds of waiting per step that the link explains, an estimate.

        Ranks that come late, and cores that are busy, cause the rest of the waiting.
        """
        if not self.rate:
            return self.parts["wait"]
        flight = self.sent / self.rate + self.rounds * self.latency
        return min(self.parts["wait"], max(0.0, flight - self.overlap))

    def without(self, bits: int) -> float | None:
        """Return the seconds of a step that sends all elements with 32 or 16 bits, an estimate.

        Messages travel at `rate`, overlap with computing for as long as the measured ones, and need
        no time for encoding. Waiting that the link does not explain remains.

        Returns:
            None if no rate is known.
        """
        if not self.rate:
            return None
        flight = self.dense * bits / 32 / self.rate + self.latency
        others = self.parts["wait"] - self.explained
        return self.parts["compute"] + others + max(0.0, flight - self.overlap)

    @property
    def bought(self) -> float | None:
        """Return the seconds of the whole job that compression has saved; None if not known."""
        dense = self.without(32)
        return None if dense is None else (dense - self.seconds) * self.steps

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
    columns = {name: sum(values) for name, values in found["steps"].items()}
    parts, steps = _parts(columns), max(columns["steps"], 1.0)
    link = found["link"] or {"bandwidth": 0.0, "latency": 0.0}
    flight = columns["flight"] / steps
    return Summary(
        steps=int(columns["steps"]),
        seconds=columns["seconds"] / steps,
        parts=parts,
        sent=columns["sent"] / steps,
        dense=columns["dense"] / steps,
        ranks=_ranks(found),
        rate=link["bandwidth"],
        latency=link["latency"],
        rounds=max((g["rounds"] / g["steps"] for g in found["groups"].values()), default=1.0),
        overlap=max(0.0, flight - parts["wait"] - parts["decode"] - parts["graph"]),
        price=found["job"]["price"],
    )


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
    """Return the mean seconds per step of each part of the time."""
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
    """Return (first step, end, value) between changes (step, value), the last until the end."""
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
    others = parts["wait"] - summary.explained
    if others < SMALL * summary.seconds:
        return f"{text}, which is the most that fewer bytes or a faster network could save."
    return (
        f"{text}. Its bytes need {ms(summary.sent / summary.rate)}, its {summary.rounds:.3g} "
        f"rounds of messages {ms(summary.rounds * summary.latency)}; in the rest, ranks wait for "
        "each other or for a free core."
    )


def _about_compression(summary: Summary) -> str:
    dense, half = summary.without(32), summary.without(16)
    if dense is None or half is None:
        return "The network was not measured, so no uncompressed step can be estimated."
    rate = f"At the measured {mbit(summary.rate)}"
    if summary.ratio < 1.05:
        return f"{rate}, 16 bits would make a step take an estimated {ms(half)}."
    pays = "compression pays"
    if half <= 1.02 * summary.seconds:
        pays = "16 bits would do" if dense > 1.02 * summary.seconds else "compression does not pay"
    return (
        f"{rate}, a step would take an estimated {ms(dense)} uncompressed and {ms(half)} with 16 "
        f"bits, instead of {ms(summary.seconds)}: {pays}."
    )


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
