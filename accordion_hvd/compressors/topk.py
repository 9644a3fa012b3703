"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Ratio, SparseCodec, decode, encode
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Message, Reader
from accordion_hvd.ops import namespace

_LARGEST = {"float16": 65504.0, "float32": math.inf}


@dataclass(frozen=True)
class TopK(Ratio, SparseCodec):
    """Top-k sparsification with error feedback: send the largest elements of each tensor.

    Each rank sends the `ratio` of its elements with the largest magnitude in residual + gradient,
    and their indices. All ranks gather all messages and average them. A rank keeps the other
    elements and rounding errors in its residual and adds them to the next gradient, so nothing is
    lost. The selection is exact.

    Args:
        ratio: fraction of the elements to send, in (0, 1]; at least one element is sent. Default:
            0.01.
        wire: dtype of the values sent, "float32" or "float16". Default: "float32".

    Traffic: about 5.2 k (N - 1) bytes per rank for k elements in a ring of N ranks at a ratio of
    0.01 (3.2 with fp16 values), so traffic grows with the number of ranks. An index takes 1.2 bytes
    (`ops.indices`).
    """

    contractive: ClassVar[bool] = True

    wire: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "wire", self.wire, tuple(_LARGEST))

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return indices and values as one vector of bytes."""
        xp = namespace(x)
        return self._packed(x, xp.largest_index(x, self.kept(xp.shape(x)[-1])))

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return the message for error + x, and that sum, in one pass over memory."""
        xp = namespace(error)
        total, index = xp.accumulate_largest(error, x, self.kept(xp.shape(error)[-1]))
        return self._packed(total, index), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader]:
        count = math.prod(shape[:-1]) * self.kept(shape[-1])
        return (partial(decode, size=math.prod(shape), wire=self.wire, count=count),)

    def _packed(self, x: Tensor, index: Tensor) -> Message:
        xp = namespace(x)
        values = self._rounded(xp.take(xp.reshape(x, (-1,)), index))
        return (encode(index, values, math.prod(xp.shape(x))),)

    def _rounded(self, values: Tensor) -> Tensor:
        """Round values to the wire dtype. The part that fp16 cannot hold stays in the residual."""
        xp, largest = namespace(values), _LARGEST[self.wire]
        if largest == math.inf:
            return values
        limit = xp.full((1,), largest, "float32", xp.device(values))
        return xp.cast(xp.clip(values, limit), self.wire)
