"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini & Richtarik, 2019; MSML 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Codec, Message
from accordion_hvd.ops import namespace, random


@dataclass(frozen=True)
class Natural(Codec):
    """Natural compression: round each element stochastically to a power of two, in 9 bits.

    Each rank sends the sign bit and the exponent byte of the rounded values, as in IEEE 754. All
    ranks gather all messages and average them. The rounding is unbiased, so there is no error
    feedback.

    Definition 1 of the paper: t in [2^a, 2^(a + 1)] is rounded up with probability t / 2^a - 1,
    which is its mantissa. Here the result is unbiased to 2^-17 of 2^a, and its variance is at most
    t^2 / 8. Zero stays zero. Below 2^-126 the neighbours are 0 and 2^-126. From 2^127 on, an
    element may become infinite.

    Traffic: an allgather of 9 / 8 bytes per element, so traffic grows with the number of ranks. On
    up to 7 ranks it is less than for fp32.
    """

    summary = "Natural()", "1.1 n m, by allgather", "few ranks"
    batching = "any"
    feedback: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True
    codes: ClassVar[tuple[int, ...]] = (1, 8)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the signs and exponents as bytes."""
        seed = random.key("natural", info.name, info.step, info.rank)
        return (namespace(x).pack_powers(x, seed),)

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        powers = [part for (part,) in messages]
        return namespace(like).sum_powers(powers, 1 / len(powers), like)
