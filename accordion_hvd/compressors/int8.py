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
    """Round to the nearest of 255 equidistant values between a block's extremes.

    Blocks with a largest magnitude each are those of "8-bit Optimizers via Block-wise
    Quantization" (Dettmers, Lewis, Shleifer & Zettlemoyer, ICLR 2022); its types are not linear,
    this one is. Dettmers' "8-Bit Approximations for Parallelism in Deep Learning" (2016) sends
    gradients so, rounded to nearest and without feedback. Here (ours) the error waits for the next
    step: rounding to nearest has at most half the step's error where stochastic rounding has a
    whole one, needs no random numbers, and with feedback its bias is paid back (Karimireddy et
    al., ICML 2019); it costs the memory of an error. For stochastic 8 bits there is `QSGD(8)`.

    Sent: an allgather of 1 + 4 / block bytes an element, so traffic grows with the ranks: up to 7
    of them it is less than fp32's. Blocks run through tensors that share a call.

    Args:
        block: how many elements have a scale in common.
    """

    batching: ClassVar[str] = "alike"
    contractive: ClassVar[bool] = True

    block: int = 256

    def __post_init__(self) -> None:
        """Raises: ValueError when block is no integer of at least 1."""
        check.integer(self, "block", self.block, least=1)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Codes and the blocks' steps."""
        xp = namespace(x)
        steps = xp.bucket_norms(x, self.block, "max") * (1 / _MIDDLE)
        return xp.quantize(x, steps, self.block, 8), steps

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Add up codes times steps."""
        return namespace(like).sum_quantized(*shares(messages), self.block, 8, _MIDDLE, like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """Subtract in place."""
        return namespace(total).subtract_quantized(total, *message, self.block, 8, _MIDDLE)
