"""Casts to 16 bits for the allreduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.compressors.dense import AllElements


@dataclass(frozen=True)
class FP16(AllElements):
    """IEEE half precision: send the gradient as fp16, half the bytes of fp32.

    Ranks add the values in fp32. On links below 300 Mbit/s (below 2 Gbit/s over torch.distributed),
    and with NCCL, the communication engine adds them in fp16 instead, which is faster there. There
    is no error feedback; rounding errors are lost.

    fp16 has 11 significant bits and overflows to infinity beyond 65504; where the engine adds in
    fp16, sums overflow as well. An infinity reaches every rank, so loss scalers on all ranks skip
    the same step. Use `BF16` for gradients that overflow.
    """

    fp16_reduction: ClassVar[bool] = True
    wire: ClassVar[str | None] = "float16"


@dataclass(frozen=True)
class BF16(AllElements):
    """bfloat16: send the gradient in half the bytes of fp32, without overflow.

    bfloat16 has 8 significant bits and the range of fp32. There is no error feedback; rounding
    errors are lost.
    """

    wire: ClassVar[str | None] = "bfloat16"
