"""Random-k sparsification with error feedback (Stich, Cordonnier & Jaggi, NeurIPS 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from accordion_hvd.compressors.sparsifier import Sparsifier
from accordion_hvd.core.base import Allreduce, Conversation, Info, State, Tensor
from accordion_hvd.ops import namespace, random


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Send a random choice of elements, the same on all ranks, keep the rest for later.

    The choice is a function of (step, bucket), so no index travels and the values can be added
    on the way. It is stratified (ours, not the paper's): the vector is cut into k equal strata,
    turned by a random offset, and one element is drawn from each, which costs O(k), never draws
    twice and gives every element the same chance.

    Sent: an allreduce of 4 k bytes.

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; at least one element is.
    """

    stacks: ClassVar[str] = "alike"
    contracts: ClassVar[bool] = True

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allreduce of the chosen values."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        total = xp.accumulate(state["error"], xp.reshape(grad, shape))
        index = _choice(xp, shape, self.kept(shape[-1]), info, xp.device(grad))
        total = xp.reshape(total, (-1,))
        values = xp.take(total, index)
        error = xp.clear(total, index)
        values = yield Allreduce(values, reuse=True)
        mean = xp.add_at(xp.reshape(xp.emptied(grad), (-1,)), index, values)
        return xp.reshape(mean, xp.shape(grad)), {"error": xp.reshape(error, shape)}


def _choice(xp: ModuleType, shape: tuple[int, ...], count: int, info: Info, device: Any) -> Tensor:
    """`count` distinct indices (int32) in each row, one from each of `count` equal strata."""
    size, rows = shape[-1], math.prod(shape[:-1])
    seed = random.key("randomk", info.name, info.step)
    draws = random.uniform(xp, rows * (count + 1), seed, device)
    draws = xp.reshape(draws, (rows, count + 1))
    strata = xp.arange(count, device)
    first = strata * size // count
    width = (strata + 1) * size // count - first
    within = xp.cast(draws[:, :count] * xp.cast(width, "float32"), "int64")
    turn = xp.cast(draws[:, count:] * float(size), "int64")
    index = (first + xp.minimum(within, width - 1) + turn) % size
    row = xp.reshape(xp.arange(rows, device), (rows, 1))
    return xp.cast(xp.reshape(index + row * size, (-1,)), "int32")
