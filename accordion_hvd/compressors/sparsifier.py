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
"""Ascending positions (int32), and the values there."""


@dataclass(frozen=True)
class Ratio:
    """The part of a tensor's elements that is sent.

    Args:
        ratio: in (0, 1]; at least one element is sent.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        """Raises: ValueError when ratio is outside (0, 1]."""
        check.ratio(self, "ratio", self.ratio)

    def kept(self, size: int) -> int:
        """Return how many of `size` elements are sent: rounded down, but at least one."""
        return max(1, int(self.ratio * size))


@dataclass(frozen=True)
class Sparsifier(Ratio, Compressor):
    """Sends a part of a tensor's elements and keeps the rest for later."""

    def init(self, spec: Spec, info: Info) -> State:
        """`error`: what was not sent yet, a vector with the gradient's elements."""
        return super().init(spec, info) | {"error": spec.zeros((spec.size,))}


class SparseCodec(Codec):
    """Parses messages as positions and values; what is elsewhere is zero."""

    batching: ClassVar[str] = "alike"

    def encode(self, x: Tensor, info: Info) -> Message:
        """Encode with an error of zeros."""
        xp = namespace(x)
        zeros = xp.zeros(xp.shape(x), "float32", xp.device(x))
        return self.encode_accumulating(zeros, x, info)[0]

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Zeros where no rank has sent anything."""
        return mean_of([chosen for (chosen,) in messages], like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """At the positions alone."""
        return without(total, message[0])


def encode(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Values, and their ascending positions below `size` (`ops.indices`), as bytes."""
    xp = namespace(values)
    return xp.concat([xp.to_bytes(values), xp.pack_index(index, size)])


def decode(
    payload: Tensor, size: int, wire: str = "float32", count: int | None = None
) -> tuple[Chosen, Tensor]:
    """Invert `encode`, in the form that a `Request` wants.

    Args:
        payload: what `encode` has returned on some rank.
        size: below which positions are.
        wire: the dtype of the values.
        count: how many there are; None: as many as make a payload of this length.

    Raises:
        ValueError: there is no such payload.
    """
    xp, item = namespace(payload), ITEMSIZE[wire]
    if count is None:
        count = _count(xp.shape(payload)[0], size, item)
    values = xp.from_bytes(payload[: item * count], wire, (count,))
    index, doubt = places(payload[item * count :], count, size)
    return (index, values), doubt


def places(payload: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """`count` ascending positions below `size`, of `ops.pack_index`, as a `Request` wants it."""
    xp = namespace(payload)
    index = xp.unpack_index(payload, count, size)
    return index, xp.invalid_index(index, size)


def mean_of(parts: Iterable[Chosen], like: Tensor) -> Tensor:
    """Return the mean of all ranks' chosen elements, fp32; consumes `like`, whose shape it has."""
    xp, sent = namespace(like), list(parts)
    shape, mean = xp.shape(like), xp.reshape(xp.zeros_reusing(like), (-1,))
    for index, values in sent:
        mean = xp.add_at(mean, index, xp.cast(values, "float32") / len(sent))
    return xp.reshape(mean, shape)


def without(total: Tensor, chosen: Chosen) -> Tensor:
    """`total` without what was chosen of it. Consumes `total`."""
    (index, values), xp = chosen, namespace(total)
    flat = xp.add_at(xp.reshape(total, (-1,)), index, -xp.cast(values, "float32"))
    return xp.reshape(flat, xp.shape(total))


def _count(length: int, size: int, item: int) -> int:
    """Return the number of elements that take `length` bytes, which grow with it."""
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
