"""ScaleCom: scalable sparsified gradient compression (Chen et al., NeurIPS 2020)."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Sparsifier, mean_of, places
from accordion_hvd.core.base import Allreduce, Broadcast, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import indices, namespace

_GUIDE = ((196.0, 25), (128.0, 50), (0.0, 400))
"""The paper's compression factors, each with the FLOPs per gradient element it requires."""


@dataclass(frozen=True)
class ScaleCom(Sparsifier):
    """ScaleCom: send the elements at indices that a rotating leader selects (CLT-k).

    In each step one rank, the leader, broadcasts the indices of its largest elements. All ranks
    then average their values at these indices with one allreduce, so traffic does not grow with
    the number of ranks. This works because residuals of different ranks become similar: elements
    that are large on one rank are large on most. The other elements stay in the residual.

    The leader is rank step mod N. The paper's residue m passes a low-pass filter: ranks select from
    and send p = m + g, and then m <- m + beta (g - sent). The state stores m / beta, the part of
    the gradient that was not sent (`error`), so p = beta error + g and nothing is lost for any
    beta.

    Args:
        ratio: fraction of the elements to send, in (0, 1]; at least one element is sent. Default:
            0.01.
        beta: rate of the filter in (0, 1]. Default: 1, no filter, for usual batch sizes. For large
            batches and their learning rates the paper uses 0.1, and finds 0.1 to 0.3 similar.
        selection: "bins" selects the largest element of each 1 / ratio consecutive elements, as in
            the paper; "exact" selects the largest elements of the tensor. Default: "bins".

    Traffic: a broadcast of the indices, about 1.2 bytes for each of k (log2(1 / ratio) bits in the
    paper), and an allreduce of 4 k bytes. A TensorFlow graph cannot change the leader, so the
    leader's indices and the other ranks' zeros are added instead of broadcast, which costs as much
    as two broadcasts.

    A change of beta loses nothing, because the residual is stored in units of the gradient; but it
    changes how fast the residual is sent. Where an element is sent, a step sends beta times its
    residual and retains the rest. After a change from beta=1 to 0.1, ranks thus select by
    0.1 error + g, and each sending of an element sends a tenth of the residual that beta=1 would
    have sent at once. After a change from 0.1 to 1, a step sends the full residual, ten times
    what the paper's filtered residue m holds.

    `ScaleComRecipe` is the paper's recipe: no compression in the first epochs (less than a tenth
    of training) and in the first layer, and a rate per layer. Momentum is applied after averaging,
    as in the paper.
    """

    summary = "ScaleCom(0.01)", "0.05 n m", "many ranks, large batches (`beta=0.1`)"
    batching = "alike"

    beta: float = 1.0
    selection: str = "bins"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.ratio(self, "beta", self.beta)
        check.one_of(self, "selection", self.selection, ("bins", "exact"))

    @classmethod
    def guided(cls, flops: float, **options: Any) -> ScaleCom:
        """Return a ScaleCom for a layer, with the ratio that the paper recommends.

        A layer with much computation per weight, such as a convolution of large images, is
        compressed 25 times (from 196 FLOPs) or 50 times (from 128 FLOPs), other layers 400 times.

        Args:
            flops: FLOPs per gradient element and step of one rank.
            **options: other arguments of ScaleCom.

        Raises:
            ValueError: if `flops` is negative or not a number.
        """
        check.at_least(cls.__name__, "flops", flops, least=0)
        return cls(1 / next(times for least, times in _GUIDE if flops >= least), **options)

    @property
    def width(self) -> int:
        """Return the number of elements per bin, of which one is sent."""
        return round(1 / self.ratio)

    def kept(self, size: int) -> int:
        return -(-size // self.width) if self.selection == "bins" else super().kept(size)

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Broadcast the leader's indices, then average the values there."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        fresh, error = xp.reshape(grad, shape), state["error"]
        index = yield from self._leader_index(fresh, error, info)
        values = xp.cast(xp.take(xp.reshape(fresh, (-1,)), index), "float32")
        waiting = xp.take(xp.reshape(error, (-1,)), index)
        values = values + waiting * self.beta
        error = xp.clear(xp.reshape(xp.accumulate(error, fresh), (-1,)), index)
        if self.beta < 1:  # (e + g) - (g + beta e), without the rounding error of a large g
            error = xp.add_at(error, index, waiting * (1 - self.beta))
        values = yield Allreduce(values, reuse=True)
        return mean_of([(index, values)], grad), {"error": xp.reshape(error, shape)}

    def _leader_index(
        self, fresh: Tensor, error: Tensor, info: Info
    ) -> Generator[Any, Any, Tensor]:
        xp, shape = namespace(fresh), namespace(fresh).shape(error)
        size, count = math.prod(shape), math.prod(shape[:-1]) * self.kept(shape[-1])
        leader = info.step % info.size
        read = partial(_decode, count=count, size=size)
        if not check.is_integer(leader):  # in a graph
            mine = xp.pack_index(self._select(fresh, error), size)
            mine = _as_int32(mine) * xp.cast(leader == info.rank, "int32")
            return (yield Allreduce(mine, op="sum", sender=leader, decode=read))
        if leader == info.rank:
            mine = xp.pack_index(self._select(fresh, error), size)
        else:
            length = indices.packed_length(count, size)
            mine = xp.zeros((length,), "uint8", xp.device(fresh))
        return (yield Broadcast(mine, root=leader, decode=read))

    def _select(self, fresh: Tensor, error: Tensor) -> Tensor:
        """Return the indices of this rank's largest elements of p = m + g."""
        xp = namespace(fresh)
        total = error * self.beta + xp.cast(fresh, "float32")
        if self.selection == "bins":
            return xp.largest_of_bins(total, self.width)
        return xp.largest_index(total, self.kept(xp.shape(total)[-1]))


def _as_int32(packed: Tensor) -> Tensor:
    """Return bytes as int32, which every engine can add."""
    xp = namespace(packed)
    missing = -xp.shape(packed)[0] % 4
    return xp.from_bytes(xp.concat([packed, xp.zeros((missing,), "uint8")]), "int32", (-1,))


def _decode(payload: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Parse the indices that a broadcast, or a sum of `_as_int32`, has returned."""
    xp = namespace(payload)
    packed = xp.to_bytes(payload)[: indices.packed_length(count, size)]
    return places(packed, count, size)
