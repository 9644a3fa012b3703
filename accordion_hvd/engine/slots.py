"""The state of one bucket from step to step, and its changes where levels change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.engine.buckets import Bucket
from accordion_hvd.engine.saved import Saved
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.evidence import Evidence


@dataclass
class Stack:
    """The memory of several slots: along a new first dimension, or flat, one after the other."""

    state: State
    kept: dict[str, Tensor]
    flat: bool

    def part(self, value: Tensor, place: int, slot: Slot) -> Tensor:
        """Return a slot's part of a tensor: a view, where the framework has views."""
        if not self.flat:
            return value[place]
        part = value[place : place + slot.bucket.size]
        return slot.spec.xp.reshape(part, slot.bucket.shape)


class Slot:
    """One bucket's levels and memory.

    Attributes:
        bucket: which tensors it serves.
        levels: the compressors that may serve it.
        spec: what its conversations are told of its gradients.
        level: which of the levels serves now.
        inactive: other levels' states, by level.
        carried: the residual of a level without error feedback, for the next gradient.
        made: what was told when `state` was made; None if it was loaded without saying.
        turns: exchanges that other levels have served, by level.
        name: what its conversations are told, the root of their random numbers; kept from job to
            job, where Keras may give a loaded model's variables other names.
        since: how many exchanges had counted when the present level began, less those that it had
            served before that.
    """

    def __init__(
        self, bucket: Bucket, levels: tuple[Compressor, ...], spec: Spec, level: int = 0
    ) -> None:
        self.bucket, self.levels, self.spec, self.level = bucket, levels, spec, level
        self.name = bucket.name
        self.inactive: dict[int, State] = {}
        self.carried: Tensor | None = None
        self.turns: dict[int, int] = {}
        self.since = 0
        self._state: State | None = None
        self._kept: dict[str, Tensor] = {}
        self._stack: Stack | None = None  # where state and evidence are, if not here
        self._place = 0
        self.made: Info | None = None

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
    def kept(self) -> dict[str, Tensor]:
        """Return the tensors for the policy's evidence, by its key; not to be written into."""
        if self._stack is None:
            return self._kept
        return {k: self._stack.part(v, self._place, self) for k, v in self._stack.kept.items()}

    @kept.setter
    def kept(self, kept: dict[str, Tensor]) -> None:
        self._leave()
        self._kept = kept

    def within(self, stack: Stack) -> bool:
        """Return whether the slot's memory is part of `stack`."""
        return self._stack is stack

    def join(self, stack: Stack, place: int) -> None:
        """From now on the slot's memory is at `place` of `stack`: its number, or its offset."""
        self._stack, self._place = stack, place
        self._state, self._kept = None, {}

    def _leave(self) -> None:
        """Have a memory of one's own (views, where possible)."""
        if self._stack is not None:
            self._state, self._kept, self._stack = self.state, self.kept, None

    def prepare(self, info: Info) -> None:
        """Make the state, if there is none yet or the rank has moved to another machine."""
        before = self.made
        if before is not None and any(level.sharded for level in self.levels):
            if (before.machines, before.rank) != (info.machines, info.rank):
                self._move(before)
        if self._stack is None and self._state is None:
            self._state = self.compressor.init(self.spec, info)
        if self.made is None:
            self.made = info

    def _move(self, before: Info) -> None:
        """Carry the residual of the whole tensor in place of states of its parts."""
        self.carried = self._debt(self.compressor, self.state or {}, before)
        self.state, self.inactive, self.made = None, {}, None

    def _debt(self, compressor: Compressor, state: State, info: Info) -> Tensor | None:
        """Return the residual of the whole tensor, of levels without error feedback, too."""
        residual = compressor.residual(state)
        if residual is None:
            return self.carried
        xp, shape = self.spec.xp, self.spec.shape
        residual = xp.reshape(compressor.whole(residual, self.spec, info), shape)
        return residual if self.carried is None else residual + xp.reshape(self.carried, shape)

    def residual(self, info: Info) -> Tensor | None:
        """Return this rank's residual of the bucket, in its shape; None without error feedback."""
        return self._debt(self.compressor, self.state or {}, self.made or info)

    def turn(self, level: int, counted: int) -> None:
        """Another level is about to serve, `counted` exchanges having counted so far."""
        self.turns[self.level] = counted - self.since
        self.since = counted - self.turns.pop(level, 0)

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
        self.state = self._charge(state, old, old_state, info)
        self.inactive[old_level] = old.deactivate(old_state)

    def _charge(self, state: State, old: Compressor, old_state: State, info: Info) -> State:
        """Return the new level's state with the old one's residual, or put it in `carried`."""
        new, part = self.compressor, old.residual(old_state)
        keeps = new.residual(state) is not None
        if keeps and part is not None and new.sharded and old.sharded:
            return new.with_residual(state, part)  # the same part of the tensor, in the same units
        residual = self._debt(old, old_state, info)
        self.carried = None
        if residual is None:
            return state
        if keeps and not new.sharded:
            return new.with_residual(state, residual)
        self.carried = residual
        return state

    def saved(self) -> Saved:
        """Return what must be saved; errors that are in several tensors, in one.

        Its tensors may be views of memory that the next step writes into.
        """
        states = dict(self.inactive)
        state = self.state
        if state:
            residual = self.compressor.residual(state)
            combined = state if residual is None else self.compressor.with_residual(state, residual)
            states[self.level] = combined
        return Saved(self.level, states, self.carried, dict(self.kept))

    def load(self, saved: Saved) -> None:
        """Go on from what was saved."""
        states = dict(saved.states)
        self.level, self.carried, self.made = saved.level, saved.carried, None
        self.state, self.kept = states.pop(saved.level, None), dict(saved.kept)
        self.inactive = states


class Memory:
    """The memory of slots that share a conversation, as that conversation sees it.

    Attributes:
        before: the policy's evidence before the current step, should that be undone.
        buffer: what the gradients of the last step were brought together in.
    """

    def __init__(
        self, slots: Sequence[Slot], stacked: str, xp: ModuleType, evidence: Sequence[Evidence]
    ) -> None:
        self.slots, self.stacked, self.evidence, self._xp = slots, stacked, evidence, xp
        self._stack: Stack | None = None
        self.before: dict[str, Tensor] | None = None
        self.buffer: Tensor | None = None

    def open(self, info: Info, wanted: Sequence[Evidence]) -> None:
        """Make what is missing; bring together what is not."""
        if not self._together() or any(level.sharded for level in self.slots[0].levels):
            for slot in self.slots:
                slot.prepare(replace(info, name=slot.name) if self.stacked else info)
            if self.stacked and not self._together():
                self._gather()
        nothing: list[dict[str, Tensor]] = [{} for _ in self.slots]
        missing = {x.key: self._joined(x, nothing) for x in wanted if x.key not in self.kept}
        if missing:
            self.kept = self.kept | missing

    def _together(self) -> bool:
        stack = self._stack
        return stack is not None and all(slot.within(stack) for slot in self.slots)

    def _gather(self) -> None:
        states, kept = [slot.state or {} for slot in self.slots], [s.kept for s in self.slots]
        state = {key: self._xp.stack([s[key] for s in states]) for key in states[0]}
        known = [x for x in self.evidence if any(x.key in mine for mine in kept)]
        joined = {x.key: self._joined(x, kept) for x in known}
        self._stack = Stack(state, joined, self.stacked == "any")

    def _joined(self, evidence: Evidence, kept: Sequence[dict[str, Tensor]]) -> Tensor:
        pairs, key = zip(kept, self.slots, strict=True), evidence.key
        return self.combine([x[key] if key in x else evidence.zeros(slot) for x, slot in pairs])

    def combine(self, parts: Sequence[Tensor]) -> Tensor:
        """Combine one tensor per slot into the form that the compressor sees."""
        if self.stacked == "any":
            return self._xp.concat([self._xp.reshape(x, (-1,)) for x in parts])
        return self._xp.stack(parts) if self.stacked else parts[0]

    @property
    def state(self) -> State:
        """Return the state for the compressor's generator."""
        return self._stack.state if self._stack is not None else self.slots[0].state or {}

    @property
    def kept(self) -> dict[str, Tensor]:
        """Return the tensors for the policy's evidence."""
        return self._stack.kept if self._stack is not None else self.slots[0].kept

    @kept.setter
    def kept(self, kept: dict[str, Tensor]) -> None:
        if self._stack is not None:
            self._stack.kept = kept
        else:
            self.slots[0].kept = kept

    def carried(self) -> Tensor | None:
        """Return the residual of earlier levels that this gradient must include."""
        if not any(slot.carried is not None for slot in self.slots):
            return None
        return self.combine(
            [
                slot.spec.zeros(slot.bucket.shape)
                if slot.carried is None
                else self._xp.reshape(slot.carried, slot.bucket.shape)
                for slot in self.slots
            ]
        )

    def keep(self, state: State) -> None:
        """Keep the state that a finished step has returned, and clear the residual beside it."""
        for slot in self.slots:
            slot.carried = None
        if self._stack is None:
            self.slots[0].state = state
            return
        self._stack.state = state
        if self._together():
            return
        place = 0
        for slot in self.slots:
            slot.join(self._stack, place)
            place += slot.bucket.size if self._stack.flat else 1

    def take_back(self) -> None:
        """Restore the policy's evidence from before the current step."""
        if self.before is not None:
            self.kept, self.before = self.before, None
