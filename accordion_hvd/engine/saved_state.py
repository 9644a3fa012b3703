"""The state of one bucket as it is saved, and what becomes of it on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule


@dataclass
class SavedState:
    """The state of one bucket on one rank.

    Attributes:
        level: the level that serves.
        states: of this level and of those that have served before.
        carried: the residual of a level without error feedback, for the next gradient.
        evidence: the tensors from which the policy's evidence is computed, by key.
    """

    level: int
    states: dict[int, State] = field(default_factory=dict)
    carried: Tensor | None = None
    evidence: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as files have them; `read` is the inverse."""
        found = {} if self.carried is None else {"owed": self.carried}
        found |= {f"kept/{key}": value for key, value in self.evidence.items()}
        for level, state in self.states.items():
            place = "state" if level == self.level else f"parked/{level}"
            found |= {f"{place}/{key}": value for key, value in state.items()}
        return found

    @classmethod
    def read(cls, level: int, tensors: Mapping[str, Tensor]) -> SavedState:
        """Return what `tensors` were made of.

        Args:
            level: the level that served.
            tensors: by name. Files of version 0.1.0 have "seen" for sums of gradients.
        """
        made = cls(level, carried=tensors.get("owed"))
        for name, tensor in tensors.items():
            place, _, key = name.partition("/")
            if place == "state":
                made.states.setdefault(level, {})[key] = tensor
            elif place == "parked":
                number, _, key = key.partition("/")
                made.states.setdefault(int(number), {})[key] = tensor
            elif place in ("kept", "seen"):
                made.evidence[key or "gradients"] = tensor
        return made

    def map(self, convert: Callable[[Any], Any]) -> SavedState:
        """Return the same with all tensors converted."""
        return SavedState.read(self.level, {k: convert(x) for k, x in self.tensors().items()})

    def scaled(self, factor: float) -> SavedState:
        """Return the same with all residuals multiplied."""
        states = {
            number: {k: (x * factor).astype(x.dtype) if k == "error" else x for k, x in s.items()}
            for number, s in self.states.items()
        }
        carried = self.carried
        if carried is not None:
            carried = (carried * factor).astype(carried.dtype)
        return replace(self, states=states, carried=carried)

    def of_whole(self, levels: Sequence[Compressor], spec: Spec, made: Info) -> SavedState:
        """Return the same with residuals of whole tensors in place of states of their parts.

        Args:
            levels: of the bucket.
            spec: of the bucket, in NumPy.
            made: what the rank's compressors were told.
        """
        if not (made.hosts and of_parts(levels)):
            return self
        level, carried = levels[self.level], self.carried
        residual = level.residual(self.states.get(self.level, {}))
        if residual is not None:
            spec = replace(spec, xp=namespace(residual))
            carried = level.expand_residual(residual, spec, made) + (
                0.0 if carried is None else carried
            )
        return SavedState(self.level, {}, carried, self.evidence)


def of_parts(levels: Sequence[Compressor]) -> bool:
    """Return whether states may belong to parts of a tensor."""
    return any(level.sharded for level in levels)


def rescaled(
    everyone: Sequence[SavedState], levels: Sequence[Compressor], spec: Spec, info: Info
) -> SavedState:
    """Return what a rank goes on with, from what all ranks had saved (`Compressor.rescale`).

    Args:
        everyone: in rank order; of whole tensors.
        levels: of the bucket.
        spec: of the bucket, in NumPy.
        info: of the rank that goes on.
    """
    found = SavedState(everyone[0].level, evidence=everyone[0].evidence if info.rank == 0 else {})
    carried = [one.carried for one in everyone if one.carried is not None]
    if carried:
        found.carried = sum(carried) / info.size
    for number in _lasting(everyone[0], levels):
        states = [one.states[number] for one in everyone]
        found.states[number] = levels[number].rescale(states, spec, info)
    return found


def rescale_from_one(
    one: SavedState, levels: Sequence[Compressor], spec: Spec, info: Info
) -> SavedState:
    """Return a rank's state, given only that of another rank (`Compressor.rescale_from_one`)."""
    states = {
        number: levels[number].rescale_from_one(one.states[number], spec, info)
        for number in _lasting(one, levels)
    }
    return replace(one, states=states)


def _lasting(one: SavedState, levels: Sequence[Compressor]) -> list[int]:
    """Return the levels whose states go on; what waits in another stage of a rule does not."""
    return [
        number
        for number in one.states
        if number == one.level or not isinstance(levels[number], UpdateRule)
    ]
