"""Collects the evidence that a policy has asked for, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.slots import Memory, Slot
from accordion_hvd.policies.evidence import Evidence, Step


class Collecting:
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

    def wanted(self, slot: Slot) -> list[Evidence]:
        """Return the evidence that this rank collects of a slot's step now."""
        if self._exchange.communicator.rank:
            return []
        return [
            one
            for one in self.followed
            if (slot.bucket.compress or one.everywhere) and one.suits(slot.compressor)
        ]

    def before(self, memory: Memory, wanted: Sequence[Evidence], grad: Tensor) -> None:
        """Look at a unit's gradients."""
        told, kept = self._told(memory, grad), memory.kept
        memory.before = kept
        memory.kept = kept | {one.key: one.before(kept[one.key], told) for one in wanted}

    def after(self, memory: Memory, mean: Tensor, bad: Any) -> None:
        """Look at a unit's results; `bad` may be symbolic."""
        told, kept = self._told(memory, None, mean), memory.kept
        new = {x.key: x.after(kept[x.key], told) for x in self.wanted(memory.slots[0])}
        if bad is not False:
            either = self._exchange.xp.either
            new = {k: x if x is kept[k] else either(bad, kept[k], x) for k, x in new.items()}
        if new:
            memory.kept = kept | new
        memory.before = None

    def observe(self, slot: Slot, grads: Sequence[Tensor]) -> None:
        """Look at gradients that stay with this rank, of all tensors."""
        xp, wanted = self._exchange.xp, [x for x in self.wanted(slot) if x.looks_before]
        if wanted:
            parts = [xp.reshape(grads[member], (-1,)) for member in slot.bucket.members]
            memory = Memory([slot], "", xp, wanted)
            memory.kept = {one.key: one.zeros(slot) for one in wanted} | slot.kept
            self.before(memory, wanted, xp.reshape(xp.concat(parts), slot.bucket.shape))

    def _told(self, memory: Memory, grad: Tensor, mean: Tensor = None) -> Step:
        buckets = len(memory.slots) if memory.stacked == "alike" else 0
        compressor, weight = memory.slots[0].compressor, self._exchange.policy.observers.weight
        return Step(grad, compressor, memory.state, weight, buckets, mean)
