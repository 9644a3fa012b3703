"""Bucket batches of an exchange, and the packing and unpacking of their tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.bucket_state import BatchState, BucketState
from accordion_hvd.engine.buckets import fingerprint
from accordion_hvd.engine.plan import Plan, make_plan
from accordion_hvd.engine.step import Step
from accordion_hvd.ops.spec import on_cpu
from accordion_hvd.policies.evidence import SKETCHED

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


class BucketBatches:
    """The bucket batches of an exchange at the present levels.

    Args:
        limit: size in bytes at which a fusion group is closed; None: as in `make_plan`.

    Attributes:
        keep_buffers: whether the means of a step are no longer needed when the next step begins, so
            that the next gradients may be packed into the same memory.
        memory: state of each bucket batch.
        period: number of steps after which all phases that repeat do so together.
    """

    def __init__(self, exchange: Exchange, limit: float | None = None) -> None:
        self.keep_buffers = False
        self.memory: list[BatchState] = []
        self.period = 1
        self._exchange, self._limit = exchange, limit
        self._plan: Plan | None = None
        self._number = 0  # of the plan
        self._payloads: dict[tuple[int, int], float] = {}  # (bucket, level) -> bytes
        self._measure_payloads = False  # whether the next step measures payloads
        self._outdated = False  # whether the next step needs a new plan
        self._phases: list[int] = []  # phases of `_phased` when the plan was made
        self._phased: list[BucketState] = []  # buckets with phases

    # ----------------------------------------------------------------------------------- the plan
    @property
    def plan(self) -> Plan:
        if self._plan is None:
            exchange, entries = self._exchange, self._exchange.bucket_states
            buckets = [entry.bucket for entry in entries]
            kinds = [(self._layout(s), self._common(s)) for s in entries]
            sizes = self._sizes()
            self._plan = make_plan(buckets, kinds, sizes, self._limit, exchange.device)
            evidence = [x for x in exchange.policy.evidence if x.follows]
            self.memory = [
                BatchState(
                    [entries[i] for i in batch.buckets], batch.stacked, exchange.xp, evidence
                )
                for batch in self._plan.batches
            ]
            self._phased = [entry for entry in entries if entry.compressor.phases]
            self._phases = [exchange.lasting_phase(entry) for entry in self._phased]
            self.period = math.lcm(*(entry.compressor.period or 1 for entry in self._phased))
            levels = [(s.bucket.name, s.bucket.shape, s.level) for s in entries]
            self._number = fingerprint(levels, self._phases, self._plan.batches, self._plan.groups)
        return self._plan

    def number(self) -> int:
        """Return the number of the plan; it is equal on ranks whose plans and levels are equal."""
        return self._number if self.plan else 0

    def outdate(self) -> None:
        """Discard the plan because buckets or levels have changed."""
        self._plan = None

    def forget(self) -> None:
        """Discard the plan and the measured payloads, which other ranks may not have."""
        self.outdate()
        self._payloads.clear()

    def refresh(self) -> Plan:
        """Return the plan for the step that begins, remade if phases or payloads have changed."""
        if self._outdated or self._phases != [
            self._exchange.lasting_phase(entry) for entry in self._phased
        ]:
            self._plan, self._outdated = None, False
        return self.plan

    def _layout(self, entry: BucketState) -> str:
        """Return how a bucket lies in a batch; no sketch of it is part of one vector."""
        layout, policy = entry.compressor.batching, self._exchange.policy
        sketched = entry.bucket.size > SKETCHED and any(x.follows for x in policy.evidence)
        return "" if sketched and layout == "any" else layout

    def _common(self, entry: BucketState) -> Hashable:
        """Return the key that is equal for buckets that may share a bucket batch."""
        bucket = entry.bucket
        kind = repr(entry.compressor), self._exchange.lasting_phase(entry)
        return *kind, bucket.dtype, str(entry.spec.device), bucket.group, bucket.compress

    def _sizes(self) -> list[float]:
        sizes, self._measure_payloads = [], False
        for i, entry in enumerate(self._exchange.bucket_states):
            self._measure_payloads |= (i, entry.level) not in self._payloads
            sizes.append(self._payloads.get((i, entry.level), entry.bucket.dense_bytes))
        return sizes

    def weigh(self, step: Step) -> None:
        """Record the payloads of the first requests for the next step's plan."""
        if not self._measure_payloads:
            return
        for index, batch in enumerate(self.plan.batches):
            entries = [self._exchange.bucket_states[i] for i in batch.buckets]
            size = max(sum(entry.bucket.size for entry in entries), 1)
            for i, entry in zip(batch.buckets, entries, strict=True):
                share = step.payload(index) * entry.bucket.size / size
                self._payloads[i, entry.level] = share
        self._measure_payloads, self._outdated = False, True

    # --------------------------------------------------------------------------- tensors in and out
    def first(self, index: int) -> BucketState:
        """Return the first bucket state of batch `index`; all have the same compressor."""
        return self._exchange.bucket_states[self.plan.batches[index].buckets[0]]

    def pack(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensors of batch `index`, ordered as `members`, in its compressor's layout."""
        keeps = self.keep_buffers and on_cpu(self._exchange.device)
        if self.plan.batches[index].stacked != "alike" or not keeps:
            return self._packed(index, parts)
        batch_state = self.memory[index]
        batch_state.buffer = self._packed(index, parts, batch_state.buffer)
        return batch_state.buffer

    def pack_weights(self, index: int, parts: Sequence[Tensor]) -> Tensor:
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
        """Return the means of batch `index`, one per member, in the members' shapes and dtype."""
        exchange, batch, bucket = self._exchange, self.plan.batches[index], self.first(index).bucket
        mean = exchange.xp.cast(exchange.results[index], bucket.dtype)
        if batch.stacked == "alike":
            return exchange.xp.unstack(mean)
        tensors, pieces = [exchange.tensors[member] for member in batch.members], [mean]
        if batch.stacked or bucket.packed:
            pieces = exchange.xp.split(mean, [tensor.size for tensor in tensors])
        return [exchange.xp.reshape(p, t.shape) for p, t in zip(pieces, tensors, strict=True)]

    def means(self) -> list[Tensor]:
        """Return the means of the last closed step in the order of the tensors."""
        means: dict[int, Tensor] = {}
        for index, batch in enumerate(self.plan.batches):
            means |= dict(zip(batch.members, self.unpack(index), strict=True))
        return [means[member] for member in range(len(self._exchange.tensors))]

    def give(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor] = (), present: Tensor = None
    ) -> None:
        """Start every bucket batch, given all `grads` and `weights` in the order of the tensors.

        Args:
            present: as in `Exchange.start`, for all tensors.
        """
        for index, batch in enumerate(self.plan.batches):
            parameter = None
            if weights and self.needs_weights(index):
                parameter = self.pack_weights(index, [weights[m] for m in batch.members])
            grad = self.pack(index, [grads[m] for m in batch.members])
            there = None
            if present is not None:
                there = self._exchange.xp.stack([present[m] for m in batch.members])
            self._exchange.start(index, grad, parameter, there)

    def shares(self, index: int) -> bool:
        """Return whether the means of batch `index` are views of one array."""
        return bool(self.plan.batches[index].stacked) or self.first(index).bucket.packed

    def needs_weights(self, index: int) -> bool:
        return self.first(index).compressor.needs_weights

    @property
    def any_needs_weights(self) -> bool:
        return any(
            level.needs_weights for entry in self._exchange.bucket_states for level in entry.levels
        )


def _rows(xp: ModuleType, part: Tensor) -> Tensor:
    count, *shape = xp.shape(part)
    return xp.reshape(part, (count, math.prod(shape)))
