"""Random-k sparsification with error feedback (Stich, Cordonnier & Jaggi, NeurIPS 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.compressors.sparsifier import Ratio, mean_of, without
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Codec, Message
from accordion_hvd.ops import namespace, random


@dataclass(frozen=True)
class RandomK(Ratio, Codec):
    """Random-k sparsification with error feedback: send k random elements, the same on all ranks.

    All ranks draw the same indices from the step and the bucket's name, so they send no indices
    and one allreduce averages the values. The other elements stay in the residual and are added to
    the next gradient.

    The draw is stratified (ours, not the paper's): the vector is split into k equal strata, shifted
    by a random offset, and one element is drawn from each stratum. A draw takes O(k) time, never
    repeats an element, and gives every element the same probability.

    Args:
        ratio: fraction of the elements to send, in (0, 1]; at least one element is sent. Default:
            0.01.

    Traffic: an allreduce of 4 k bytes, which does not grow with the number of ranks.
    """

    summary = "RandomK(0.01)", "0.04 n m", "many ranks, small learning rates"
    batching = "alike"
    summed: ClassVar[bool] = True
    contractive: ClassVar[bool] = True

    def encode(self, x: Tensor, info: Info) -> Message:
        return self._draw(x, info)[:1]

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return the drawn values with their indices, and the sum.

        The indices stay with the message on this rank, so that they are drawn only once.
        """
        total = namespace(error).accumulate(error, x)
        return self._draw(total, info), total

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        index = self._index(messages[0], like, info)
        return mean_of([(index, message[0]) for message in messages], like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        return without(total, (self._index(message, total, info), message[0]))

    def _draw(self, x: Tensor, info: Info) -> Message:
        xp, index = namespace(x), self._draw_index(x, info)
        return xp.take(xp.reshape(x, (-1,)), index), index

    def _index(self, message: Message, like: Tensor, info: Info) -> Tensor:
        return message[1] if len(message) > 1 else self._draw_index(like, info)

    def _draw_index(self, x: Tensor, info: Info) -> Tensor:
        """Return distinct indices (int32) in each row of `x`, one from each of equal strata."""
        xp, shape = namespace(x), namespace(x).shape(x)
        device, count = xp.device(x), self.kept(shape[-1])
        size, rows = shape[-1], math.prod(shape[:-1])
        seed = random.key("randomk", info.name, info.step)
        draws = random.uniform(xp, rows * (count + 1), seed, device)
        draws = xp.reshape(draws, (rows, count + 1))
        strata = xp.arange(count, device)
        first = strata * size // count
        width = (strata + 1) * size // count - first
        within = xp.cast(draws[:, :count] * xp.cast(width, "float32"), "int64")
        offset = xp.cast(draws[:, count:] * float(size), "int64")
        index = (first + xp.minimum(within, width - 1) + offset) % size
        row = xp.reshape(xp.arange(rows, device), (rows, 1))
        return xp.cast(xp.reshape(index + row * size, (-1,)), "int32")
