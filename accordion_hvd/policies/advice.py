"""What a gate has found out, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """As this job's collectives see it.

    Attributes:
        bandwidth: bytes a second that a rank sends in a large allreduce.
        latency: seconds of a small one.
    """

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        """In Mbit/s and ms."""
        return f"link {8e-6 * self.bandwidth:.0f} Mbit/s, {1e3 * self.latency:.1f} ms"


@dataclass(frozen=True)
class WayRow:
    """A way for all tensors.

    Attributes:
        way: "wanted", "mixed" or a fallback.
        seconds: of a step: measured, or, if never tried, what its bytes would take at least.
        turns: how often it was tried.
        chosen: whether it is in force.
    """

    way: str
    seconds: float
    turns: int
    chosen: bool


@dataclass(frozen=True)
class TensorRow:
    """A bucket.

    Attributes:
        name: its name.
        wanted: the policy's compressor.
        work: seconds a step in encoding and decoding; 0 where nobody can tell (in a graph).
        sent: bytes a step.
        dense: bytes a step uncompressed.
        spares: seconds a step that the spared bytes would cost.
        served: what serves it.
    """

    name: str
    wanted: str
    work: float
    sent: float
    dense: float
    spares: float
    served: str


@dataclass(frozen=True)
class Advice:
    """A gate's verdict and what led to it; `str()` gives the tables.

    Attributes:
        verdict: in one line.
        link: as measured; None before.
        ways: what was tried.
        tensors: bucket by bucket.
    """

    verdict: str
    link: Link | None
    ways: Sequence[WayRow]
    tensors: Sequence[TensorRow]

    def __str__(self) -> str:
        """Two tables under the verdict."""
        if not self.ways:
            return self.verdict or "the gate has not measured anything yet (rank 0 knows)."
        ways = [["way", "ms a step", "turns", ""]]
        for way in self.ways:
            least = "" if way.turns else "over "
            mark = "chosen" if way.chosen else ""
            ways.append([way.way, f"{least}{1e3 * way.seconds:.1f}", str(way.turns), mark])
        rows = [["tensor", "wanted", "work ms", "spares ms", "kB sent", "kB dense", "served by"]]
        for row in self.tensors:
            times = [f"{1e3 * seconds:.2f}" for seconds in (row.work, row.spares)]
            sizes = [f"{size / 1e3:.1f}" for size in (row.sent, row.dense)]
            rows.append([row.name, row.wanted, *times, *sizes, row.served])
        return "\n".join([self.verdict, "", *_table(ways), "", *_table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
