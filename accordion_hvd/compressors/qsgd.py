"""QSGD: stochastic quantization (Alistarh, Grubic, Li, Tomioka & Vojnovic, NeurIPS 2017)."""

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
    """Stochastic quantization: round each element to one of few levels of its bucket's norm.

    Each rank sends a code of `bits` bits per element and one fp32 norm per bucket. All ranks gather
    all messages and average them. The rounding is unbiased, so there is no error feedback. Ranks
    round independently of each other.

    Section 3.1 of the paper: with s levels, v becomes norm * sign(v) * l / s or
    norm * sign(v) * (l + 1) / s, such that its expectation is v (here to 2^-17 of a level). Each
    bucket of neighbouring elements has its own norm (section 3.3): by default its largest
    magnitude, as in the paper's experiments.

    `bits` includes the sign: s = 2^(bits - 1) - 1. One bit has no room for the paper's zero, so its
    two values are -norm and norm (ours; also unbiased, with a larger variance). Codes have a fixed
    width (ours); the paper's Elias code pays off only for the 2-norm with few levels.

    Args:
        bits: number of bits per element, from 1 to 8. Default: 4.
        bucket: number of elements that share a norm, at least 1. Default: 512.
        norm: "max" or "l2". Default: "max".

    Traffic: an allgather of bits / 8 + 4 / bucket bytes per element, so traffic grows with the
    number of ranks. On fewer than about 64 / bits ranks it is less than for fp32. Tensors that
    share a call share buckets.
    """

    summary = "QSGD(4)", "0.51 n m, by allgather", "few ranks"
    batching = "any"
    feedback: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True
    shared: ClassVar[str] = "bucket"

    bits: int = 4
    bucket: int = 512
    norm: str = "max"

    def __post_init__(self) -> None:
        check.integer(self, "bits", self.bits, least=1, most=8)
        check.integer(self, "bucket", self.bucket, least=1)
        check.one_of(self, "norm", self.norm, ("max", "l2"))

    @property
    def codes(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(quantization.sections(self.bits))

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the codes and the step size of each bucket."""
        xp = namespace(x)
        steps = xp.bucket_norms(x, self.bucket, self.norm) * (1 / quantization.middle(self.bits))
        seed = random.key("qsgd", info.name, info.step, info.rank)
        return xp.quantize(x, steps, self.bucket, self.bits, seed), steps

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        middle = quantization.middle(self.bits)
        codes, steps = shares(messages)
        return namespace(like).sum_quantized(codes, steps, self.bucket, self.bits, middle, like)
