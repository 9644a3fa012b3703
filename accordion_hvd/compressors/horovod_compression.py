"""Adapter for compression objects that were written for Horovod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class HorovodCompression(Compressor):
    """Compress with an object written for Horovod.

    Args:
        compression: an object or class with `compress(tensor) -> (tensor, context)` and
            `decompress(tensor, context) -> tensor`.
    """

    scope: ClassVar[str] = "each"
    compression: Any = None

    def accept(self, spec: Spec, name: str) -> None:
        """Accept every tensor that Horovod accepts."""

    def exchange(self, grad: Any, state: State, info: Info) -> ExchangeGenerator:
        scale = info.loss_scale  # without which its fp16 values would vanish
        small, context = self.compression.compress(grad if scale is None else grad * scale)
        mean = self.compression.decompress((yield Allreduce(small)), context)
        return mean if scale is None else mean / scale, state

    def __repr__(self) -> str:
        """Return a text without memory addresses, so that all ranks get the same one."""
        kind = self.compression if isinstance(self.compression, type) else type(self.compression)
        return f"HorovodCompression({kind.__qualname__})"
