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
    """Send a random choice of elements, the same on all ranks, keep the rest for later.

    The choice is a function of (step, bucket), so no index travels and the values can be added
    on the way. It is stratified (ours, not the paper's): the vector is cut into k equal strata,
    turned by a random offset, and one element is drawn from each, which costs O(k), never draws
    twice and gives every element the same chance.

    Sent: an allreduce of 4 k bytes.

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; at least one element is.
    """

    batching: ClassVar[str] = "alike"
    summed: ClassVar[bool] = True
    contractive: ClassVar[bool] = True

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the chosen values."""
        return self._chosen(x, info)[:1]

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Positions stay with the message, so that they are drawn once."""
        total = namespace(error).accumulate(error, x)
        return self._chosen(total, info), total

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Zeros but for the choice."""
        index = self._index(messages[0], like, info)
        return mean_of([(index, message[0]) for message in messages], like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """At the chosen positions alone."""
        return without(total, (self._index(message, total, info), message[0]))

    def _chosen(self, x: Tensor, info: Info) -> Message:
        xp, index = namespace(x), self._choice(x, info)
        return xp.take(xp.reshape(x, (-1,)), index), index

    def _index(self, message: Message, like: Tensor, info: Info) -> Tensor:
        return message[1] if len(message) > 1 else self._choice(like, info)

    def _choice(self, x: Tensor, info: Info) -> Tensor:
        """Distinct positions (int32) in each row of `x`, one from each of equal strata."""
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
        turn = xp.cast(draws[:, count:] * float(size), "int64")
        index = (first + xp.minimum(within, width - 1) + turn) % size
        row = xp.reshape(xp.arange(rows, device), (rows, 1))
        return xp.cast(xp.reshape(index + row * size, (-1,)), "int32")
