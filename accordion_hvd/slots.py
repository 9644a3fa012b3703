"""What an exchange keeps for one bucket from step to step, and what happens when levels change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accordion_hvd.base import Compressor, Info, Spec, State, Tensor
from accordion_hvd.buckets import Bucket


@dataclass
class Slot:
    """One bucket's levels and memory.

    Attributes:
        bucket: which tensors it serves.
        levels: the compressors that may serve it.
        spec: what its conversations are told of its gradients.
        level: which of the levels serves now.
        state: that one's state; None before the first exchange.
        parked: other levels' states, by level.
        owed: what a level without error feedback must add to the next gradient.
        seen: the policy's sum of gradients.
        unseen: that sum before the step under way, should it be taken back.
        made: what was told when `state` was made; None if it was loaded without saying.
    """

    bucket: Bucket
    levels: tuple[Compressor, ...]
    spec: Spec
    level: int = 0
    state: State | None = None
    parked: dict[int, State] = field(default_factory=dict)
    owed: Tensor | None = None
    seen: Tensor | None = None
    unseen: Tensor | None = None
    made: Info | None = None

    @property
    def compressor(self) -> Compressor:
        """The one that serves now."""
        return self.levels[self.level]

    def prepare(self, info: Info) -> None:
        """Make the state, if there is none yet or ranks have moved to other machines."""
        asking = any(level.by_machine for level in self.levels)
        if asking and self.made is not None and self.made.machines != info.machines:
            self._move(self.made)
        if self.state is None:
            self.state = self.compressor.init(self.spec, info)
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
        residual = self._debt(old, old_state, info)
        self.owed = None
        if residual is not None and (new.residual(state) is None or new.by_machine):
            self.owed = residual
        elif residual is not None:
            state = new.with_residual(state, residual)
        self.parked[old_level] = old.park(old_state)
        self.state = state

    def tensors(self) -> dict[str, Tensor]:
        """All that must be saved: "state/key", "parked/level/key", "owed" and "seen"."""
        found = {f"state/{key}": value for key, value in (self.state or {}).items()}
        for level, state in self.parked.items():
            found |= {f"parked/{level}/{key}": value for key, value in state.items()}
        kept = {"owed": self.owed, "seen": self.seen}
        return found | {key: value for key, value in kept.items() if value is not None}

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
