"""The plain average of all elements, in the gradient's dtype or in 16 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, Message
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


class AllElements(Codec):
    """Base class of methods that send all elements, in the gradient's dtype or 16 bits (`wire`)."""

    batching = "any"
    feedback: ClassVar[bool] = False
    wire: ClassVar[str | None] = None

    def accept(self, spec: Spec, name: str) -> None:
        """Raise ValueError unless tensor `name` is real floating point. It may be empty."""
        check.real(self, name, spec.dtype)

    def encode(self, x: Tensor, info: Info) -> Message:
        xp = namespace(x)
        return (xp.to_wire([x], self.wire, math.prod(xp.shape(x))) if self.wire else x,)

    def decode(self, message: Message, like: Tensor, info: Info) -> Tensor:
        xp = namespace(like)
        if self.wire:
            return xp.from_wire(message[0], self.wire, [xp.cast(like, "float32")])[0]
        return xp.reshape(message[0], xp.shape(like))

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allreduce of the gradient. There is no state; rounding errors are lost.

        Where gradients are unscaled, fp16 values are scaled, so that small ones do not vanish.
        """
        scale = info.loss_scale if self.wire == "float16" else None
        if scale is None:
            return (yield Allreduce(grad, wire=self.wire, reuse=True)), state
        mean = yield Allreduce(grad * scale, wire=self.wire, reuse=True)
        return mean / scale, state


@dataclass(frozen=True)
class Dense(AllElements):
    """No compression: average the gradient with one allreduce, in its own dtype.

    `Dense()` is the mildest level of a policy.

    Traffic: an allreduce of the gradient.
    """

    summary = "Dense()", "4 n m", "as a level of Accordion"
    summed: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True


@dataclass(frozen=True)
class FP16(AllElements):
    """IEEE half precision: send the gradient as fp16, half the bytes of fp32.

    Ranks add the values in fp32. On links below 300 Mbit/s (below 2 Gbit/s over torch.distributed),
    and with NCCL, the communication engine adds them in fp16 instead, which is faster there. There
    is no error feedback; rounding errors are lost.

    fp16 has 11 significant bits and overflows to infinity beyond 65504; where the engine adds in
    fp16, sums overflow as well. An infinity reaches every rank, so loss scalers on all ranks skip
    the same step. Values below 3e-8 become 0. Use `BF16` if either happens.
    """

    summary = "FP16()", "2 n m", "as the first step"
    fp16_reduction: ClassVar[bool] = True
    wire: ClassVar[str | None] = "float16"


@dataclass(frozen=True)
class BF16(AllElements):
    """bfloat16: send the gradient in half the bytes of fp32, without overflow.

    bfloat16 has 8 significant bits and the range of fp32. There is no error feedback; rounding
    errors are lost.
    """

    summary = "BF16()", "2 n m", "gradients that overflow or vanish in fp16"
    wire: ClassVar[str | None] = "bfloat16"
