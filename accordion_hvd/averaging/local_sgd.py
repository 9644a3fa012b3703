"""Local SGD (McMahan et al., AISTATS 2017; Stich, ICLR 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging, ends_period
from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor


@dataclass(frozen=True)
class LocalSGD(Averaging):
    """Local SGD: each rank trains its own model, and every `period` steps all models are averaged.

    With a period of 1 and plain SGD, this equals averaging gradients.

    Args:
        period: number of steps between averages, at least 1. Default: 10.

    Traffic: an allreduce of the model every `period` steps.
    """

    period: int = 10

    def __post_init__(self) -> None:
        check.integer(self, "period", self.period, least=1)

    def equal(self, step: int) -> bool:
        return ends_period(step, self.period)

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        if self.equal(info.step):
            return (yield from self.synchronize(model, state, info))
        return model, state
