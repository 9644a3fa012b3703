"""Collects the evidence that a policy has asked for, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.bucket_state import BatchState, BucketState
from accordion_hvd.policies.evidence import Evidence, Step


class EvidenceCollector:
    """The evidence of an exchange's policy, as far as it follows steps.

    Args:
        exchange: whose steps are followed.

    Attributes:
        always: whether evidence is collected in windows, too, in which it does not count; for
            graphs, where a sum that stops means a new trace.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange, self.always = exchange, False

    @property
    def followed(self) -> tuple[Evidence, ...]:
        """Return the evidence that follows steps now; equal on all ranks."""
        policy = self._exchange.policy
        if not (self.always or policy.observing()):
            return ()
        return tuple(one for one in policy.evidence if one.follows)

    def wanted(self, entry: BucketState) -> list[Evidence]:
        """Return the evidence that this rank collects of a entry's step now."""
        if self._exchange.communicator.rank:
            return []
        return [
            one
            for one in self.followed
            if (entry.bucket.compress or one.everywhere) and one.suits(entry.compressor)
        ]

    def before(self, memory: BatchState, wanted: Sequence[Evidence], grad: Tensor) -> None:
        """Look at a batch's gradients."""
        told, kept = self._told(memory, grad), memory.evidence
        memory.before = kept
        memory.evidence = kept | {one.key: one.before(kept[one.key], told) for one in wanted}

    def after(self, memory: BatchState, mean: Tensor, bad: Any) -> None:
        """Look at a batch's results; `bad` may be symbolic."""
        told, kept = self._told(memory, None, mean), memory.evidence
        new = {x.key: x.after(kept[x.key], told) for x in self.wanted(memory.entries[0])}
        if bad is not False:
            either = self._exchange.xp.where
            new = {k: x if x is kept[k] else either(bad, kept[k], x) for k, x in new.items()}
        if new:
            memory.evidence = kept | new
        memory.before = None

    def observe(self, entry: BucketState, grads: Sequence[Tensor]) -> None:
        """Look at gradients that stay with this rank, of all tensors."""
        xp, wanted = self._exchange.xp, [x for x in self.wanted(entry) if x.looks_before]
        if wanted:
            parts = [xp.reshape(grads[member], (-1,)) for member in entry.bucket.members]
            memory = BatchState([entry], "", xp, wanted)
            memory.evidence = {one.key: one.zeros(entry) for one in wanted} | entry.evidence
            self.before(memory, wanted, xp.reshape(xp.concat(parts), entry.bucket.shape))

    def _told(self, memory: BatchState, grad: Tensor, mean: Tensor = None) -> Step:
        buckets = len(memory.entries) if memory.stacked == "alike" else 0
        compressor, weight = (
            memory.entries[0].compressor,
            self._exchange.policy.observers.weight,
        )
        return Step(grad, compressor, memory.state, weight, buckets, mean)
