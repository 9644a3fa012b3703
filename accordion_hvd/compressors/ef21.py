"""EF21 (Richtarik, Sokolov & Fatkhullin, NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.core.codec import Shifted


@dataclass(frozen=True)
class EF21(Shifted):
    """EF21: each rank compresses the change of its gradient since its previous messages.

    Each rank i sends C(g_i - h_i), where h_i is the sum of its previous messages. All ranks add
    the mean message to h, the mean of all h_i, and h is the result.

    Algorithm 2 of "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback" (Richtarik, Sokolov & Fatkhullin, NeurIPS 2021): with c_i = C(g_i - h_i),
    h_i <- h_i + c_i and h <- h + mean c_i. Where gradients converge, messages tend to zero and h
    tends to the exact mean, whereas `ErrorFeedback` compresses the last gradients as coarsely as
    the first.

    Args:
        codec: a contractive codec, such as `TopK(0.01)` or `EFSignSGD()`. The codec's own error
            feedback is not used.

    Traffic: an allgather of the codec's message, or an allreduce for codecs whose messages can be
    averaged, such as `RandomK`. The state is two fp32 tensors of the gradient's size;
    `ErrorFeedback` has one. The first results are small, because h starts at zero (the paper starts
    with the full gradients). There is no residual to hand over when a policy changes levels.
    """

    summary = "EF21(TopK(0.01))", "as the codec", "large batches, long trainings"
    ahead: ClassVar[bool] = True
