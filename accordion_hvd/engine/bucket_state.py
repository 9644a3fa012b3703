"""The state of one bucket from step to step, and its conversion when levels change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.ops.spec import Spec

if TYPE_CHECKING:
    from accordion_hvd.engine.layout import Batch, Bucket


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
        self._stack: Batch | None = None  # storage of state and evidence, if stacked
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

    def within(self, stack: Batch) -> bool:
        return self._stack is stack

    def join(self, stack: Batch, place: int) -> None:
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
