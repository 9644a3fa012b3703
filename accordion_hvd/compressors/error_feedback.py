"""Error feedback (Seide et al., Interspeech 2014; Stich et al., 2018; Karimireddy et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Wrapper, with_feedback
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Add to each gradient what the codec has left of earlier ones.

    With e the error and g the gradient, C(e + g) is sent and e <- e + g - C(e + g): average +
    error = gradient. The biased codecs of this package (`TopK`, `Threshold`, `AdaComp`, `Int8`,
    `EFSignSGD`, `OneBit`) do so by themselves. An unbiased codec of large variance, such as
    `QSGD(1)`, does not contract, and its error may grow without bound.

    Sent: an allgather of the codec's message; an allreduce where messages can be averaged, as those
    of `RandomK`.

    Args:
        codec: what compresses, such as `Natural()`.
    """

    per_rank_state: ClassVar[tuple[str, ...]] = ("error",)

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        """Return whether the codec is contractive."""
        return self.codec.contractive

    def init(self, spec: Spec, info: Info) -> State:
        """`error`: what was not sent yet, in the codec's layout."""
        return super().init(spec, info) | {"error": spec.zeros(self.codec.layout(spec.shape))}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allgather of messages."""
        return with_feedback(self.codec, grad, state, info)
