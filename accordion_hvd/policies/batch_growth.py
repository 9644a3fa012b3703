"""Batches that grow: small ones in critical regimes, large ones afterwards, with their rate."""

from __future__ import annotations

from typing import Any

from accordion_hvd import check
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.byte_budget import OVER
from accordion_hvd.policies.critical_regimes import HIGH, LOW, CriticalRegimes
from accordion_hvd.policies.decision import Decision

BATCH = "(batch size)"
"""The name of decisions about the batch."""


class BatchGrowth(Observer):
    """Makes the batches of a training large, once and for all.

    Args:
        owner: the policy, named in error messages.
        sizes: (small, large), examples of all ranks together, the large one a multiple of the
            small one.
        window: optimizer steps in a window; None if that is not known.

    Attributes:
        large: whether batches are large from now on.
        micro_batches: small batches in the current exchange, and by how much the learning rate
            is multiplied in its step.
        loader: whether a loader gives batches of these sizes; else small ones are accumulated.

    Raises:
        ValueError: sizes are no two positive integers, the large one is no multiple of the small
            one, or a window ends before one large batch is full.
    """

    decides_ahead = True
    needed_alone = True

    def __init__(self, owner: Any, sizes: Any, window: int | None) -> None:
        pair = tuple(sizes) if isinstance(sizes, (tuple, list)) else ()
        if len(pair) != 2 or not all(check.is_integer(size) and size >= 1 for size in pair):
            check.refuse(owner, "batch_size", sizes, "two positive integers such as (512, 4096)")
        small, large = int(pair[0]), int(pair[1])
        if small > large or large % small:
            allowed = "(small, large) with a large one that is a multiple of the small one"
            check.refuse(owner, "batch_size", sizes, allowed)
        self.owner, self.sizes, self.ratio = type(owner).__name__, (small, large), large // small
        if window is not None and window < self.ratio:
            least = f"at least {self.ratio}, the small batches in a large one"
            check.refuse(owner, "window", window, f"{least}, with batch_size={self.sizes}")
        self.large = self.loader = False
        self.micro_batches = 1

    @property
    def weight(self) -> int:  # type: ignore[override]
        """Return the number of small batches in the current exchange."""
        return self.micro_batches

    @property
    def accumulated(self) -> int:  # type: ignore[override]
        """Small batches whose gradients are accumulated for one exchange."""
        return 1 if self.loader else self.micro_batches

    def share(self, ranks: int) -> int:
        """Return how many examples of a small batch are one rank's.

        Raises:
            ValueError: ranks cannot have equal shares.
        """
        if self.sizes[0] % ranks:
            allowed = f"multiples of {ranks}, the number of ranks"
            check.refuse(self.owner, "batch_size", self.sizes, allowed)
        return self.sizes[0] // ranks

    def resize(self) -> None:
        """From now on batches are as large as they are meant to be."""
        self.micro_batches = self.ratio if self.large else 1

    def grow(self, large: bool) -> None:
        """Mean batches to be large, or small; loaders follow when they can."""
        self.large = large
        if not self.loader:
            self.resize()

    def to_come(self, large: bool) -> int:
        """Return the small batches in the next steps, if batches are or become large."""
        return self.ratio if large and not self.loader else self.micro_batches

    def judge(self, row: Decision, regimes: CriticalRegimes, unclear: bool) -> list[Decision]:
        """Return the decision about the batch, if there is one to take.

        Args:
            row: norm and learning rate of the whole model.
            regimes: the detector.
            unclear: whether the norm is no evidence (`CriticalRegimes.judge`).
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
        """Examples of all ranks in a step now."""
        return {"batch_size": self.sizes[0] * self.micro_batches}

    def agreement(self) -> str:
        """Return a line that says whether a loader gives the batches."""
        return f"loader={self.loader}"
