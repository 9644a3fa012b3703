"""Casts to 16 bits for the journey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.compressors.dense import AllElements


@dataclass(frozen=True)
class FP16(AllElements):
    """IEEE half precision: 11 significant bits, overflows to infinity beyond 65504.

    Half the bytes of fp32. Infinities reach every rank alike, so loss scalers skip together.
    Values are added in fp32; by the engine, in fp16, on links below 100 Mbit/s and by NCCL: there
    sums, too, are infinite beyond 65504.
    """

    fp16_reduction: ClassVar[bool] = True
    wire: ClassVar[str | None] = "float16"


@dataclass(frozen=True)
class BF16(AllElements):
    """bfloat16: 8 significant bits and the range of fp32; half its bytes."""

    wire: ClassVar[str | None] = "bfloat16"
