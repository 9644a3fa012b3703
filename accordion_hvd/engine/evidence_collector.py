"""Collection of the evidence that a policy needs, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.bucket_state import BucketState
from accordion_hvd.engine.layout import Batch
from accordion_hvd.policies.evidence import Evidence, Step

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


class EvidenceCollector:
    """Collector of the evidence that is updated in each step of an exchange.

    Attributes:
        always: whether to collect evidence also in windows in which the policy does not use it.
            Graphs need this: with a sum that stops, they would have to be traced again.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.always = exchange, False

    @property
    def followed(self) -> tuple[Evidence, ...]:
        """Return the evidence that the present step updates; equal on all ranks."""
        policy = self._exchange.policy
        if not (self.always or policy.observing()):
            return ()
        return tuple(evidence for evidence in policy.evidence if evidence.follows)

    def wanted(self, entry: BucketState) -> list[Evidence]:
        """Return the evidence that this rank collects for a bucket in the present step."""
        lead = self._exchange.communicator.rank == 0
        return [
            evidence
            for evidence in self.followed
            if (lead or evidence.on_all_ranks)
            and (entry.bucket.compress or evidence.everywhere)
            and evidence.suits(entry.compressor)
        ]

    def before(self, batch: Batch, wanted: Sequence[Evidence], grad: Tensor) -> None:
        """Update the evidence with a batch's gradients, before the exchange."""
        step, old = self._step(batch, grad), batch.evidence
        batch.before = old
        batch.evidence = old | {x.key: x.before(old[x.key], step) for x in wanted}

    def after(self, batch: Batch, mean: Tensor, bad: Any) -> None:
        """Update the evidence with a batch's mean; `bad` may be symbolic."""
        step, old = self._step(batch, None, mean), batch.evidence
        new = {x.key: x.after(old[x.key], step) for x in self.wanted(batch.first)}
        if bad is not False:
            where = self._exchange.xp.where
            new = {k: x if x is old[k] else where(bad, old[k], x) for k, x in new.items()}
        if new:
            batch.evidence = old | new
        batch.before = None

    def observe(self, entry: BucketState, grads: Sequence[Tensor]) -> None:
        """Update a bucket's evidence with gradients that are not exchanged."""
        xp, wanted = self._exchange.xp, [x for x in self.wanted(entry) if x.looks_before]
        if wanted:
            parts = [xp.reshape(grads[member], (-1,)) for member in entry.bucket.members]
            batch = Batch([entry], "", xp, wanted)
            batch.evidence = {x.key: x.zeros(entry) for x in wanted} | entry.evidence
            self.before(batch, wanted, xp.reshape(xp.concat(parts), entry.bucket.shape))

    def _step(self, batch: Batch, grad: Tensor, mean: Tensor = None) -> Step:
        buckets = len(batch.entries) if batch.stacked == "alike" else 0
        weight = self._exchange.policy.observers.weight
        return Step(grad, batch.first.compressor, batch.state, weight, buckets, mean)
