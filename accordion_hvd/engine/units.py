"""Units: the buckets that share a call, and the packing and unpacking of their tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.buckets import fingerprint
from accordion_hvd.engine.plan import Plan, make_plan
from accordion_hvd.engine.slots import Memory, Slot
from accordion_hvd.engine.step import Step


class Units:
    """Groups an exchange's buckets into units at their present levels; packs tensors for them.

    Args:
        exchange: has the slots.
        limit: bytes after which a group of units is closed; None for the plan's own rule.

    Attributes:
        keep_buffers: whether nobody looks at a step's means when the next one begins, so that
            gradients may be brought together in the same memory.
        memory: of each unit.
    """

    def __init__(self, exchange: Any, limit: float | None = None) -> None:
        self.keep_buffers = False
        self.memory: list[Memory] = []
        self._exchange, self._limit = exchange, limit
        self._plan: Plan | None = None
        self._number = 0  # of the plan
        self._payloads: dict[tuple[int, int], float] = {}  # bucket and level -> bytes
        self._weighing = False  # the next step tells how many bytes the first requests have
        self._outdated = False  # the plan, from the next step on
        self._phases: list[int] = []  # when the plan was made, of those
        self._phased: list[Slot] = []  # that have some

    # ----------------------------------------------------------------------------------- the plan
    @property
    def plan(self) -> Plan:
        """Return the plan of units and groups at the present levels."""
        if self._plan is None:
            exchange, slots = self._exchange, self._exchange.slots
            buckets = [slot.bucket for slot in slots]
            kinds = [(s.compressor.batching, self._common(s)) for s in slots]
            self._plan = make_plan(buckets, kinds, self._sizes(), self._limit)
            evidence = [one for one in exchange.policy.evidence if one.follows]
            self.memory = [
                Memory([slots[i] for i in unit.buckets], unit.stacked, exchange.xp, evidence)
                for unit in self._plan.units
            ]
            self._phased = [slot for slot in slots if slot.compressor.phases]
            self._phases = [exchange.phase(slot) for slot in self._phased]
            levels = [(s.bucket.name, s.bucket.shape, s.level) for s in slots]
            self._number = fingerprint(levels, self._phases, self._plan.units, self._plan.groups)
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
        if self._outdated or self._phases != [self._exchange.phase(slot) for slot in self._phased]:
            self._plan, self._outdated = None, False
        return self.plan

    def _common(self, slot: Slot) -> Hashable:
        """Return the key that buckets in one call share."""
        bucket = slot.bucket
        kind = repr(slot.compressor), self._exchange.phase(slot)
        return *kind, bucket.dtype, str(slot.spec.device), bucket.group, bucket.compress

    def _sizes(self) -> list[float]:
        known, self._weighing = [], False
        for i, slot in enumerate(self._exchange.slots):
            self._weighing |= (i, slot.level) not in self._payloads
            known.append(self._payloads.get((i, slot.level), slot.bucket.dense_bytes))
        return known

    def weigh(self, step: Step) -> None:
        """Plan anew once it is known how many bytes the first requests have."""
        if not self._weighing:
            return
        for index, unit in enumerate(self.plan.units):
            slots = [self._exchange.slots[i] for i in unit.buckets]
            size = max(sum(slot.bucket.size for slot in slots), 1)
            for i, slot in zip(unit.buckets, slots, strict=True):
                share = step.payload(index) * slot.bucket.size / size
                self._payloads[i, slot.level] = share
        self._weighing, self._outdated = False, True

    # --------------------------------------------------------------------------- tensors in and out
    def first(self, index: int) -> Slot:
        """Return the first slot of unit `index`; its compressor serves all of the unit."""
        return self._exchange.slots[self.plan.units[index].buckets[0]]

    def pack(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Return unit `index`'s tensors (in the order of `members`) as its compressor sees them."""
        if self.plan.units[index].stacked != "alike" or not self.keep_buffers:
            return self._packed(index, parts)
        memory = self.memory[index]
        memory.buffer = self._packed(index, parts, memory.buffer)
        return memory.buffer

    def pack_weights(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Return unit `index`'s weights as its compressor sees them."""
        return self._packed(index, parts)

    def _packed(self, index: int, parts: Sequence[Tensor], buffer: Tensor = None) -> Tensor:
        xp, unit, first = self._exchange.xp, self.plan.units[index], self.first(index)
        if first.compressor.per_sample:
            return xp.concat([_rows(xp, part) for part in parts], 1)
        if unit.stacked == "alike":
            return xp.stack(parts, buffer)
        if unit.stacked or first.bucket.packed:
            return xp.concat([xp.reshape(part, (-1,)) for part in parts])
        return parts[0]

    def unpack(self, index: int) -> list[Tensor]:
        """Return the means of unit `index`'s tensors (its `members`), in their shapes and dtype."""
        exchange, unit, bucket = self._exchange, self.plan.units[index], self.first(index).bucket
        mean = exchange.xp.cast(exchange.results[index], bucket.dtype)
        if unit.stacked == "alike":
            return exchange.xp.unstack(mean)
        tensors, pieces = [exchange.tensors[member] for member in unit.members], [mean]
        if unit.stacked or bucket.packed:
            pieces = exchange.xp.split(mean, [tensor.size for tensor in tensors])
        return [exchange.xp.reshape(p, t.shape) for p, t in zip(pieces, tensors, strict=True)]

    def means(self) -> list[Tensor]:
        """Return the means of the step that was closed, tensor by tensor."""
        found: dict[int, Tensor] = {}
        for index, unit in enumerate(self.plan.units):
            found |= dict(zip(unit.members, self.unpack(index), strict=True))
        return [found[member] for member in range(len(self._exchange.tensors))]

    def give(self, grads: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> None:
        """Start every unit with its part of `grads` and `weights`, in the order of the tensors."""
        for index, unit in enumerate(self.plan.units):
            told = None
            if weights and self.reads(index):
                told = self.pack_weights(index, [weights[m] for m in unit.members])
            self._exchange.start(index, self.pack(index, [grads[m] for m in unit.members]), told)

    def shares(self, index: int) -> bool:
        """Return whether the means of unit `index` share their memory."""
        return bool(self.plan.units[index].stacked) or self.first(index).bucket.packed

    def reads(self, index: int) -> bool:
        """Return whether unit `index`'s compressor is told the weights."""
        return self.first(index).compressor.reads

    @property
    def reading(self) -> bool:
        """Return whether any compressor, of any level, needs the weights."""
        return any(level.reads for slot in self._exchange.slots for level in slot.levels)


def _rows(xp: ModuleType, part: Tensor) -> Tensor:
    count, *shape = xp.shape(part)
    return xp.reshape(part, (count, math.prod(shape)))
