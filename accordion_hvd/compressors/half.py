"""Casts to 16 bits for the journey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, Conversation, Info, State, Tensor
from accordion_hvd.ops.spec import Spec


class _Half(Compressor):
    stacks: ClassVar[str] = "any"
    wire: ClassVar[str]

    def accept(self, spec: Spec, name: str) -> None:
        """See that `name` has real floating-point numbers; any number of them, none too."""
        check.real(self, name, spec.dtype)

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allreduce of 16-bit values; no state, so what rounding loses is lost."""
        mean = yield Allreduce(grad, wire=self.wire, reuse=True)
        return mean, state


@dataclass(frozen=True)
class FP16(_Half):
    """IEEE half precision: 11 significant bits, overflows to infinity beyond 65504.

    Half the bytes of fp32. Infinities reach every rank alike, so loss scalers skip together.
    Values are added in fp32; by the engine, in fp16, on links below 100 Mbit/s and by NCCL: there
    sums, too, are infinite beyond 65504.
    """

    halves: ClassVar[bool] = True
    wire: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BF16(_Half):
    """bfloat16: 8 significant bits and the range of fp32; half its bytes."""

    wire: ClassVar[str] = "bfloat16"
