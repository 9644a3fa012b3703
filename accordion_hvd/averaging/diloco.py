"""DiLoCo: distributed low-communication training (Douillard et al., arXiv 2311.08105, 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import (
    Averaging,
    check_compressor,
    ends_period,
    periodic,
    prefixed,
    unprefixed,
)
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer: SGD with Nesterov's momentum, as PyTorch writes it.

    Args:
        lr: at least 0; the paper's is 0.7. With lr 1 and momentum 0 models are simply averaged.
        momentum: in [0, 1); the paper's is 0.9.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Raises: ValueError when lr is negative or momentum outside [0, 1)."""
        check.at_least(self, "lr", self.lr, least=0)
        check.below_one(self, "momentum", self.momentum)


@dataclass(frozen=True)
class DiLoCo(Averaging):
    """Each rank trains alone; every `period` steps an outer optimizer moves the common model.

    Its gradient is the mean over ranks of how far their models have moved since (with the sign
    turned): delta = common - model; velocity = momentum velocity + mean delta; common = common -
    lr (mean delta + momentum velocity). All models are the common one then. Inner optimizers keep
    their state (the paper's are AdamW).

    With a `compressor` (ours), deltas are compressed, and what is not sent waits in its error for
    the next time.

    Sent: an allreduce of the model every `period` steps, or what the compressor makes of it.

    Args:
        period: inner steps for an outer one, at least 1; the paper's is 500.
        outer: the outer optimizer.
        compressor: None, or what compresses deltas.
    """

    shared: ClassVar[tuple[str, ...]] = ("common", "velocity")

    period: int = 500
    outer: Nesterov = field(default_factory=Nesterov)
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it may be."""
        periodic(self, self.period)
        if not isinstance(self.outer, Nesterov):
            check.refuse(self, "outer", self.outer, "a Nesterov(lr=..., momentum=...)")
        check_compressor(self, self.compressor)

    def equal(self, step: int) -> bool:
        """After an outer step."""
        return ends_period(step, self.period)

    def init(self, spec: Spec, info: Info) -> State:
        """`common`: the model after the last outer step; `velocity`; and the compressor's state."""
        zeros = [spec.zeros(spec.shape, spec.wide) for _ in range(2)]
        own = self.compressor.init(spec, info) if self.compressor else {}
        return {"common": zeros[0], "velocity": zeros[1]} | prefixed(own)

    def start(self, model: Tensor, info: Info) -> State:
        """Return a state whose common model is `model`."""
        return self.synchronized(super().start(model, info), model)

    def synchronized(self, state: State, model: Tensor) -> State:
        """Take an extra average as the common model; the velocity stays."""
        xp = namespace(model)
        return {**state, "common": xp.cast(xp.copy(model), xp.dtype(state["common"]))}

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """At a period's end, the mean delta and an outer step."""
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
        moved = xp.cast(xp.copy(common), xp.dtype(model))
        return moved, {"common": common, "velocity": velocity} | prefixed(own)
