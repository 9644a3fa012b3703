"""ScaleCom: scalable sparsified gradient compression (Chen et al., NeurIPS 2020)."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Sparsifier, mean_of, places
from accordion_hvd.core.base import Allreduce, Broadcast, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import indices, namespace

_GUIDE = ((196.0, 25), (128.0, 50), (0.0, 400))
"""FLOPs per gradient from which the paper compresses a layer this strongly."""


@dataclass(frozen=True)
class ScaleCom(Sparsifier):
    """One rank chooses for all, in turn; all send their own values there (CLT-k).

    Ranks' errors grow alike, so what is large on one is large on most. The leader, rank
    `step` mod n, chooses by its own error and gradient; values at the same positions can be added
    on the way, so what a rank sends and receives does not grow with the number of ranks.

    The residue m passes a low-pass filter: what is chosen from and sent is p = m + g, and then
    m <- m + beta (g - sent). Kept is m / beta, which is the gradient not sent yet: average + error
    = gradient for every beta, and the next p is beta * error + g.

    Sent: a broadcast of the positions (about 1.2 bytes for each of k; the paper has them take
    log2(1 / ratio) bits) and an allreduce of 4 k bytes. In a TensorFlow graph, where a leader
    cannot change, a sum of the leader's positions and the others' zeros takes the broadcast's
    place, which costs as much as two.

    The paper leaves the first epochs (less than a tenth of training) and the first layer
    uncompressed: see `Accordion` and `skip`. It applies momentum after averaging.

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; at least one element is.
        beta: the filter's rate, in (0, 1]; 1 (no filter) for usual batches, 0.1 for large ones and
            their learning rates in the paper, where 0.1 to 0.3 do alike.
        selection: "bins", the paper's: the largest of each 1 / ratio elements in a row; or
            "exact": the largest of the tensor.
    """

    batching: ClassVar[str] = "alike"

    beta: float = 1.0
    selection: str = "bins"

    def __post_init__(self) -> None:
        """Raises: ValueError when ratio or beta is outside (0, 1], or selection is unknown."""
        super().__post_init__()
        check.ratio(self, "beta", self.beta)
        check.one_of(self, "selection", self.selection, ("bins", "exact"))

    @classmethod
    def guided(cls, flops: float, **options: Any) -> ScaleCom:
        """For a layer with this number of FLOPs per gradient element and step of a rank.

        The paper's guide: a layer with much computation for each weight, as convolutions of large
        images have, is compressed 25 times (from 196) or 50 times (from 128), others 400 times.

        Raises:
            ValueError: flops is negative or no number.
        """
        check.at_least(cls.__name__, "flops", flops, least=0)
        return cls(1 / next(times for least, times in _GUIDE if flops >= least), **options)

    @property
    def width(self) -> int:
        """Elements of a bin, of which one is sent."""
        return round(1 / self.ratio)

    def kept(self, size: int) -> int:
        """Return how many of `size` elements are sent."""
        return -(-size // self.width) if self.selection == "bins" else super().kept(size)

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Broadcast the leader's positions, then average the values there."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        fresh, error = xp.reshape(grad, shape), state["error"]
        index = yield from self._chosen(fresh, error, info)
        values = xp.cast(xp.take(xp.reshape(fresh, (-1,)), index), "float32")
        values = values + xp.take(xp.reshape(error, (-1,)), index) * self.beta
        total = xp.reshape(xp.accumulate(error, fresh), (-1,))
        error = xp.add_at(total, index, -values)
        values = yield Allreduce(values, reuse=True)
        return mean_of([(index, values)], grad), {"error": xp.reshape(error, shape)}

    def _chosen(self, fresh: Tensor, error: Tensor, info: Info) -> Generator[Any, Any, Tensor]:
        xp, shape = namespace(fresh), namespace(fresh).shape(error)
        size, count = math.prod(shape), math.prod(shape[:-1]) * self.kept(shape[-1])
        leader = info.step % info.size
        read = partial(_decode, count=count, size=size)
        if not check.is_integer(leader):  # in a graph
            mine = xp.pack_index(self._choice(fresh, error), size)
            mine = _words(mine) * xp.cast(leader == info.rank, "int32")
            return (yield Allreduce(mine, op="sum", sender=leader, decode=read))
        if leader == info.rank:
            mine = xp.pack_index(self._choice(fresh, error), size)
        else:
            length = indices.packed_length(count, size)
            mine = xp.zeros((length,), "uint8", xp.device(fresh))
        return (yield Broadcast(mine, root=leader, decode=read))

    def _choice(self, fresh: Tensor, error: Tensor) -> Tensor:
        """Choose the positions where this rank's p = m + g is large."""
        xp = namespace(fresh)
        large = error * self.beta + xp.cast(fresh, "float32")
        if self.selection == "bins":
            return xp.largest_of_bins(large, self.width)
        return xp.largest_index(large, self.kept(xp.shape(large)[-1]))


def _words(packed: Tensor) -> Tensor:
    """Bytes as int32, which every engine can add."""
    xp = namespace(packed)
    missing = -xp.shape(packed)[0] % 4
    return xp.from_bytes(xp.concat([packed, xp.zeros((missing,), "uint8")]), "int32", (-1,))


def _decode(payload: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Positions, of what a broadcast or a sum of `_words` has brought."""
    xp = namespace(payload)
    packed = xp.to_bytes(payload)[: indices.packed_length(count, size)]
    return places(packed, count, size)
