"""What an exchange keeps for one bucket from step to step, and what happens when levels change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.engine.buckets import Bucket
from accordion_hvd.ops.spec import Spec


@dataclass
class Stack:
    """The memory of several slots: along a new first dimension, or flat, one after the other."""

    state: State
    seen: Tensor | None
    flat: bool


class Slot:
    """One bucket's levels and memory.

    Attributes:
        bucket: which tensors it serves.
        levels: the compressors that may serve it.
        spec: what its conversations are told of its gradients.
        level: which of the levels serves now.
        parked: other levels' states, by level.
        owed: what a level without error feedback must add to the next gradient.
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
        self.parked: dict[int, State] = {}
        self.owed: Tensor | None = None
        self.turns: dict[int, int] = {}
        self.since = 0
        self._state: State | None = None
        self._seen: Tensor | None = None
        self._stack: Stack | None = None  # where state and sum are, if not here
        self._place = 0
        self.made: Info | None = None

    @property
    def compressor(self) -> Compressor:
        """The one that serves now."""
        return self.levels[self.level]

    @property
    def state(self) -> State | None:
        """That of the level that serves now; None before the first exchange."""
        self._leave()
        return self._state

    @state.setter
    def state(self, state: State | None) -> None:
        self._leave()
        self._state = state

    @property
    def seen(self) -> Tensor | None:
        """The policy's sum of gradients."""
        self._leave()
        return self._seen

    @seen.setter
    def seen(self, seen: Tensor | None) -> None:
        self._leave()
        self._seen = seen

    def within(self, stack: Stack) -> bool:
        """Whether the slot's memory is part of `stack`."""
        return self._stack is stack

    def join(self, stack: Stack, place: int) -> None:
        """From now on the slot's memory is at `place` of `stack`: its number, or its offset."""
        self._stack, self._place = stack, place
        self._state = self._seen = None

    def _leave(self) -> None:
        """Whoever asks for a slot's memory gets it as the slot's own (a view where possible)."""
        if self._stack is not None:
            stack, place, self._stack = self._stack, self._place, None
            self._state = {key: value[place] for key, value in stack.state.items()}
            if stack.seen is not None and stack.flat:
                part = stack.seen[place : place + self.bucket.size]
                self._seen = self.spec.xp.reshape(part, self.bucket.shape)
            elif stack.seen is not None:
                self._seen = stack.seen[place]

    def prepare(self, info: Info) -> None:
        """Make the state, if there is none yet or the rank has moved to another machine."""
        before = self.made
        if before is not None and any(level.in_parts for level in self.levels):
            if (before.machines, before.rank) != (info.machines, info.rank):
                self._move(before)
        if self._stack is None and self._state is None:
            self._state = self.compressor.init(self.spec, info)
        if self.made is None:
            self.made = info

    def _move(self, before: Info) -> None:
        """Owe, of the whole tensor, what states that belong to parts of it have owed."""
        self.owed = self._debt(self.compressor, self.state or {}, before)
        self.state, self.parked, self.made = None, {}, None

    def _debt(self, compressor: Compressor, state: State, info: Info) -> Tensor | None:
        """All that is owed of the whole tensor: by the state, or to a level that cannot owe."""
        residual = compressor.residual(state)
        if residual is None:
            return self.owed
        xp, shape = self.spec.xp, self.spec.shape
        residual = xp.reshape(compressor.whole(residual, self.spec, info), shape)
        return residual if self.owed is None else residual + xp.reshape(self.owed, shape)

    def turn(self, level: int, counted: int) -> None:
        """Another level is about to serve, `counted` exchanges having counted so far."""
        self.turns[self.level] = counted - self.since
        self.since = counted - self.turns.pop(level, 0)

    def switch(self, level: int, info: Info) -> None:
        """Let another level serve: what the old one owes is handed over, the rest is parked."""
        if level == self.level:
            return
        old, old_level, old_state = self.compressor, self.level, self.state
        self.level = level
        if old_state is None:
            return
        new = self.compressor
        state = new.init(self.spec, info) | self.parked.pop(level, {})
        state = new.inherit(state, old, old_state)
        self.state = self._charge(state, old, old_state, info)
        self.parked[old_level] = old.park(old_state)

    def _charge(self, state: State, old: Compressor, old_state: State, info: Info) -> State:
        """The new level's state with what the old one owes, or that in `owed`."""
        new, part = self.compressor, old.residual(old_state)
        owes = new.residual(state) is not None
        if owes and part is not None and new.in_parts and old.in_parts:
            return new.with_residual(state, part)  # the same part of the tensor, in the same units
        residual = self._debt(old, old_state, info)
        self.owed = None
        if residual is None:
            return state
        if owes and not new.in_parts:
            return new.with_residual(state, residual)
        self.owed = residual
        return state

    def tensors(self) -> dict[str, Tensor]:
        """All that must be saved: "state/key", "parked/level/key", "owed" and "seen"."""
        found = {f"state/{key}": value for key, value in self._settled().items()}
        for level, state in self.parked.items():
            found |= {f"parked/{level}/{key}": value for key, value in state.items()}
        kept = {"owed": self.owed, "seen": self.seen}
        return found | {key: value for key, value in kept.items() if value is not None}

    def _settled(self) -> State:
        """The state, with what it owes in one tensor, as ranks' debts are added up."""
        state = self.state or {}
        residual = self.compressor.residual(state) if state else None
        return state if residual is None else self.compressor.with_residual(state, residual)

    def load(self, level: int, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.level, self.parked, state = level, {}, {}
        self.owed, self.seen = tensors.get("owed"), tensors.get("seen")
        for name, tensor in tensors.items():
            what, _, rest = name.partition("/")
            if what == "state":
                state[rest] = tensor
            elif what == "parked":
                which, _, key = rest.partition("/")
                self.parked.setdefault(int(which), {})[key] = tensor
        self.state, self.made = state or None, None


class Memory:
    """The memory of slots that share a conversation, as that conversation sees it.

    Attributes:
        unseen: the policy's sum before the step under way, should it be taken back.
        buffer: what the gradients of the last step were brought together in.
    """

    def __init__(self, slots: Sequence[Slot], stacked: str, xp: ModuleType) -> None:
        self.slots, self.stacked, self._xp = slots, stacked, xp
        self._stack: Stack | None = None
        self.unseen: Tensor | None = None
        self.buffer: Tensor | None = None

    def open(self, info: Info, observe: bool) -> None:
        """Make what is missing; bring together what is not."""
        if self._together() and not any(level.in_parts for level in self.slots[0].levels):
            if self.seen is not None or not observe:
                return
        for slot in self.slots:
            slot.prepare(replace(info, name=slot.name) if self.stacked else info)
        if self.stacked:
            self._gather(observe)
        elif observe and self.slots[0].seen is None:
            self.slots[0].seen = self.slots[0].spec.zeros(self.slots[0].bucket.shape)

    def _together(self) -> bool:
        stack = self._stack
        return stack is not None and all(slot.within(stack) for slot in self.slots)

    def _gather(self, observe: bool) -> None:
        if self._together() and (self.seen is not None or not observe):
            return
        states = [slot.state or {} for slot in self.slots]
        state = {key: self._xp.stack([s[key] for s in states]) for key in states[0]}
        sums = [slot.seen for slot in self.slots]
        seen = None
        if observe or any(x is not None for x in sums):
            seen = self.combine(sums)
        self._stack = Stack(state, seen, self.stacked == "any")

    def combine(self, parts: Sequence[Tensor | None]) -> Tensor:
        """One tensor for each slot, zeros for None, as the conversation sees them."""
        slots = zip(parts, self.slots, strict=True)
        full = [s.spec.zeros(s.bucket.shape) if x is None else x for x, s in slots]
        if self.stacked == "any":
            return self._xp.concat([self._xp.reshape(x, (-1,)) for x in full])
        return self._xp.stack(full) if self.stacked else full[0]

    @property
    def state(self) -> State:
        """What the conversation is given."""
        return self._stack.state if self._stack is not None else self.slots[0].state or {}

    @property
    def seen(self) -> Tensor | None:
        """The policy's sum."""
        return self._stack.seen if self._stack is not None else self.slots[0].seen

    @seen.setter
    def seen(self, seen: Tensor | None) -> None:
        if self._stack is not None:
            self._stack.seen = seen
        else:
            self.slots[0].seen = seen

    @property
    def owes(self) -> bool:
        """Whether earlier levels left something to add to this gradient."""
        return any(slot.owed is not None for slot in self.slots)

    def owed(self) -> Tensor | None:
        """What earlier levels left to add to this gradient."""
        if not self.owes:
            return None
        shaped = [
            None if s.owed is None else self._xp.reshape(s.owed, s.bucket.shape) for s in self.slots
        ]
        return self.combine(shaped)

    def keep(self, state: State) -> None:
        """A step is done: this is what the conversation returned; nothing is owed beside it."""
        for slot in self.slots:
            slot.owed = None
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
