"""Compression of each rank's momentum (Signum: Bernstein et al., ICLR 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.compressors.wrappers import CompressorWrapper
from accordion_hvd.core.base import Compressor, ExchangeGenerator, Info, Private, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class Momentum(CompressorWrapper):
    """Compress each rank's momentum instead of its gradient.

    Each rank i updates its momentum, m_i <- momentum m_i + g_i, and the inner compressor averages
    the m_i. The result is an update that includes momentum, so the inner optimizer must be plain
    SGD.

    With `Dense()` this is SGD with momentum. With an unbiased codec, m_i has less noise relative to
    its size than g_i. Tensors that are too small to be compressed get plain momentum.

    Args:
        compressor: the inner compressor, such as `QSGD(4)` or `TopK(0.01)`. It must return the mean
            of gradients.
        momentum: momentum coefficient in [0, 1). Default: 0.9.

    Traffic: as for the inner compressor.
    """

    summary = "Momentum(Natural())", "as the inner compressor", "comparisons, with plain SGD"
    output = "update"

    compressor: Compressor
    momentum: float = 0.9

    def __post_init__(self) -> None:
        inner: Any = self.compressor
        supported = isinstance(inner, Compressor) and not isinstance(inner, Private)
        if not supported or inner.sharded or inner.output != "gradient":
            allowed = "a compressor that returns the mean of full gradients"
            check.refuse(self, "compressor", inner, allowed)
        check.below_one(self, "momentum", self.momentum)

    @property
    def batching(self) -> str:  # type: ignore[override]
        return "alike" if self.compressor.batching else ""

    @property
    def per_rank_state(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.compressor.per_rank_state, "momentum")

    def init(self, spec: Spec, info: Info) -> State:
        state = super().init(spec, info) | self.compressor.init(spec, info)
        return state | ({"momentum": spec.zeros(spec.shape)} if self.momentum else {})

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        if not self.momentum:
            return (yield from self.compressor.exchange(grad, state, info))
        xp, shape = namespace(grad), namespace(grad).shape(grad)
        inner = _without_momentum(state)
        fresh = xp.reshape(grad, xp.shape(state["momentum"]))
        momentum = xp.accumulate_scaled(state["momentum"], self.momentum, fresh)
        sent = xp.reshape(xp.copy(momentum), shape)
        mean, inner = yield from self.compressor.exchange(sent, inner, info)
        return mean, {**inner, "momentum": momentum}

    def plain(self) -> Compressor:
        return Momentum(self.compressor.plain() or Dense(), self.momentum)

    def deactivate(self, state: State) -> State:
        own = {key: value for key, value in state.items() if key == "momentum"}
        return super().deactivate(_without_momentum(state)) | own

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        inner = [_without_momentum(state) for state in states]
        mean = [state["momentum"] for state in states if "momentum" in state]
        own = {"momentum": sum(mean) / len(mean)} if mean else {}
        return super().rescale(inner, spec, info) | own

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        own = {"momentum": 0 * state["momentum"]} if "momentum" in state else {}
        return super().rescale_from_one(_without_momentum(state), spec, info) | own

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        if "momentum" not in state or "momentum" not in other_state:
            return state
        return {**state, "momentum": other_state["momentum"]}


def _without_momentum(state: State) -> State:
    return {key: value for key, value in state.items() if key != "momentum"}
