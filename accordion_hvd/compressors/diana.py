"""DIANA (Mishchenko, Gorbunov, Takac & Richtarik, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import check
from accordion_hvd.core.codec import Shifted


@dataclass(frozen=True)
class Diana(Shifted):
    """DIANA: each rank compresses the difference between its gradient and a learned shift.

    Each rank i sends C(g_i - h_i), where the shift h_i tracks its gradient. All ranks add the mean
    message to the mean shift h; the sum is the result. The result is unbiased if the codec is, and
    its variance goes to zero where gradients converge.

    Algorithm 1 of "Distributed Learning with Compressed Gradient Differences" (Mishchenko,
    Gorbunov, Takac & Richtarik, 2019): with Delta_i = Q(g_i - h_i), the result is
    h + mean Delta_i. Then h_i <- h_i + alpha Delta_i and h <- h + alpha mean Delta_i.

    Args:
        codec: an unbiased codec, such as `QSGD(4)` or `Natural()`.
        alpha: step size of the shifts, in (0, 1]. The paper's theory requires at most
            1 / (1 + omega), where E||Q(x) - x||^2 <= omega ||x||^2; for `Natural` that is 8/9.
            Default: 0.5.

    Traffic: an allgather of the codec's message. The state is two fp32 tensors of the gradient's
    size.
    """

    summary = "Diana(QSGD(4))", "as the codec", "large batches, long trainings"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codec.unbiased:
            check.refuse(self, "codec", self.codec, "unbiased, such as QSGD(4); EF21 takes others")
        check.ratio(self, "alpha", self.alpha)
