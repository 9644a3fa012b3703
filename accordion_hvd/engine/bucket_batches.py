"""BucketBatches: the buckets that share a call, and the packing and unpacking of their tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.bucket_state import BatchState, BucketState
from accordion_hvd.engine.buckets import fingerprint
from accordion_hvd.engine.plan import Plan, make_plan
from accordion_hvd.engine.step import Step


class BucketBatches:
    """Groups an exchange's buckets into batches at their present levels; packs tensors for them.

    Args:
        exchange: has the entries.
        limit: bytes after which a group of batches is closed; None for the plan's own rule.

    Attributes:
        keep_buffers: whether nobody looks at a step's means when the next one begins, so that
            gradients may be brought together in the same memory.
        memory: of each batch.
    """

    def __init__(self, exchange: Any, limit: float | None = None) -> None:
        self.keep_buffers = False
        self.memory: list[BatchState] = []
        self._exchange, self._limit = exchange, limit
        self._plan: Plan | None = None
        self._number = 0  # of the plan
        self._payloads: dict[tuple[int, int], float] = {}  # bucket and level -> bytes
        self._weighing = False  # the next step tells how many bytes the first requests have
        self._outdated = False  # the plan, from the next step on
        self._phases: list[int] = []  # when the plan was made, of those
        self._phased: list[BucketState] = []  # that have some

    # ----------------------------------------------------------------------------------- the plan
    @property
    def plan(self) -> Plan:
        """Return the plan of batches and groups at the present levels."""
        if self._plan is None:
            exchange, entries = self._exchange, self._exchange.bucket_states
            buckets = [entry.bucket for entry in entries]
            kinds = [(s.compressor.batching, self._common(s)) for s in entries]
            self._plan = make_plan(buckets, kinds, self._sizes(), self._limit)
            evidence = [one for one in exchange.policy.evidence if one.follows]
            self.memory = [
                BatchState(
                    [entries[i] for i in batch.buckets], batch.stacked, exchange.xp, evidence
                )
                for batch in self._plan.batches
            ]
            self._phased = [entry for entry in entries if entry.compressor.phases]
            self._phases = [exchange.phase(entry) for entry in self._phased]
            levels = [(s.bucket.name, s.bucket.shape, s.level) for s in entries]
            self._number = fingerprint(levels, self._phases, self._plan.batches, self._plan.groups)
        return self._plan

    def number(self) -> int:
        """Return a number that is equal on ranks that are about to exchange the same things."""
        return self._number if self.plan else 0

    def outdate(self) -> None:
        """Plan anew: buckets or levels have changed."""
        self._plan = None

    def forget(self) -> None:
        """Plan as at the beginning: other ranks may not know what this one has learned."""
        self.outdate()
        self._payloads.clear()

    def refresh(self) -> Plan:
        """Return the plan for the step that begins; phases may have changed."""
        if self._outdated or self._phases != [
            self._exchange.phase(entry) for entry in self._phased
        ]:
            self._plan, self._outdated = None, False
        return self.plan

    def _common(self, entry: BucketState) -> Hashable:
        """Return the key that buckets in one call share."""
        bucket = entry.bucket
        kind = repr(entry.compressor), self._exchange.phase(entry)
        return *kind, bucket.dtype, str(entry.spec.device), bucket.group, bucket.compress

    def _sizes(self) -> list[float]:
        known, self._weighing = [], False
        for i, entry in enumerate(self._exchange.bucket_states):
            self._weighing |= (i, entry.level) not in self._payloads
            known.append(self._payloads.get((i, entry.level), entry.bucket.dense_bytes))
        return known

    def weigh(self, step: Step) -> None:
        """Plan anew once it is known how many bytes the first requests have."""
        if not self._weighing:
            return
        for index, batch in enumerate(self.plan.batches):
            entries = [self._exchange.bucket_states[i] for i in batch.buckets]
            size = max(sum(entry.bucket.size for entry in entries), 1)
            for i, entry in zip(batch.buckets, entries, strict=True):
                share = step.payload(index) * entry.bucket.size / size
                self._payloads[i, entry.level] = share
        self._weighing, self._outdated = False, True

    # --------------------------------------------------------------------------- tensors in and out
    def first(self, index: int) -> BucketState:
        """Return the first entry of batch `index`; its compressor serves all of the batch."""
        return self._exchange.bucket_states[self.plan.batches[index].buckets[0]]

    def pack(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensors of batch `index`, ordered as `members`, in the compressor's layout."""
        if self.plan.batches[index].stacked != "alike" or not self.keep_buffers:
            return self._packed(index, parts)
        memory = self.memory[index]
        memory.buffer = self._packed(index, parts, memory.buffer)
        return memory.buffer

    def pack_weights(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Return batch `index`'s weights as its compressor sees them."""
        return self._packed(index, parts)

    def _packed(self, index: int, parts: Sequence[Tensor], buffer: Tensor = None) -> Tensor:
        xp, batch, first = self._exchange.xp, self.plan.batches[index], self.first(index)
        if first.compressor.per_sample:
            return xp.concat([_rows(xp, part) for part in parts], 1)
        if batch.stacked == "alike":
            return xp.stack(parts, buffer)
        if batch.stacked or first.bucket.packed:
            return xp.concat([xp.reshape(part, (-1,)) for part in parts])
        return parts[0]

    def unpack(self, index: int) -> list[Tensor]:
        """Return the means of batch `index`, one per member, in the tensors' shapes and dtype."""
        exchange, batch, bucket = self._exchange, self.plan.batches[index], self.first(index).bucket
        mean = exchange.xp.cast(exchange.results[index], bucket.dtype)
        if batch.stacked == "alike":
            return exchange.xp.unstack(mean)
        tensors, pieces = [exchange.tensors[member] for member in batch.members], [mean]
        if batch.stacked or bucket.packed:
            pieces = exchange.xp.split(mean, [tensor.size for tensor in tensors])
        return [exchange.xp.reshape(p, t.shape) for p, t in zip(pieces, tensors, strict=True)]

    def means(self) -> list[Tensor]:
        """Return the means of the step that was closed, tensor by tensor."""
        found: dict[int, Tensor] = {}
        for index, batch in enumerate(self.plan.batches):
            found |= dict(zip(batch.members, self.unpack(index), strict=True))
        return [found[member] for member in range(len(self._exchange.tensors))]

    def give(self, grads: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> None:
        """Start every batch with its part of `grads` and `weights`, in the order of the tensors."""
        for index, batch in enumerate(self.plan.batches):
            told = None
            if weights and self.needs_weights(index):
                told = self.pack_weights(index, [weights[m] for m in batch.members])
            self._exchange.start(index, self.pack(index, [grads[m] for m in batch.members]), told)

    def shares(self, index: int) -> bool:
        """Return whether the means of batch `index` share their memory."""
        return bool(self.plan.batches[index].stacked) or self.first(index).bucket.packed

    def needs_weights(self, index: int) -> bool:
        """Return whether batch `index`'s compressor is told the weights."""
        return self.first(index).compressor.needs_weights

    @property
    def any_needs_weights(self) -> bool:
        """Return whether any compressor, of any level, needs the weights."""
        return any(
            level.needs_weights for entry in self._exchange.bucket_states for level in entry.levels
        )


def _rows(xp: ModuleType, part: Tensor) -> Tensor:
    count, *shape = xp.shape(part)
    return xp.reshape(part, (count, math.prod(shape)))
