"""The saved state of one bucket, and its conversion to another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Compressor, Info, State, Tensor, widened
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule

_CARRIED = "owed"  # name in files


@dataclass
class SavedState:
    """The state of one bucket on one rank.

    Attributes:
        states: states of this level and of earlier ones, by level number.
        carried: residual of earlier levels that is not part of the present level's state and is
            added to the next gradient; None if there is none.
    """

    level: int
    states: dict[int, State] = field(default_factory=dict)
    carried: Tensor | None = None
    evidence: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in files; `read` is the inverse."""
        tensors = {} if self.carried is None else {_CARRIED: self.carried}
        tensors |= {f"kept/{key}": value for key, value in self.evidence.items()}
        for level, state in self.states.items():
            place = "state" if level == self.level else f"parked/{level}"
            tensors |= {f"{place}/{key}": value for key, value in state.items()}
        return tensors

    def residuals(self) -> list[Tensor]:
        """Return all residuals in fp32: that of each level, and the carried one."""
        rows = self.widened().tensors().items()
        return [x for name, x in rows if name == _CARRIED or name.endswith("/error")]

    @classmethod
    def read(cls, level: int, tensors: Mapping[str, Tensor]) -> SavedState:
        saved = cls(level, carried=tensors.get(_CARRIED))
        for name, tensor in tensors.items():
            place, _, key = name.partition("/")
            if place == "state":
                saved.states.setdefault(level, {})[key] = tensor
            elif place == "parked":
                number, _, key = key.partition("/")
                saved.states.setdefault(int(number), {})[key] = tensor
            elif place == "kept":
                saved.evidence[key] = tensor
        return saved

    def check(
        self, levels: Sequence[Compressor], spec: Spec, info: Info, evidence: Mapping[str, Tensor]
    ) -> None:
        """Check that the state is one of a bucket like `spec`.

        Args:
            info: the `Info` with which the state was made.
            evidence: tensors like those of the bucket's evidence, by key.

        Raises:
            ValueError: if tensors are missing, unknown, or of another shape or kind.
        """
        for level in (self.level, *self.states):
            check.integer("state", "level", level, least=0, most=len(levels) - 1)
        if self.carried is not None:
            check_like("residual", self.carried, spec.zeros(spec.shape), spec)
        for key in self.evidence.keys() & evidence.keys():
            check_like(key, self.evidence[key], evidence[key], spec)
        for number, state in self.states.items():
            made = levels[number].init(spec, info)
            missing = made.keys() - state.keys() if number == self.level else set()
            if missing or not state.keys() <= made.keys():
                check.refuse("state", "list of tensors", sorted(state), f"{sorted(made)}")
            for key, tensor in state.items():
                check_like(key, tensor, made[key], spec)

    def widened(self) -> SavedState:
        return replace(self, states={n: widened(state) for n, state in self.states.items()})

    def map(self, convert: Callable[[Any], Any]) -> SavedState:
        return SavedState.read(self.level, {k: convert(x) for k, x in self.tensors().items()})

    def scaled(self, factor: float) -> SavedState:
        states = {
            number: {k: (x * factor).astype(x.dtype) if k == "error" else x for k, x in s.items()}
            for number, s in self.states.items()
        }
        carried = self.carried
        if carried is not None:
            carried = (carried * factor).astype(carried.dtype)
        return replace(self, states=states, carried=carried)

    def of_whole(self, levels: Sequence[Compressor], spec: Spec, made: Info) -> SavedState:
        """Return a copy with the residual of the full tensor in place of sharded states.

        Args:
            spec: spec of the bucket, in NumPy.
            made: the `Info` with which the rank's states were made.
        """
        if not of_parts(levels, made):
            return self
        level, carried = levels[self.level], self.carried
        residual = level.residual(self.states.get(self.level, {}))
        if residual is not None:
            spec = replace(spec, xp=namespace(residual))
            carried = level.expand_residual(residual, spec, made) + (
                0.0 if carried is None else carried
            )
        return SavedState(self.level, {}, carried, self.evidence)


def check_like(name: str, saved: Tensor, made: Tensor, spec: Spec) -> None:
    """Check that an array has the dtype and the number of elements of a tensor."""
    shape, dtype = spec.xp.shape(made), spec.xp.dtype(made)
    if saved.size != math.prod(shape) or str(saved.dtype) != dtype:
        given = f"{saved.dtype} {tuple(saved.shape)}"
        check.refuse("state", f"tensor {name!r}", given, f"like {dtype} {tuple(shape)}")


def of_parts(levels: Sequence[Compressor], made: Info) -> bool:
    """Return whether the states of a level may be sharded (`Compressor.sharded`)."""
    return any(level.sharded and (made.hosts or not level.topology_aware) for level in levels)


def rescaled(
    all_saved: Sequence[SavedState], levels: Sequence[Compressor], spec: Spec, info: Info
) -> SavedState:
    """Return a rank's new state, made from the states of all ranks (`Compressor.rescale`).

    Args:
        all_saved: states of all ranks, in rank order, with residuals of full tensors.
        spec: spec of the bucket, in NumPy.
    """
    evidence = all_saved[0].evidence if info.rank == 0 else {}
    result = SavedState(all_saved[0].level, evidence=evidence)
    carried = [saved.carried for saved in all_saved if saved.carried is not None]
    if carried:
        result.carried = sum(carried) / len(all_saved)
    for number in _retained(all_saved[0], levels):
        states = [saved.states[number] for saved in all_saved]
        result.states[number] = levels[number].rescale(states, spec, info)
    return result


def rescale_from_one(
    saved: SavedState, levels: Sequence[Compressor], spec: Spec, info: Info
) -> SavedState:
    """Return a rank's state, made from another rank's state (`Compressor.rescale_from_one`)."""
    kept = {number: saved.states[number] for number in _retained(saved, levels)}
    states = {n: levels[n].rescale_from_one(state, spec, info) for n, state in kept.items()}
    return replace(saved, states=states)


def _retained(saved: SavedState, levels: Sequence[Compressor]) -> list[int]:
    # Inactive stages of an `UpdateRule` are not retained.
    return [n for n in saved.states if n == saved.level or not isinstance(levels[n], UpdateRule)]
