"""A codec without error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Wrapper, without_feedback


@dataclass(frozen=True)
class Gathered(Wrapper):
    """Average what a codec leaves of the gradients; nothing is kept for later.

    Right for unbiased codecs, such as `QSGD` and `Natural`, which do so by themselves. With biased
    ones, such as `TopK`, the part of the gradient that is never sent is lost.

    Sent: an allgather of the codec's message; an allreduce where messages can be averaged, as those
    of `RandomK`.

    Args:
        codec: what compresses, such as `TopK(0.01)`.
    """

    @property
    def batching(self) -> str:  # type: ignore[override]
        """Any tensors may share a call, if the codec takes them so."""
        return self.codec.batching if self.codec.batching == "any" else ""

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather of messages."""
        return without_feedback(self.codec, grad, state, info)
