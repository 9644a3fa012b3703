"""A codec without error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Wrapper, without_feedback


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

    @property
    def batching(self) -> str:  # type: ignore[override]
        return self.codec.batching if self.codec.batching == "any" else ""

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        return without_feedback(self.codec, grad, state, info)
