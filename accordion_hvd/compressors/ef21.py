"""EF21 (Richtarik, Sokolov & Fatkhullin, NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.core.shifted import Shifted


@dataclass(frozen=True)
class EF21(Shifted):
    """Error feedback of 2021: each rank sends what its gradient has moved by, compressed.

    Algorithm 2 of "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback": c_i = C(g_i - h_i), h_i <- h_i + c_i, h <- h + mean c_i, and h is the result. Where
    gradients converge, so do messages, and h tends to the exact mean; with `ErrorFeedback` the last
    gradients are compressed as coarsely as the first. The first results are small, as h begins at
    zero (the paper begins with whole gradients). There is no residual at a change of levels.

    Sent: an allgather of the codec's message; an allreduce where messages can be averaged, as those
    of `RandomK`. Kept: two tensors, where `ErrorFeedback` has one.

    Args:
        codec: a contractive one, such as `TopK(0.01)` or `EFSignSGD()`, whose own error feedback
            is left out.
    """

    ahead: ClassVar[bool] = True
