"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Sparsifier, decode, encode, mean_of
from accordion_hvd.core.base import Allgather, Conversation, Info, State, Tensor
from accordion_hvd.ops import namespace

_LARGEST = {"float16": 65504.0, "float32": math.inf}


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Send the largest magnitudes of each tensor, keep the rest for later.

    Each rank sends the `ratio` of its elements that are largest to all others; the mean is over
    ranks. What is not sent, rounding included, stays in the error and is added to the next
    gradient: average + error = gradient. The selection is exact.

    Sent: about 5.2 k (n - 1) bytes a rank in a ring of n ranks at a ratio of 0.01 (3.2 with fp16
    values), so traffic grows with the ranks; a position takes 1.2 bytes (`ops.indices`).

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; at least one element is.
        wire: the dtype in which values travel, "float32" or "float16".
    """

    stacks: ClassVar[str] = "alike"
    contracts: ClassVar[bool] = True

    wire: str = "float32"

    def __post_init__(self) -> None:
        """Raises: ValueError when ratio is outside (0, 1] or wire is no dtype for values."""
        super().__post_init__()
        check.one_of(self, "wire", self.wire, tuple(_LARGEST))

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allgather of positions and values."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        count, size = self.kept(shape[-1]), math.prod(shape)
        total, index = xp.accumulate_largest(state["error"], xp.reshape(grad, shape), count)
        total = xp.reshape(total, (-1,))
        values = xp.take(total, index)
        sent = self._rounded(values)
        error = xp.clear(total, index)
        if self.wire != "float32":
            error = xp.add_at(error, index, values - xp.cast(sent, "float32"))
        read = partial(decode, size=size, wire=self.wire, count=xp.shape(sent)[0])
        parts = yield Allgather(encode(index, sent, size), decode=read)
        return mean_of(parts, grad), {"error": xp.reshape(error, shape)}

    def _rounded(self, values: Tensor) -> Tensor:
        """As they travel; what fp16 cannot hold waits in the error."""
        xp, most = namespace(values), _LARGEST[self.wire]
        if most == math.inf:
            return values
        limit = xp.full(xp.shape(values), most, "float32", xp.device(values))
        return xp.cast(xp.maximum(xp.minimum(values, limit), -limit), self.wire)
