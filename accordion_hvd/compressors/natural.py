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
    """Round each element stochastically to a neighbouring power of two: 9 bits instead of 32.

    Definition 1 of the paper: t between 2^a and 2^(a + 1) becomes the upper one with probability
    t / 2^a - 1, which is its mantissa. Unbiased (to 2^-17 of 2^a), variance at most t^2 / 8; so
    nothing is kept. Zero stays zero; below 2^-126 the neighbours are 0 and 2^-126; from 2^127 on
    an element may become infinite.

    The sign's bit and the exponent's byte travel as they are in IEEE 754.

    Sent: an allgather of 9 / 8 bytes an element, so traffic grows with the ranks: up to 7 of them
    it is less than fp32's.
    """

    batching: ClassVar[str] = "any"
    feedback: ClassVar[bool] = False

    def encode(self, x: Tensor, info: Info) -> Message:
        """Signs and exponents."""
        seed = random.key("natural", info.name, info.step, info.rank)
        return (namespace(x).pack_powers(x, seed),)

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Add up the powers and divide by the number of ranks."""
        powers = [part for (part,) in messages]
        return namespace(like).sum_powers(powers, 1 / len(powers), like)
