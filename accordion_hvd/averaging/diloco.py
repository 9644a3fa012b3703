"""DiLoCo: distributed low-communication training (Douillard et al., arXiv 2311.08105, 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import (
    Averaging,
    check_compressor,
    ends_period,
    prefixed,
    unprefixed,
)
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer: SGD with Nesterov momentum, in PyTorch's form.

    With lr 1 and momentum 0, models are simply averaged.

    Args:
        lr: outer learning rate, at least 0. Default: 0.7, as in the paper.
        momentum: momentum coefficient in [0, 1). Default: 0.9, as in the paper.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check.at_least(self, "lr", self.lr, least=0)
        check.below_one(self, "momentum", self.momentum)


@dataclass(frozen=True)
class DiLoCo(Averaging):
    """DiLoCo: local training, with an outer optimizer step every `period` steps.

    Each rank trains its own model. At the end of a period, the ranks average how far their models
    have moved, and an outer optimizer applies this mean to the common model. All ranks then
    continue from the common model.

    The paper's outer step, with delta = common - model on each rank: velocity = momentum velocity +
    mean delta; common = common - lr (mean delta + momentum velocity). The inner optimizers keep
    their state (the paper's are AdamW).

    With a `compressor` (ours), ranks compress their deltas, and the part that was not sent stays in
    the compressor's residual until the next period.

    Args:
        period: number of inner steps per outer step, at least 1. Default: 500, as in the paper.
        outer: the outer optimizer. Default: `Nesterov()`.
        compressor: compressor of the deltas. Default: None, no compression.

    Traffic: an allreduce of the model every `period` steps, or the compressor's messages for it.
    """

    shared: ClassVar[tuple[str, ...]] = ("common", "velocity")

    period: int = 500
    outer: Nesterov = field(default_factory=Nesterov)
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        check.integer(self, "period", self.period, least=1)
        if not isinstance(self.outer, Nesterov):
            check.refuse(self, "outer", self.outer, "a Nesterov(lr=..., momentum=...)")
        check_compressor(self, self.compressor)

    def equal(self, step: int) -> bool:
        return ends_period(step, self.period)

    def init(self, spec: Spec, info: Info) -> State:
        """Return `common` (the last outer step's model), `velocity`, the compressor's state."""
        zeros = [spec.zeros(spec.shape, spec.wide) for _ in range(2)]
        own = self.compressor.init(spec, info) if self.compressor else {}
        return {"common": zeros[0], "velocity": zeros[1]} | prefixed(own)

    def synchronized(self, state: State, model: Tensor) -> State:
        """Make an extra average the common model. The velocity does not change."""
        xp = namespace(model)
        return {**state, "common": xp.cast(xp.copy(model), xp.dtype(state["common"]))}

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        if not self.equal(info.step):
            return model, state
        xp, common = namespace(model), state["common"]
        delta = common - xp.cast(model, xp.dtype(common))
        own = unprefixed(state)
        if self.compressor is None:
            mean = yield Allreduce(delta)
        else:
            sent = xp.cast(delta, "float32")
            mean, own = yield from self.compressor.exchange(sent, own, info)
        mean = xp.cast(mean, xp.dtype(common))
        velocity = state["velocity"] * self.outer.momentum + mean
        common = common - (mean + velocity * self.outer.momentum) * self.outer.lr
        updated = xp.cast(xp.copy(common), xp.dtype(model))
        return updated, {"common": common, "velocity": velocity} | prefixed(own)
