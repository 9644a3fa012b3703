"""Growth of the batch size: small batches in critical regimes, large ones afterwards."""

from __future__ import annotations

from typing import Any

from accordion_hvd import check
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.byte_budget import OVER
from accordion_hvd.policies.critical_regimes import HIGH, LOW, CriticalRegimes
from accordion_hvd.policies.decision import Decision

BATCH = "(batch size)"
"""Name of decisions about the batch size."""


class BatchGrowth(Observer):
    """Switches a training from small to large batches, once.

    Args:
        sizes: (small, large), numbers of examples over all ranks; large is a multiple of small.
        window: batches in a window; None if not known.

    Attributes:
        large: whether batches are large from now on.
        micro_batches: number of small batches in the current exchange, which is also the factor of
            the learning rate in its step.
        loader: whether a data loader gives batches of these sizes. Otherwise, the optimizer
            accumulates small batches.

    Raises:
        ValueError: if `sizes` is not two positive integers, large is no multiple of small, or a
            window is shorter than one large batch.
    """

    decides_ahead = True
    needed_alone = True

    def __init__(self, owner: Any, sizes: Any, window: int | None) -> None:
        pair = tuple(sizes) if isinstance(sizes, (tuple, list)) else ()
        if len(pair) != 2 or not all(check.is_integer(size) and size >= 1 for size in pair):
            check.refuse(owner, "batch_size", sizes, "two positive integers such as (512, 4096)")
        small, large = int(pair[0]), int(pair[1])
        if small > large or large % small:
            allowed = "(small, large), where large is a multiple of small"
            check.refuse(owner, "batch_size", sizes, allowed)
        self.owner, self.sizes, self.ratio = type(owner).__name__, (small, large), large // small
        if window is not None and window < self.ratio:
            least = f"at least {self.ratio}, the number of small batches in a large one"
            check.refuse(owner, "window", window, f"{least}, with batch_size={self.sizes}")
        self.large = self.loader = False
        self.micro_batches = 1

    @property
    def weight(self) -> int:  # type: ignore[override]
        return self.micro_batches

    @property
    def accumulated(self) -> int:  # type: ignore[override]
        return 1 if self.loader else self.micro_batches

    def share(self, ranks: int) -> int:
        """Return the examples of a small batch on each rank; ValueError if that is no integer."""
        if self.sizes[0] % ranks:
            allowed = f"multiples of {ranks}, the number of ranks"
            check.refuse(self.owner, "batch_size", self.sizes, allowed)
        return self.sizes[0] // ranks

    def resize(self) -> None:
        """Apply the size that `large` calls for to the batches from now on."""
        self.micro_batches = self.ratio if self.large else 1

    def grow(self, large: bool) -> None:
        """Set whether batches are to be large; a data loader applies the change by `resize`."""
        self.large = large
        if not self.loader:
            self.resize()

    def to_come(self, large: bool) -> int:
        """Return the small batches in each next exchange, if batches are or become `large`."""
        return self.ratio if large and not self.loader else self.micro_batches

    def judge(self, row: Decision, regimes: CriticalRegimes, unclear: bool) -> list[Decision]:
        """Return the decision about the batch size as a list; empty if there is none.

        `row` has the norm and the learning rate of the entire model; it is filled in. `unclear` is
        that of `CriticalRegimes.judge`.
        """
        if self.large and row.window:
            return []
        if self.large:
            row.level, row.reason = HIGH, OVER
        else:
            regimes.judge(row, unclear, LOW)
        row.compressor = f"{self.sizes[row.level]} examples"
        return [row] if row.reason else []

    def stats(self) -> dict[str, Any]:
        return {"batch_size": self.sizes[0] * self.micro_batches}

    def agreement(self) -> str:
        return f"loader={self.loader}"
