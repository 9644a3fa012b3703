"""Accounting of a private compressor: every gradient is protected, and every step is accounted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accordion_hvd.core.base import Compressor
from accordion_hvd.core.observer import Observer

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import Bucket


class PrivacyAccountant(Observer):
    """Charges each exchange, before it, to the budget of the private compressor."""

    every_step = True
    needed_alone = True
    needs_dense = True

    def __init__(self, policy: Any, compressor: Compressor) -> None:
        self.policy, self.compressor = policy, compressor

    def extending(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        """Raise ValueError if a tensor would be sent outside the protected vector."""
        if exchange.skip:
            raise ValueError(
                f"skip is {exchange.skip!r}, but must be () with {self.policy!r}: the tensors that "
                "skip names would be sent unprotected."
            )
        if len(buckets) > 1:
            kinds = ", ".join(f"{bucket.name} ({bucket.dtype})" for bucket in buckets)
            raise ValueError(
                f"{self.policy!r} takes the entire model as one vector, but the parameters form "
                f"{len(buckets)}: {kinds}. All parameters must have one dtype, be on one device, "
                "and exist from the first step."
            )

    def opening(self, exchange: Exchange, lr: Mapping[str, float]) -> None:
        self.compressor.spend()

    def affords(self) -> bool:
        return self.compressor.affords()

    def stats(self) -> dict[str, Any]:
        budget = self.compressor.budget
        return {"privacy": budget.stats() if budget is not None else {}}


def per_sample(policy: Any) -> bool:
    """Return whether each rank gives gradients of single examples or clients."""
    accountant = policy.observers.find(PrivacyAccountant)
    return accountant is not None and accountant.compressor.per_sample
