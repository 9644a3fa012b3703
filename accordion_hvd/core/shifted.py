"""Base class of EF21 and DIANA, whose messages are differences to a shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from accordion_hvd.core.base import Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Wrapper, average
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


class Shifted(Wrapper):
    """Ranks send C(g_i - h_i); h_i is a rank's own, h the mean of all h_i.

    The state is `local` (h_i) and `mean` (h), both fp32 in the codec's layout.

    Attributes:
        alpha: the part of a message by which h_i moves.
        ahead: whether the result is h as it will be (EF21), not h + mean message (DIANA).
    """

    per_rank_state: ClassVar[tuple[str, ...]] = ("local",)
    alpha: float = 1.0
    ahead: ClassVar[bool] = False

    def init(self, spec: Spec, info: Info) -> State:
        """`local`, h_i, and `mean`, h: zeros, so that the first message is of the gradient."""
        state, layout = super().init(spec, info), self.codec.layout(spec.shape)
        return state | {"local": spec.zeros(layout), "mean": spec.zeros(layout)}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather of messages."""
        xp, shape, codec = namespace(grad), namespace(grad).shape(grad), self.codec
        local, before = state["local"], state["mean"]
        difference = xp.cast(xp.reshape(grad, xp.shape(local)), "float32") - local
        message, room = codec.encode(difference, info), xp.copy(difference)
        moved, mine = yield from average(codec, message, difference, info)
        mine = codec.decode(mine, room, info)
        after = before + moved * self.alpha
        found = xp.copy(after) if self.ahead else before + moved  # the optimizer may write into it
        return xp.reshape(found, shape), {"local": local + mine * self.alpha, "mean": after}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Go on from another codec's h_i and h."""
        if not isinstance(other, Shifted):
            return state
        layouts = [namespace(x["mean"]).shape(x["mean"]) for x in (state, other_state)]
        return state if layouts[0] != layouts[1] else {**state, **other_state}

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Set all h_i to h: their mean is then h on any number of ranks."""
        return {"local": states[0]["mean"], "mean": states[0]["mean"]}

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Set h_i to h."""
        return self.rescale([state], spec, info)
