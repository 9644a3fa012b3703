"""Compressors around compressors: error feedback (Seide et al., 2014; Karimireddy et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import (
    Allreduce,
    Compressor,
    ExchangeGenerator,
    Info,
    Private,
    State,
    Tensor,
)
from accordion_hvd.core.codec import Wrapper, with_feedback, without_feedback
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


class CompressorWrapper(Compressor):
    """Compressor that delegates to an inner compressor and uses its state."""

    compressor: Compressor
    output = property(attrgetter("compressor.output"))  # type: ignore[assignment]
    scope = property(attrgetter("compressor.scope"))  # type: ignore[assignment]
    fp16_reduction = property(attrgetter("compressor.fp16_reduction"))  # type: ignore[assignment]
    period = property(attrgetter("compressor.period"))
    startup_steps = property(attrgetter("compressor.startup_steps"))
    additive = property(attrgetter("compressor.additive"))

    def accept(self, spec: Spec, name: str) -> None:
        self.compressor.accept(spec, name)

    def variant(self, step: int) -> int:
        return self.compressor.variant(step)

    def plain(self) -> Compressor | None:
        return self.compressor.plain()

    def residual(self, state: State) -> Tensor | None:
        return self.compressor.residual(state)

    def with_residual(self, state: State, residual: Tensor) -> State:
        return self.compressor.with_residual(state, residual)

    def report(self, state: State) -> dict[str, Tensor]:
        return self.compressor.report(state) if state else {}

    def deactivate(self, state: State) -> State:
        return self.compressor.deactivate(state) if state else {}

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        return self.compressor.rescale(states, spec, info)

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        return self.compressor.rescale_from_one(state, spec, info)


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Error feedback: add the part that a codec did not send to the next gradient.

    Each rank sends the compressed sum of its residual and its gradient. The mean of all messages
    is the result, and the rest of the sum is the new residual: with residual e and gradient g,
    send C(e + g), then e <- e + g - C(e + g).

    The biased codecs of this package (`TopK`, `STC`, `RandomK`, `Threshold`, `AdaComp`, `Int8`,
    `EFSignSGD`, `OneBit`) have error feedback without this wrapper.

    Args:
        codec: a codec, such as `Natural()`.

    Traffic: an allgather of the codec's message, or an allreduce for codecs whose messages can be
    averaged, such as `RandomK`. An unbiased codec of large variance, such as `QSGD(1)`, is not
    contractive, and its residual may grow without bound.
    """

    summary = "ErrorFeedback(Natural())", "as the codec", "comparisons"
    per_rank_state: ClassVar[tuple[str, ...]] = ("error",)
    contractive = property(attrgetter("codec.contractive"))  # type: ignore[assignment]

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error`: the residual, in the codec's layout."""
        return super().init(spec, info) | {"error": spec.zeros(self.codec.layout(spec.shape))}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        return with_feedback(self.codec, grad, state, info)


@dataclass(frozen=True)
class Gathered(Wrapper):
    """Average a codec's messages without error feedback.

    Each rank sends its compressed gradient, and the mean of all messages is the result. The part
    of the gradient that a rank does not send is lost.

    Unbiased codecs, such as `QSGD` and `Natural`, do not need error feedback and already work like
    this. A biased codec, such as `TopK`, then has a biased mean.

    Args:
        codec: a codec, such as `TopK(0.01)`.

    Traffic: an allgather of the codec's message, or an allreduce for codecs whose messages can be
    averaged, such as `RandomK`.
    """

    summary = "Gathered(TopK(0.1))", "as the codec", "comparisons"
    batching = property(attrgetter("codec.batching"))  # type: ignore[assignment]

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        return without_feedback(self.codec, grad, state, info)


@dataclass(frozen=True)
class HorovodCompression(Compressor):
    """Compress with an object written for Horovod.

    Args:
        compression: an object or class with `compress(tensor) -> (tensor, context)` and
            `decompress(tensor, context) -> tensor`.
    """

    scope = "each"
    fp16_reduction = True  # as far as anyone knows: Horovod's own object casts to fp16
    compression: Any = None

    def accept(self, spec: Spec, name: str) -> None:
        """Accept every tensor that Horovod accepts."""

    def exchange(self, grad: Any, state: State, info: Info) -> ExchangeGenerator:
        scale = info.loss_scale  # without which its fp16 values would vanish
        small, context = self.compression.compress(grad if scale is None else grad * scale)
        mean = self.compression.decompress((yield Allreduce(small)), context)
        return mean if scale is None else mean / scale, state

    def __repr__(self) -> str:
        """Return a text without memory addresses, so that all ranks get the same one."""
        kind = self.compression if isinstance(self.compression, type) else type(self.compression)
        return f"HorovodCompression({kind.__qualname__})"


# ----------------------------------------------------------------------------------------- momentum
@dataclass(frozen=True)
class Momentum(CompressorWrapper):
    """Compress each rank's momentum instead of its gradient (Signum: Bernstein et al., ICLR 2019).

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
    additive = False

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
        return with_momentum(state, other_state)


def with_momentum(state: State, other: State) -> State:
    """Return a state with the momentum of another one, if that is of a tensor of this size."""
    if "momentum" not in state or "momentum" not in other:
        return state
    xp, shape = namespace(state["momentum"]), namespace(state["momentum"]).shape(state["momentum"])
    if math.prod(xp.shape(other["momentum"])) != math.prod(shape):
        return state  # such as that of a slice (`TwoLevel`)
    return {**state, "momentum": xp.reshape(other["momentum"], shape)}


def _without_momentum(state: State) -> State:
    return {key: value for key, value in state.items() if key != "momentum"}
