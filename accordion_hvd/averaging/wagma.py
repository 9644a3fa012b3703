"""WAGMA-SGD: wait-avoiding group model averaging (Li et al., IEEE TPDS 32(7), 2021)."""

from __future__ import annotations

import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import (
    Averaging,
    RankGroup,
    check_compressor,
    ends_period,
    group_info,
    prefixed,
    unprefixed,
)
from accordion_hvd.averaging.groups import Groups, default_size
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, average
from accordion_hvd.core.running import within_group
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class WAGMA(Averaging):
    """WAGMA-SGD: after each local step, average the model within a group that changes every step.

    Each rank averages its model with the members of its current group. Every model reaches all
    ranks within a few steps (`Groups.reach`), and every `period` steps all ranks average, which
    makes all models equal. The state of the optimizers (momentum) stays local.

    This class is the synchronous method: each group waits for its slowest member, but for no other
    rank. `engine.wait_avoiding` runs the method without this wait: a late rank is represented by
    the model that it published last (`weight` is the paper's rule).

    With a `compressor` (ours), each member compresses the difference between its model and the last
    average over all ranks. The new model is that average + the mean of the sent parts + the part
    that this rank did not send. The error feedback thus remains in the model itself, and the sum
    over a group does not change; with a lossless compressor the result is the mean. Averages over
    all ranks are never compressed.

    Args:
        group_size: number of ranks that average together. Default: None, about the square root of
            the number of ranks.
        period: number of steps between averages over all ranks, at least 1. Default: 10.
        wait_avoiding: True (needs MPI with threads, see the engine), False or "auto". Default:
            "auto".
        compressor: compressor of differences within groups. Default: None, no compression.
        timeout: seconds that wait-avoiding averaging waits for a rank before it ends the job; more
            than the longest pause of one rank, such as an evaluation on rank 0. Default: None, the
            environment variable ACCORDION_HVD_TIMEOUT if set, else 900.

    Traffic: 2 (S - 1) / S models per step for groups of S, as for an allreduce over all ranks. The
    method saves waiting time and communication distance, not bytes.
    """

    shared: ClassVar[tuple[str, ...]] = ("reference",)

    group_size: int | None = None
    period: int = 10
    wait_avoiding: bool | str = "auto"
    compressor: Compressor | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check.at_least(self, "timeout", self.timeout, least=0.1)
        if self.group_size is not None:
            check.integer(self, "group_size", self.group_size, least=1)
        check.integer(self, "period", self.period, least=1)
        check.one_of(self, "wait_avoiding", self.wait_avoiding, (True, False, "auto"))
        check_compressor(self, self.compressor)
        if self.compressor is not None and self.wait_avoiding is True:
            check.refuse(self, "wait_avoiding", True, "False or 'auto' with a compressor")

    def schedule(self, size: int) -> Groups:
        """Return the groups of each step.

        Raises:
            ValueError: if `group_size` is larger than the number of ranks.
        """
        return _schedule(self, size)

    def groups(self, size: int) -> tuple[RankGroup, ...]:
        return self.schedule(size).all() if self.period > 1 else ()

    @property
    def only_means(self) -> bool:
        return self.compressor is None

    def equal(self, step: int) -> bool:
        return ends_period(step, self.period)

    def init(self, spec: Spec, info: Info) -> State:
        """Return {}; with a compressor, its state and `reference`, the last average of all."""
        if self.compressor is None:
            return {}
        own = self.compressor.deactivate(self.compressor.init(spec, info))
        reference = spec.zeros(spec.shape, spec.wide)
        return {"reference": reference} | prefixed(own)

    def synchronized(self, state: State, model: Tensor) -> State:
        if self.compressor is None:
            return state
        xp = namespace(model)
        return {**state, "reference": xp.cast(xp.copy(model), xp.dtype(state["reference"]))}

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
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
        own, info = unprefixed(state), group_info(info, group)
        exchange = _compressed_mean(self.compressor, difference, own, info)
        mean, unsent, own = yield from within_group(group, exchange)
        updated = reference + xp.cast(mean, kind)
        if unsent is not None:
            updated = updated + xp.cast(xp.reshape(unsent, xp.shape(model)), kind)
        return xp.cast(updated, xp.dtype(model)), {"reference": reference} | prefixed(own)


def _compressed_mean(
    compressor: Compressor, x: Tensor, state: State, info: Info
) -> Generator[Any, Any, tuple[Tensor, Tensor | None, State]]:
    """Return the mean of the sent parts, the unsent part of `x` (None for 0), and the state."""
    xp, shape = namespace(x), namespace(x).shape(x)
    if isinstance(compressor, Codec):
        total = xp.reshape(x, compressor.layout(shape))
        message, room = compressor.encode(total, info), xp.copy(total)
        mean, mine = yield from average(compressor, message, room, info)
        unsent = compressor.remove(total, mine, info) if compressor.feedback else None
        return xp.reshape(mean, shape), unsent, {}
    state = compressor.init(xp.spec(x), info) | state
    mean, state = yield from compressor.exchange(x, state, info)
    return mean, compressor.residual(state), compressor.deactivate(state)


@functools.lru_cache(maxsize=64)
def _schedule(owner: Any, size: int) -> Groups:
    chosen = default_size(size) if owner.group_size is None else owner.group_size
    if chosen > size:
        allowed = f"an integer from 1 to {size}, the number of ranks"
        check.refuse(owner, "group_size", chosen, allowed)
    return Groups(size, chosen)
