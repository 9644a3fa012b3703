"""Base classes and helpers of sparsifiers with error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.core.codec import Codec, Message
from accordion_hvd.ops import indices, namespace
from accordion_hvd.ops.spec import ITEMSIZE, Spec

Chosen = tuple[Tensor, Tensor]
"""Ascending indices (int32) and the values at them."""


@dataclass(frozen=True)
class Ratio:
    """Base class with `ratio`: the fraction of a tensor's elements that a rank sends, or one."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check.ratio(self, "ratio", self.ratio)

    def kept(self, size: int) -> int:
        """Return how many of `size` elements a rank sends: rounded down, but at least one."""
        return max(1, int(self.ratio * size))


@dataclass(frozen=True)
class Sparsifier(Ratio, Compressor):
    """Base class of compressors that send a part of the elements and retain the others."""

    def init(self, spec: Spec, info: Info) -> State:
        return super().init(spec, info) | {"error": spec.zeros((spec.size,))}


class SparseCodec(Codec):
    """Base class of codecs whose messages are indices and values; other elements are zero."""

    batching = "alike"
    rows: ClassVar[bool] = True

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the message for `x` with a residual of zeros."""
        xp = namespace(x)
        zeros = xp.zeros(xp.shape(x), "float32", xp.device(x))
        return self.encode_accumulating(zeros, x, info)[0]

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Return the mean of the ranks' values, zero where no rank sent an element."""
        return mean_of([chosen for (chosen,) in messages], like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        return without(total, message[0])


def encode(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return values and their ascending indices below `size` (`ops.indices`) as bytes."""
    xp = namespace(values)
    return xp.concat([xp.to_bytes(values), xp.pack_index(index, size)])


def decode(
    payload: Tensor, size: int, wire: str = "float32", count: int | None = None
) -> tuple[Chosen, Tensor]:
    """Parse a payload of `encode`; return `(index, values)` and a check, as for `Request.decode`.

    `payload` may have rows, one from each rank. If `count` is None, the number of elements follows
    from the length of the payload; ValueError if no number fits.
    """
    xp, item = namespace(payload), ITEMSIZE[wire]
    if count is None:
        count = _count(xp.shape(payload)[0], size, item)
    index, invalid = places(payload[..., item * count :], count, size)
    values = xp.reshape(payload[..., : item * count], (-1,))
    return (index, xp.from_bytes(values, wire, (*xp.shape(payload)[:-1], count))), invalid


def places(payload: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Parse `count` ascending indices, or rows of them; ValueError if the length is wrong."""
    xp = namespace(payload)
    length = xp.shape(payload)[-1]
    if length not in (None, indices.packed_length(count, size)):  # None: unknown in a graph
        raise ValueError(f"{count} positions below {size} do not take {length} bytes")
    index = xp.unpack_index(payload, count, size)
    return index, xp.invalid_index(index, size)


def mean_of(parts: Iterable[Chosen], like: Tensor) -> Tensor:
    """Return the fp32 mean of all ranks' elements, in the shape of `like`, which it consumes."""
    xp = namespace(like)
    index, values = zip(*parts, strict=True)
    return xp.sum_sparse(index, [xp.cast(x, "float32") / len(values) for x in values], like)


def without(total: Tensor, chosen: Chosen) -> Tensor:
    """Return `total` minus the chosen values at their indices. Consumes `total`."""
    (index, values), xp = chosen, namespace(total)
    flat = xp.add_at(xp.reshape(total, (-1,)), index, -xp.cast(values, "float32"))
    return xp.reshape(flat, xp.shape(total))


def _count(length: int, size: int, item: int) -> int:
    """Return the number of elements whose payload has `length` bytes, by bisection."""
    low, high = 0, min(length // item, size)
    while low < high:
        middle = (low + high) // 2
        if item * middle + indices.packed_length(middle, size) < length:
            low = middle + 1
        else:
            high = middle
    if item * low + indices.packed_length(low, size) != length:
        raise ValueError(f"no number of elements below {size} takes {length} bytes")
    return low
