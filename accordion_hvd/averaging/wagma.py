"""WAGMA-SGD: wait-avoiding group model averaging (Li et al., IEEE TPDS 32(7), 2021)."""

from __future__ import annotations

import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import (
    Averaging,
    Group,
    check_compressor,
    ends_period,
    group_info,
    periodic,
    prefixed,
    unprefixed,
)
from accordion_hvd.averaging.groups import Groups, default_size
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, average
from accordion_hvd.core.composition import within_group
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class WAGMA(Averaging):
    """After each local step, average the model within a group that changes from step to step.

    Everybody's model reaches everybody within a few steps (`Groups.reach`), and every `period`
    steps all ranks average, which makes all models equal. Optimizers' own state (momentum) stays
    local. As a conversation this is the synchronous method: each group waits for its slowest
    member, but for nobody else. `engine.wait_avoiding` runs it without that wait: a late rank is
    represented by the model that it published last (`weight` has the paper's rule).

    With a `compressor`, what members send is compressed (ours): of the difference to the last
    global average each sends a part, the model becomes that average + the mean of what was sent +
    what this rank has not sent. So the error feedback is in the model itself, the sum over a group
    does not change, and without loss that is the mean. Global averages are never compressed.

    Sent: 2 (S - 1) / S of a model a step for groups of S, as by a global allreduce; what is saved
    is waiting and distance.

    Args:
        group_size: ranks that average together; None: near the root of their number.
        period: steps from one average of all ranks to the next, at least 1.
        wait_avoiding: True (needs MPI with threads, see the engine), False, or "auto".
        compressor: None, or what compresses differences within groups.
    """

    shared: ClassVar[tuple[str, ...]] = ("reference",)

    group_size: int | None = None
    period: int = 10
    wait_avoiding: bool | str = "auto"
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it may be."""
        if self.group_size is not None:
            check.integer(self, "group_size", self.group_size, least=1)
        periodic(self, self.period)
        check.one_of(self, "wait_avoiding", self.wait_avoiding, (True, False, "auto"))
        check_compressor(self, self.compressor)
        if self.compressor is not None and self.wait_avoiding is True:
            check.refuse(self, "wait_avoiding", True, "False or 'auto' where there is a compressor")

    def schedule(self, size: int) -> Groups:
        """Return the groups of each step.

        Raises:
            ValueError: `group_size` is larger than the number of ranks.
        """
        return _schedule(self, size)

    def groups(self, size: int) -> tuple[Group, ...]:
        """Return all groups of the schedule."""
        return self.schedule(size).all() if self.period > 1 else ()

    @property
    def only_means(self) -> bool:
        """Not with a compressor."""
        return self.compressor is None

    def equal(self, step: int) -> bool:
        """After a global average."""
        return ends_period(step, self.period)

    def init(self, spec: Spec, info: Info) -> State:
        """With a compressor: `reference`, the last global average, and the compressor's own."""
        if self.compressor is None:
            return {}
        kept = self.compressor.deactivate(self.compressor.init(spec, info))
        reference = spec.zeros(spec.shape, spec.wide)
        return {"reference": reference} | prefixed(kept)

    def start(self, model: Tensor, info: Info) -> State:
        """Return a state whose reference is `model`."""
        return self.synchronized(super().start(model, info), model)

    def synchronized(self, state: State, model: Tensor) -> State:
        """Take `model` as the reference from now on."""
        if self.compressor is None:
            return state
        xp = namespace(model)
        return {**state, "reference": xp.cast(xp.copy(model), xp.dtype(state["reference"]))}

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allreduce: over all ranks at the end of a period, else over this rank's group."""
        if self.equal(info.step):
            return (yield from self.synchronize(model, state, info))
        group = self.schedule(info.size).of(info.rank, info.step)
        if self.compressor is None:
            mean = yield Allreduce(model, group=group)
            return mean, state
        if len(group) == 1:
            return model, state
        reference = state["reference"]
        xp, kind = namespace(model), namespace(model).dtype(reference)
        difference = xp.cast(xp.cast(model, kind) - reference, "float32")
        talk = _sent(self.compressor, difference, unprefixed(state), group_info(info, group))
        mean, unsent, kept = yield from within_group(group, talk)
        moved = reference + xp.cast(mean, kind)
        if unsent is not None:
            moved = moved + xp.cast(xp.reshape(unsent, xp.shape(model)), kind)
        return xp.cast(moved, xp.dtype(model)), {"reference": reference} | prefixed(kept)


def _sent(
    compressor: Compressor, x: Tensor, kept: State, info: Info
) -> Generator[Any, Any, tuple[Tensor, Tensor | None, State]]:
    """Return the mean of the sent parts, the unsent part of `x` (or 0), and the state."""
    xp, shape = namespace(x), namespace(x).shape(x)
    if isinstance(compressor, Codec):
        rest = xp.reshape(x, compressor.layout(shape))
        message, room = compressor.encode(rest, info), xp.copy(rest)
        mean, mine = yield from average(compressor, message, room, info)
        unsent = compressor.remove(rest, mine, info) if compressor.feedback else None
        return xp.reshape(mean, shape), unsent, {}
    state = compressor.init(xp.spec(x), info) | kept
    mean, state = yield from compressor.exchange(x, state, info)
    return mean, compressor.residual(state), compressor.deactivate(state)


def weight(members: int, on_time: bool) -> float:
    """By what a rank divides: its group's sum if its model is in it, else that and its model."""
    return 1 / members if on_time else 1 / (members + 1)


@functools.lru_cache(maxsize=64)
def _schedule(owner: Any, size: int) -> Groups:
    chosen = default_size(size) if owner.group_size is None else owner.group_size
    if chosen > size:
        check.refuse(
            owner, "group_size", chosen, f"an integer from 1 to the {size} ranks there are"
        )
    return Groups(size, chosen)
