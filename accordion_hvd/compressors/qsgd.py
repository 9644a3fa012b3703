"""QSGD: stochastic quantisation (Alistarh, Grubic, Li, Tomioka & Vojnovic, NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Codec, Message, shares
from accordion_hvd.ops import namespace, quantization, random


@dataclass(frozen=True)
class QSGD(Codec):
    """Round each element stochastically to one of few levels of its bucket's norm.

    Section 3.1 of the paper: with s levels, v becomes norm * sign(v) * (l + 1) / s or l / s, such
    that its expectation is v. Buckets of neighbours have a norm each (section 3.3), by default
    their largest magnitude, as in the paper's experiments. Unbiased (to 2^-17 of a level), so
    nothing is kept; no rank's rounding depends on another's.

    `bits` count the sign: s = 2^(bits - 1) - 1. One bit has no room for the paper's zero: its two
    values are -norm and norm (ours; unbiased too, of more variance). Codes have a fixed width
    instead of the paper's Elias code, which pays with the 2-norm and few levels only.

    Sent: an allgather of (bits / 8 + 4 / bucket) bytes an element, so traffic grows with the ranks:
    below about 64 / bits of them it is less than fp32's. Tensors that share a call share buckets.

    Args:
        bits: of an element, 1 to 8.
        bucket: how many elements have a norm in common.
        norm: "max" or "l2".
    """

    batching: ClassVar[str] = "any"
    feedback: ClassVar[bool] = False

    bits: int = 4
    bucket: int = 512
    norm: str = "max"

    def __post_init__(self) -> None:
        """Raises: ValueError for bits outside 1 to 8, a bucket of none, or an unknown norm."""
        check.integer(self, "bits", self.bits, least=1, most=8)
        check.integer(self, "bucket", self.bucket, least=1)
        check.one_of(self, "norm", self.norm, ("max", "l2"))

    def encode(self, x: Tensor, info: Info) -> Message:
        """Codes and the buckets' steps."""
        xp = namespace(x)
        steps = xp.bucket_norms(x, self.bucket, self.norm) * (1 / quantization.middle(self.bits))
        seed = random.key("qsgd", info.name, info.step, info.rank)
        return xp.quantize(x, steps, self.bucket, self.bits, seed), steps

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Add up codes times steps."""
        middle = quantization.middle(self.bits)
        codes, steps = shares(messages)
        return namespace(like).sum_quantized(codes, steps, self.bucket, self.bits, middle, like)
