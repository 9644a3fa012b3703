"""Error feedback (Seide et al., Interspeech 2014; Stich et al., 2018; Karimireddy et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Wrapper, with_feedback
from accordion_hvd.ops.spec import Spec


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

    per_rank_state: ClassVar[tuple[str, ...]] = ("error",)

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        return self.codec.contractive

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error`: the residual, in the codec's layout."""
        return super().init(spec, info) | {"error": spec.zeros(self.codec.layout(spec.shape))}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        return with_feedback(self.codec, grad, state, info)
