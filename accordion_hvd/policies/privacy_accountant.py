"""Keeps a private compressor's promise: nothing travels beside it, and each step is paid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd.core.base import Compressor
from accordion_hvd.core.observer import Observer


class PrivacyAccountant(Observer):
    """Enters each exchange in a privacy budget, before it begins.

    Args:
        policy: named in error messages.
        compressor: the private compressor that serves all the time.
    """

    every_step = True
    needed_alone = True
    needs_dense = True

    def __init__(self, policy: Any, compressor: Compressor) -> None:
        self.policy, self.compressor = policy, compressor

    def extending(self, exchange: Any, buckets: Sequence[Any]) -> None:
        """Raise ValueError where something would travel beside the vector that is protected."""
        if exchange.skip:
            raise ValueError(
                f"skip is {exchange.skip!r}, but must be () with {self.policy!r}: what it names "
                "would travel unprotected."
            )
        if len(buckets) > 1:
            kinds = ", ".join(f"{bucket.name} ({bucket.dtype})" for bucket in buckets)
            raise ValueError(
                f"{self.policy!r} takes the whole model as one vector, but there are "
                f"{len(buckets)}: {kinds}. All its parameters must be of one dtype, on one device, "
                "and there from the beginning."
            )

    def opening(self, exchange: Any, lr: Mapping[str, float]) -> None:
        """Pay for the exchange first."""
        self.compressor.spend()

    def affords(self) -> bool:
        """Return whether the budget has room for another exchange."""
        return self.compressor.affords()

    def stats(self) -> dict[str, Any]:
        """Return the spent privacy."""
        budget = self.compressor.budget
        return {"privacy": budget.stats() if budget is not None else {}}


def per_sample(policy: Any) -> bool:
    """Return whether a rank gives the gradients of several contributors, one by one."""
    accountant = policy.observers.find(PrivacyAccountant)
    return accountant is not None and accountant.compressor.per_sample
