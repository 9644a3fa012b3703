"""The measurements and the verdict of a gate, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of the link, measured with this job's collectives.

    Attributes:
        bandwidth: bytes per second that a rank sends in a large allreduce.
        latency: duration of a small allreduce, in seconds.
    """

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return f"link {8e-6 * self.bandwidth:.0f} Mbit/s, {1e3 * self.latency:.1f} ms"


@dataclass(frozen=True)
class Option:
    """A configuration for all tensors, and its measurements.

    Attributes:
        name: "wanted", "mixed" or a fallback.
        seconds: duration of a step; a lower bound from its bytes if the option was never tried.
        trials: number of trials.
        chosen: whether the gate has chosen this option.
    """

    name: str
    seconds: float
    trials: int
    chosen: bool


@dataclass(frozen=True)
class TensorRow:
    """The costs of one bucket.

    Attributes:
        name: name of the bucket.
        wanted: the policy's compressor.
        work: seconds per step of encoding and decoding; 0 if they cannot be measured (in a graph).
        sent: bytes sent per step.
        dense: bytes sent per step without compression.
        spares: seconds per step that compression saves in communication.
        served: the compressor that serves the bucket.
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
    """A gate's verdict and the measurements behind it; `str()` returns the tables.

    Attributes:
        verdict: the verdict in one line.
        link: the measured link; None before the first measurement.
        options: the measured configurations.
        tensors: the costs of each bucket.
    """

    verdict: str
    link: Link | None
    options: Sequence[Option]
    tensors: Sequence[TensorRow]

    def __str__(self) -> str:
        if not self.options:
            return self.verdict or "the gate has no measurements (yet); it measures on rank 0."
        options = [["configuration", "ms per step", "trials", ""]]
        for option in self.options:
            bound = "" if option.trials else "over "
            mark = "chosen" if option.chosen else ""
            options.append(
                [option.name, f"{bound}{1e3 * option.seconds:.1f}", str(option.trials), mark]
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
