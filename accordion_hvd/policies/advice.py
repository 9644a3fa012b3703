"""The findings of a gate, for people to read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The link as this job's collectives see it.

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
class Option:
    """A configuration for all tensors, and its measurements.

    Attributes:
        name: "wanted", "mixed" or a fallback.
        seconds: of a step: measured, or, if never tried, what its bytes would take at least.
        turns: how often it was tried.
        chosen: whether it is in force.
    """

    name: str
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
        options: the measured configurations.
        tensors: bucket by bucket.
    """

    verdict: str
    link: Link | None
    options: Sequence[Option]
    tensors: Sequence[TensorRow]

    @property
    def ways(self) -> Sequence[Option]:
        """Return `options`, by their old name."""
        warnings.warn("Advice.ways is called options now.", DeprecationWarning, stacklevel=2)
        return self.options

    def __str__(self) -> str:
        """Return two tables under the verdict."""
        if not self.options:
            return self.verdict or "the gate has not measured anything yet (rank 0 knows)."
        options = [["configuration", "ms a step", "turns", ""]]
        for option in self.options:
            least = "" if option.turns else "over "
            mark = "chosen" if option.chosen else ""
            options.append(
                [option.name, f"{least}{1e3 * option.seconds:.1f}", str(option.turns), mark]
            )
        rows = [["tensor", "wanted", "work ms", "spares ms", "kB sent", "kB dense", "served by"]]
        for row in self.tensors:
            times = [f"{1e3 * seconds:.2f}" for seconds in (row.work, row.spares)]
            sizes = [f"{size / 1e3:.1f}" for size in (row.sent, row.dense)]
            rows.append([row.name, row.wanted, *times, *sizes, row.served])
        return "\n".join([self.verdict, "", *_table(options), "", *_table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
