"""Base class of EF21 and DIANA, which compress the difference between gradient and a shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from accordion_hvd.core.base import Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Wrapper, average
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


class Shifted(Wrapper):
    """Base class of methods in which rank i sends C(g_i - h_i) for its gradient g_i and shift h_i.

    With m_i the decoded message of rank i, h_i <- h_i + alpha m_i. Each rank also tracks h, the
    mean of all h_i. The state is `local` (h_i) and `mean` (h), both fp32 in the codec's layout. The
    residual of other levels is sent whole beside the first message, which would forget it.

    Attributes:
        alpha: step size of the shifts.
        ahead: whether the result is the new h (EF21) instead of the old h plus the mean of all
            m_i (DIANA).
    """

    per_rank_state: ClassVar[tuple[str, ...]] = ("local",)
    alpha: float = 1.0
    ahead: ClassVar[bool] = False

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state: zeros, so that the first message encodes the gradient itself."""
        state, layout = super().init(spec, info), self.codec.layout(spec.shape)
        return state | {"local": spec.zeros(layout), "mean": spec.zeros(layout)}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        xp, shape = namespace(grad), namespace(grad).shape(grad)
        codec = self.codec.specialize(info)
        local, before = state["local"], state["mean"]
        difference = xp.cast(xp.reshape(grad, xp.shape(local)), "float32") - local
        message, buffer = codec.encode(difference, info), xp.copy(difference)
        mean, parsed = yield from average(codec, message, difference, info)
        decoded = codec.decode(parsed, buffer, info)
        after = before + mean * self.alpha
        result = xp.copy(after) if self.ahead else before + mean  # the optimizer may overwrite it
        return xp.reshape(result, shape), {"local": local + decoded * self.alpha, "mean": after}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over h_i and h from another codec with the same layout."""
        if not isinstance(other, Shifted):
            return state
        layouts = [namespace(x["mean"]).shape(x["mean"]) for x in (state, other_state)]
        return state if layouts[0] != layouts[1] else {**state, **other_state}

    def deactivate(self, state: State) -> State:
        """Return nothing: gradients change while another level serves, and shifts would return."""
        return {}

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Set all h_i to h, so that their mean is h on any number of ranks."""
        return {"local": states[0]["mean"], "mean": states[0]["mean"]}

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        return self.rescale([state], spec, info)
