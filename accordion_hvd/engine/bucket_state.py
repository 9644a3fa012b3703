"""The state of one bucket from step to step, and its conversion when levels change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.engine.buckets import Bucket
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.evidence import Evidence


@dataclass
class StackedState:
    """The states of several buckets in common tensors.

    Attributes:
        flat: whether each tensor is the concatenation of the buckets' flattened tensors; otherwise
            the buckets' tensors are stacked along a new first dimension.
    """

    state: State
    evidence: dict[str, Tensor]
    flat: bool

    def part(self, value: Tensor, place: int, entry: BucketState) -> Tensor:
        """Return a bucket's part of a tensor: a view, if the framework has views."""
        if not self.flat:
            return value[place]
        part = value[place : place + entry.bucket.size]
        return entry.spec.xp.reshape(part, entry.bucket.shape)


class BucketState:
    """The levels and the state of one bucket.

    Attributes:
        inactive: states of other levels, by level.
        carried: residual of earlier levels that is not part of the present level's state and is
            added to the next gradient; None if there is none.
        created_with: the `Info` with which `state` was made; None before that, and if `state` was
            loaded without it.
        served_by_level: number of exchanges that other levels have served, by level.
        name: name in the compressors' `Info`, from which their random numbers derive. Checkpoints
            save it, because Keras may rename the variables of a loaded model.
        served_from: number of exchanges that were not skipped when the present level began, minus
            the number of exchanges that this level had served before.
    """

    def __init__(
        self, bucket: Bucket, levels: tuple[Compressor, ...], spec: Spec, level: int = 0
    ) -> None:
        self.bucket, self.levels, self.spec, self.level = bucket, levels, spec, level
        self.name = bucket.name
        self.inactive: dict[int, State] = {}
        self.carried: Tensor | None = None
        self.served_by_level: dict[int, int] = {}
        self.served_from = 0
        self._state: State | None = None
        self._evidence: dict[str, Tensor] = {}
        self._stack: StackedState | None = None  # storage of state and evidence, if stacked
        self._place = 0  # in the stack: number of the bucket, or offset if flat
        self.created_with: Info | None = None

    @property
    def compressor(self) -> Compressor:
        return self.levels[self.level]

    @property
    def state(self) -> State | None:
        """Return the state of the present level; None before the first exchange.

        The tensors may be views of memory that the next step overwrites.
        """
        if self._stack is None:
            return self._state
        return {k: self._stack.part(v, self._place, self) for k, v in self._stack.state.items()}

    @state.setter
    def state(self, state: State | None) -> None:
        self._unstack()
        self._state = state

    @property
    def evidence(self) -> dict[str, Tensor]:
        """Return the tensors for the policy's evidence by key; do not modify them."""
        if self._stack is None:
            return self._evidence
        stacked = self._stack.evidence.items()
        return self._evidence | {k: self._stack.part(v, self._place, self) for k, v in stacked}

    @evidence.setter
    def evidence(self, evidence: dict[str, Tensor]) -> None:
        self._unstack()
        self._evidence = evidence

    def within(self, stack: StackedState) -> bool:
        return self._stack is stack

    def join(self, stack: StackedState, place: int) -> None:
        """Store state and evidence at `place` of `stack`: a number, or an offset if it is flat."""
        self._evidence = {k: v for k, v in self.evidence.items() if k not in stack.evidence}
        self._stack, self._place, self._state = stack, place, None

    def _unstack(self) -> None:
        """Store state and evidence separately, as views of the stack where possible."""
        if self._stack is not None:
            self._state, self._evidence, self._stack = self.state, self.evidence, None

    def prepare(self, info: Info) -> None:
        """Make the state if there is none, or if rank or hosts of sharded states have changed."""
        before = self.created_with
        if before is not None and any(level.sharded for level in self.levels):
            if (before.hosts, before.rank) != (info.hosts, info.rank):
                self._carry_residual(before)
        if self._stack is None and self._state is None:
            self._state = self.compressor.init(self.spec, info)
        if self.created_with is None:
            self.created_with = info

    def _carry_residual(self, before: Info) -> None:
        """Discard sharded states, and carry the residual of the full tensor instead."""
        self.carried = self._total_residual(self.compressor, self.state or {}, before)
        self.state, self.inactive, self.created_with = None, {}, None

    def _total_residual(self, compressor: Compressor, state: State, info: Info) -> Tensor | None:
        """Return the residual of the full tensor, with `carried` added; None if there is none."""
        residual = compressor.residual(state)
        if residual is None:
            return self.carried
        xp, shape = self.spec.xp, self.spec.shape
        residual = xp.reshape(compressor.expand_residual(residual, self.spec, info), shape)
        return residual if self.carried is None else residual + xp.reshape(self.carried, shape)

    def residual(self, info: Info) -> Tensor | None:
        """Return this rank's residual in the bucket's shape; None if there is none."""
        return self._total_residual(self.compressor, self.state or {}, self.created_with or info)

    def record_switch(self, level: int, counted: int) -> None:
        """Update `served_from` before a switch, after `counted` exchanges without skipped ones."""
        self.served_by_level[self.level] = counted - self.served_from
        self.served_from = counted - self.served_by_level.pop(level, 0)

    def switch(self, level: int, info: Info) -> None:
        """Switch to another level, which takes over the residual of the old one."""
        if level == self.level:
            return
        old, old_level, old_state = self.compressor, self.level, self.state
        self.level = level
        if old_state is None:
            return
        new = self.compressor
        state = new.init(self.spec, info) | self.inactive.pop(level, {})
        state = new.warm_start(state, old, old_state)
        new.check_start(state, old, info)
        self.state = self._take_residual(state, old, old_state, info)
        self.inactive[old_level] = old.deactivate(old_state)

    def _take_residual(self, state: State, old: Compressor, old_state: State, info: Info) -> State:
        """Return the new level's state with the old residual in it, or store it in `carried`."""
        new, part = self.compressor, old.residual(old_state)
        feeds_back = new.residual(state) is not None
        if feeds_back and part is not None and new.sharded and old.sharded:
            return new.with_residual(state, part)  # the same shard, in the same units
        residual = self._total_residual(old, old_state, info)
        self.carried = None
        if residual is None:
            return state
        if feeds_back and not new.sharded:
            return new.with_residual(state, residual)
        self.carried = residual
        return state

    def saved(self) -> SavedState:
        """Return the state to save; residuals that consist of several tensors are added up.

        The tensors may be views of memory that the next step overwrites.
        """
        states = dict(self.inactive)
        state = self.state
        if state:
            residual = self.compressor.residual(state)
            combined = state if residual is None else self.compressor.with_residual(state, residual)
            states[self.level] = combined
        return SavedState(self.level, states, self.carried, dict(self.evidence))

    def load(self, saved: SavedState) -> None:
        states = dict(saved.states)
        self.level, self.carried, self.created_with = saved.level, saved.carried, None
        self.state, self.evidence = states.pop(saved.level, None), dict(saved.evidence)
        self.inactive = states


class BatchState:
    """The states of the buckets of a bucket batch, in the layout of their compressor.

    Attributes:
        before: the policy's evidence before the current step, to undo the step.
        buffer: packed gradients of the last step, whose memory serves again.
        aside: a copy of the state before the current step, of which parts may be restored.
    """

    def __init__(
        self,
        entries: Sequence[BucketState],
        stacked: str,
        xp: ModuleType,
        evidence: Sequence[Evidence],
    ) -> None:
        self.entries, self.stacked, self.declared, self._xp = entries, stacked, evidence, xp
        self._stack: StackedState | None = None
        self.before: dict[str, Tensor] | None = None
        self.buffer: Tensor | None = None
        self.aside: State | None = None

    def open(self, info: Info, wanted: Sequence[Evidence]) -> None:
        """Make missing states and evidence, and stack the states of the buckets."""
        if not self._is_stacked() or any(level.sharded for level in self.entries[0].levels):
            for entry in self.entries:
                entry.prepare(replace(info, name=entry.name) if self.stacked else info)
            if self.stacked and not self._is_stacked():
                self._stack_states()
        nothing: list[dict[str, Tensor]] = [{} for _ in self.entries]
        missing = {x.key: self._joined(x, nothing) for x in wanted if x.key not in self.evidence}
        if missing:
            self.evidence = self.evidence | missing

    def _is_stacked(self) -> bool:
        stack = self._stack
        return stack is not None and all(entry.within(stack) for entry in self.entries)

    def _stack_states(self) -> None:
        states = [entry.state or {} for entry in self.entries]
        tensors = [entry.evidence for entry in self.entries]
        state = {key: self._xp.stack([s[key] for s in states]) for key in states[0]}
        suiting = [x for x in self.declared if x.suits(self.entries[0].compressor)]
        present = [x for x in suiting if any(x.key in row for row in tensors)]
        joined = {x.key: self._joined(x, tensors) for x in present}
        self._stack = StackedState(state, joined, self.stacked == "any")

    def _joined(self, evidence: Evidence, tensors: Sequence[dict[str, Tensor]]) -> Tensor:
        pairs, key = zip(tensors, self.entries, strict=True), evidence.key
        return self.combine([x[key] if key in x else evidence.zeros(entry) for x, entry in pairs])

    def combine(self, parts: Sequence[Tensor]) -> Tensor:
        """Combine one tensor per bucket into the layout of the compressor."""
        if self.stacked == "any":
            return self._xp.concat([self._xp.reshape(x, (-1,)) for x in parts])
        return self._xp.stack(parts) if self.stacked else parts[0]

    @property
    def state(self) -> State:
        return self._stack.state if self._stack is not None else self.entries[0].state or {}

    @property
    def evidence(self) -> dict[str, Tensor]:
        return self._stack.evidence if self._stack is not None else self.entries[0].evidence

    @evidence.setter
    def evidence(self, evidence: dict[str, Tensor]) -> None:
        if self._stack is not None:
            self._stack.evidence = evidence
        else:
            self.entries[0].evidence = evidence

    def carried(self) -> Tensor | None:
        """Return the residuals of earlier levels to add to the gradient; None if there are none."""
        if not any(entry.carried is not None for entry in self.entries):
            return None
        return self.combine(
            [
                entry.spec.zeros(entry.bucket.shape)
                if entry.carried is None
                else self._xp.reshape(entry.carried, entry.bucket.shape)
                for entry in self.entries
            ]
        )

    def set_aside(self) -> None:
        """Copy the state, for tensors whose mean may not be applied."""
        self.aside = {key: self._xp.copy(value) for key, value in self.state.items()}

    def keep(self, state: State, absent: Sequence[Any] = ()) -> None:
        """Store the state that a finished step has returned; the carried residuals are used up.

        Args:
            absent: whether the mean of each tensor is not applied, so that its state and carried
                residual stay as they were; () if all are applied. May be symbolic.
        """
        aside, self.aside = self.aside, None
        if aside is not None and any(flag is not False for flag in absent):
            state = {key: self._chosen(aside[key], value, absent) for key, value in state.items()}
        flags = iter(absent)
        for entry in self.entries:
            own = [flag for _, flag in zip(entry.bucket.members, flags, strict=False)]
            entry.carried = self._still_carried(entry, own)
        if self._stack is None:
            self.entries[0].state = state
            return
        self._stack.state = state
        if self._is_stacked():
            return
        place = 0
        for entry in self.entries:
            entry.join(self._stack, place)
            place += entry.bucket.size if self._stack.flat else 1

    def _chosen(self, old: Tensor, new: Tensor, absent: Sequence[Any]) -> Tensor:
        """Return a tensor of the state with the old parts of absent tensors.

        Of a packed bucket, tensors of another size than the gradient have no parts.
        """
        xp, bucket = self._xp, self.entries[0].bucket
        if self.stacked:
            pairs = zip(xp.unstack(old), xp.unstack(new), strict=True)
            return xp.stack([_either(xp, f, *p) for f, p in zip(absent, pairs, strict=True)])
        if len(absent) == 1:
            return _either(xp, absent[0], old, new)
        if math.prod(xp.shape(new)) != bucket.size:
            return new
        halves = [xp.split(xp.reshape(x, (-1,)), list(bucket.sizes)) for x in (old, new)]
        parts = [_either(xp, f, *p) for f, *p in zip(absent, *halves, strict=True)]
        return xp.reshape(xp.concat(parts), xp.shape(new))

    def _still_carried(self, entry: BucketState, absent: Sequence[Any]) -> Tensor | None:
        """Return the part of a bucket's carried residual that belongs to absent tensors."""
        if entry.carried is None or not any(flag is not False for flag in absent):
            return None
        xp, sizes = self._xp, list(entry.bucket.sizes)
        parts = xp.split(xp.reshape(entry.carried, (-1,)), sizes)
        pairs = zip(absent, parts, strict=True)
        kept = xp.concat([_either(xp, flag, part, part * 0) for flag, part in pairs])
        return xp.reshape(kept, xp.shape(entry.carried))

    def take_back(self) -> None:
        """Restore the policy's evidence to its value before the current step."""
        if self.before is not None:
            self.evidence, self.before = self.before, None


def _either(xp: ModuleType, flag: Any, old: Tensor, new: Tensor) -> Tensor:
    if isinstance(flag, bool):
        return old if flag else new
    return xp.where(flag, old, new)


def drifting(entries: Sequence[BucketState]) -> list[BucketState]:
    """Return the bucket states with compressors that let weights differ between ranks."""
    plain = Compressor.synchronous
    return [entry for entry in entries if type(entry.compressor).synchronous is not plain]


def span(entries: Sequence[BucketState], counted: int) -> int:
    """Return how many exchanges ago the weights were equal before; 0 if they differ now.

    Skipped exchanges do not count. The number is 1 if no compressor lets weights differ. It depends
    only on the numbers of exchanges, so it is equal on all ranks.
    """
    states = drifting(entries)

    def equal(back: int) -> bool:
        served = ((s.compressor, counted - s.served_from - back) for s in states)
        return all(compressor.synchronous(max(count, 0)) for compressor, count in served)

    if not states:
        return 1
    return next(n for n in itertools.count(1) if equal(n)) if equal(0) else 0


def reports(entries: Sequence[BucketState]) -> dict[str, dict[str, float]]:
    """Return the reports of the compressors (`Compressor.report`) by bucket, without empty ones."""
    found = {entry.bucket.name: entry.compressor.report(entry.state or {}) for entry in entries}
    return {
        entry.bucket.name: {
            key: float(entry.spec.xp.to_numpy(x).reshape(-1)[0])
            for key, x in found[entry.bucket.name].items()
        }
        for entry in entries
        if found[entry.bucket.name]
    }
