"""8 bits in blocks, with error feedback (after Dettmers, ICLR 2016, and Dettmers et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Codec, Message, shares
from accordion_hvd.ops import namespace, quantization

_MIDDLE = quantization.middle(8)


@dataclass(frozen=True)
class Int8(Codec):
    """8-bit linear quantization in blocks, with error feedback.

    Each rank rounds each element of residual + gradient to the nearest of 255 equidistant values
    between minus and plus the largest magnitude of its block. It sends one byte per element and
    one fp32 scale per block. All ranks gather all messages and average them; each rank adds its
    rounding error to its next gradient.

    Blocks with one largest magnitude each follow "8-bit Optimizers via Block-wise Quantization"
    (Dettmers, Lewis, Shleifer & Zettlemoyer, ICLR 2022), whose data types are not linear. "8-Bit
    Approximations for Parallelism in Deep Learning" (Dettmers, ICLR 2016) sends gradients rounded
    to nearest, without error feedback. The error feedback is ours: rounding to nearest errs by at
    most half a step, stochastic rounding by up to a whole one. Rounding to nearest needs no random
    numbers, and error feedback corrects its bias (Karimireddy et al., ICML 2019). The price is the
    memory of a residual. `QSGD(8)` rounds stochastically to 8 bits.

    Args:
        block: number of elements that share a scale, at least 1. Default: 256.

    Traffic: an allgather of 1 + 4 / block bytes per element, so traffic grows with the number of
    ranks. On up to 7 ranks it is less than for fp32. Blocks may span tensors that share a call.
    """

    summary = "Int8()", "1.02 n m, by allgather", "few ranks"
    batching = "alike"
    contractive: ClassVar[bool] = True
    codes: ClassVar[tuple[int, ...]] = (8,)
    shared: ClassVar[str] = "block"

    block: int = 256

    def __post_init__(self) -> None:
        check.integer(self, "block", self.block, least=1)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the codes and the step size of each block."""
        xp = namespace(x)
        steps = xp.bucket_norms(x, self.block, "max") * (1 / _MIDDLE)
        return xp.quantize(x, steps, self.block, 8), steps

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        return namespace(like).sum_quantized(*shares(messages), self.block, 8, _MIDDLE, like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        return namespace(total).subtract_quantized(total, *message, self.block, 8, _MIDDLE)
