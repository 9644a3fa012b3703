"""The state of one bucket from step to step, and its changes where levels change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.engine.buckets import Bucket
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.evidence import Evidence


@dataclass
class StackedState:
    """The memory of several entries: along a new first dimension, or flat, one after the other."""

    state: State
    evidence: dict[str, Tensor]
    flat: bool

    def part(self, value: Tensor, place: int, entry: BucketState) -> Tensor:
        """Return a entry's part of a tensor: a view, where the framework has views."""
        if not self.flat:
            return value[place]
        part = value[place : place + entry.bucket.size]
        return entry.spec.xp.reshape(part, entry.bucket.shape)


class BucketState:
    """One bucket's levels and memory.

    Attributes:
        bucket: which tensors it serves.
        levels: the compressors that may serve it.
        spec: what its conversations are told of its gradients.
        level: which of the levels serves now.
        inactive: other levels' states, by level.
        carried: the residual of a level without error feedback, for the next gradient.
        created_with: the `Info` with which `state` was made; None if it was loaded without saying.
        served_by_level: exchanges that other levels have served, by level.
        name: what its conversations are told, the root of their random numbers; kept from job to
            job, where Keras may give a loaded model's variables other names.
        served_from: how many exchanges had counted when the present level began, less those that
            it had served before that.
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
        self._stack: StackedState | None = None  # where state and evidence are, if not here
        self._place = 0
        self.created_with: Info | None = None

    @property
    def compressor(self) -> Compressor:
        """Return the compressor that serves now."""
        return self.levels[self.level]

    @property
    def state(self) -> State | None:
        """Return the state of the level that serves now; None before the first exchange.

        Its tensors may be views of memory that the next step writes into.
        """
        if self._stack is None:
            return self._state
        return {k: self._stack.part(v, self._place, self) for k, v in self._stack.state.items()}

    @state.setter
    def state(self, state: State | None) -> None:
        self._leave()
        self._state = state

    @property
    def evidence(self) -> dict[str, Tensor]:
        """Return the tensors for the policy's evidence, by its key; not to be written into."""
        if self._stack is None:
            return self._evidence
        return {k: self._stack.part(v, self._place, self) for k, v in self._stack.evidence.items()}

    @evidence.setter
    def evidence(self, kept: dict[str, Tensor]) -> None:
        self._leave()
        self._evidence = kept

    def within(self, stack: StackedState) -> bool:
        """Return whether the entry's memory is part of `stack`."""
        return self._stack is stack

    def join(self, stack: StackedState, place: int) -> None:
        """From now on the entry's memory is at `place` of `stack`: its number, or its offset."""
        self._stack, self._place = stack, place
        self._state, self._evidence = None, {}

    def _leave(self) -> None:
        """Have a memory of one's own (views, where possible)."""
        if self._stack is not None:
            self._state, self._evidence, self._stack = self.state, self.evidence, None

    def prepare(self, info: Info) -> None:
        """Make the state, if there is none yet or the rank has moved to another machine."""
        before = self.created_with
        if before is not None and any(level.sharded for level in self.levels):
            if (before.hosts, before.rank) != (info.hosts, info.rank):
                self._move(before)
        if self._stack is None and self._state is None:
            self._state = self.compressor.init(self.spec, info)
        if self.created_with is None:
            self.created_with = info

    def _move(self, before: Info) -> None:
        """Carry the residual of the whole tensor in place of states of its parts."""
        self.carried = self._total_residual(self.compressor, self.state or {}, before)
        self.state, self.inactive, self.created_with = None, {}, None

    def _total_residual(self, compressor: Compressor, state: State, info: Info) -> Tensor | None:
        """Return the residual of the whole tensor, of levels without error feedback, too."""
        residual = compressor.residual(state)
        if residual is None:
            return self.carried
        xp, shape = self.spec.xp, self.spec.shape
        residual = xp.reshape(compressor.expand_residual(residual, self.spec, info), shape)
        return residual if self.carried is None else residual + xp.reshape(self.carried, shape)

    def residual(self, info: Info) -> Tensor | None:
        """Return this rank's residual of the bucket, in its shape; None without error feedback."""
        return self._total_residual(self.compressor, self.state or {}, self.created_with or info)

    def record_switch(self, level: int, counted: int) -> None:
        """Another level is about to serve, `counted` exchanges having counted so far."""
        self.served_by_level[self.level] = counted - self.served_from
        self.served_from = counted - self.served_by_level.pop(level, 0)

    def switch(self, level: int, info: Info) -> None:
        """Let another level serve: the new one takes over the residual of the old one."""
        if level == self.level:
            return
        old, old_level, old_state = self.compressor, self.level, self.state
        self.level = level
        if old_state is None:
            return
        new = self.compressor
        state = new.init(self.spec, info) | self.inactive.pop(level, {})
        state = new.warm_start(state, old, old_state)
        self.state = self._take_residual(state, old, old_state, info)
        self.inactive[old_level] = old.deactivate(old_state)

    def _take_residual(self, state: State, old: Compressor, old_state: State, info: Info) -> State:
        """Return the new level's state with the old one's residual, or put it in `carried`."""
        new, part = self.compressor, old.residual(old_state)
        keeps = new.residual(state) is not None
        if keeps and part is not None and new.sharded and old.sharded:
            return new.with_residual(state, part)  # the same part of the tensor, in the same units
        residual = self._total_residual(old, old_state, info)
        self.carried = None
        if residual is None:
            return state
        if keeps and not new.sharded:
            return new.with_residual(state, residual)
        self.carried = residual
        return state

    def saved(self) -> SavedState:
        """Return what must be saved; errors that are in several tensors, in one.

        Its tensors may be views of memory that the next step writes into.
        """
        states = dict(self.inactive)
        state = self.state
        if state:
            residual = self.compressor.residual(state)
            combined = state if residual is None else self.compressor.with_residual(state, residual)
            states[self.level] = combined
        return SavedState(self.level, states, self.carried, dict(self.evidence))

    def load(self, saved: SavedState) -> None:
        """Go on from what was saved."""
        states = dict(saved.states)
        self.level, self.carried, self.created_with = saved.level, saved.carried, None
        self.state, self.evidence = states.pop(saved.level, None), dict(saved.evidence)
        self.inactive = states


class BatchState:
    """The memory of entries that share a conversation, as that conversation sees it.

    Attributes:
        before: the policy's evidence before the current step, should that be undone.
        buffer: what the gradients of the last step were brought together in.
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

    def open(self, info: Info, wanted: Sequence[Evidence]) -> None:
        """Make what is missing; bring together what is not."""
        if not self._together() or any(level.sharded for level in self.entries[0].levels):
            for entry in self.entries:
                entry.prepare(replace(info, name=entry.name) if self.stacked else info)
            if self.stacked and not self._together():
                self._gather()
        nothing: list[dict[str, Tensor]] = [{} for _ in self.entries]
        missing = {x.key: self._joined(x, nothing) for x in wanted if x.key not in self.evidence}
        if missing:
            self.evidence = self.evidence | missing

    def _together(self) -> bool:
        stack = self._stack
        return stack is not None and all(entry.within(stack) for entry in self.entries)

    def _gather(self) -> None:
        states, kept = (
            [entry.state or {} for entry in self.entries],
            [s.evidence for s in self.entries],
        )
        state = {key: self._xp.stack([s[key] for s in states]) for key in states[0]}
        known = [x for x in self.declared if any(x.key in mine for mine in kept)]
        joined = {x.key: self._joined(x, kept) for x in known}
        self._stack = StackedState(state, joined, self.stacked == "any")

    def _joined(self, evidence: Evidence, kept: Sequence[dict[str, Tensor]]) -> Tensor:
        pairs, key = zip(kept, self.entries, strict=True), evidence.key
        return self.combine([x[key] if key in x else evidence.zeros(entry) for x, entry in pairs])

    def combine(self, parts: Sequence[Tensor]) -> Tensor:
        """Combine one tensor per entry into the form that the compressor sees."""
        if self.stacked == "any":
            return self._xp.concat([self._xp.reshape(x, (-1,)) for x in parts])
        return self._xp.stack(parts) if self.stacked else parts[0]

    @property
    def state(self) -> State:
        """Return the state for the compressor's generator."""
        return self._stack.state if self._stack is not None else self.entries[0].state or {}

    @property
    def evidence(self) -> dict[str, Tensor]:
        """Return the tensors for the policy's evidence."""
        return self._stack.evidence if self._stack is not None else self.entries[0].evidence

    @evidence.setter
    def evidence(self, kept: dict[str, Tensor]) -> None:
        if self._stack is not None:
            self._stack.evidence = kept
        else:
            self.entries[0].evidence = kept

    def carried(self) -> Tensor | None:
        """Return the residual of earlier levels that this gradient must include."""
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

    def keep(self, state: State) -> None:
        """Keep the state that a finished step has returned, and clear the residual beside it."""
        for entry in self.entries:
            entry.carried = None
        if self._stack is None:
            self.entries[0].state = state
            return
        self._stack.state = state
        if self._together():
            return
        place = 0
        for entry in self.entries:
            entry.join(self._stack, place)
            place += entry.bucket.size if self._stack.flat else 1

    def take_back(self) -> None:
        """Restore the policy's evidence from before the current step."""
        if self.before is not None:
            self.evidence, self.before = self.before, None
