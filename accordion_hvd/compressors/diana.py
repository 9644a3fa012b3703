"""DIANA (Mishchenko, Gorbunov, Takac & Richtarik, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import check
from accordion_hvd.core.shifted import Shifted


@dataclass(frozen=True)
class Diana(Shifted):
    """DIANA (Mishchenko, Gorbunov, Takac & Richtarik, 2019): unbiased codecs of differences.

    Algorithm 1 of "Distributed Learning with Compressed Gradient Differences": Delta_i =
    Q(g_i - h_i), the result is h + mean Delta_i, and then h_i <- h_i + alpha Delta_i and h <- h +
    alpha mean Delta_i. The result is as unbiased as Q, and its variance goes to zero where
    gradients converge.

    Sent: an allgather of the codec's message; an allreduce where messages can be averaged, as those
    of `RandomK`. Kept: two tensors.

    Args:
        codec: an unbiased one, such as `QSGD(4)` or `Natural()`.
        alpha: the part of a message by which h_i moves, in (0, 1]; the paper's theory asks for at
            most 1 / (1 + omega), where E||Q(x) - x||^2 <= omega ||x||^2: 8/9 for `Natural`.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        """Raises: ValueError when codec is none, or alpha is outside (0, 1]."""
        super().__post_init__()
        check.ratio(self, "alpha", self.alpha)
