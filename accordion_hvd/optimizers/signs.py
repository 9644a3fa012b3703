"""Averages in which each number travels as one bit, both ways, with feedback of both errors.

The compressed allreduce of 1-bit Adam (Tang et al., ICML 2021), whose server is spread over the
ranks: each averages one chunk of everybody's signs and sends signs of that average to all.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accordion_hvd.base import Allgather, Alltoall, Info, Tensor
from accordion_hvd.ops import namespace

SCALES = ("l2", "l1")


@dataclass(frozen=True)
class Chunks:
    """How vectors of `size` elements are cut among `ranks`: equal chunks of whole bytes.

    Attributes:
        size: elements of a vector.
        ranks: how many take part.
    """

    size: int
    ranks: int

    @property
    def length(self) -> int:
        """Elements of a chunk, those beyond the vector's end included; a multiple of 8."""
        return 8 * math.ceil(self.size / (8 * self.ranks))

    def held(self, rank: int) -> int:
        """Elements of the vector in this rank's chunk."""
        return min(max(self.size - rank * self.length, 0), self.length)


def averaged(
    total: Tensor, server: Tensor, info: Info, scale: str = "l2"
) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor]]:
    """Average `total` over the ranks at one bit an element (the conversation's part of it).

    Each rank sends C(total) and keeps the difference; each averages what came of its chunk, adds
    `server`, sends C of that and keeps the difference. C(p) = s sgn(p) with sgn(0) = 1 and a scale
    s for each tensor, and for each chunk: |p|_2 / sqrt(d) ("l2", DeepSpeed's), or |p|_1 / d
    ("l1", least squares, and always a contraction). Elements beyond the end count nowhere.

    In a ring of n ranks a rank sends an alltoall of d / 8 bytes, an allgather of d / (8 n), and
    one scale for each.

    Args:
        total: (size,), or (number, size) for several tensors; consumed after the first `yield`.
        server: what this rank's chunk owes, (length,) or (number, length) of `Chunks`.
        info: rank and number of ranks.
        scale: "l2" or "l1".

    Returns:
        What all ranks have then, like `total`; what this rank's total lacks of it, likewise; what
        its chunk owes now.
    """
    xp, shape = namespace(total), xp_shape(total)
    chunks = Chunks(shape[-1], info.size)
    steps = _steps(total, chunks.size, scale)
    signs = xp.pack_signs(total)
    sent = _cut(xp, signs, total, chunks)
    theirs, factors = yield Alltoall(sent), Allgather(steps)
    factors = [factor / info.size for factor in factors]
    error = _minus(xp, total, signs, steps, chunks.size)
    mine = _values(xp, xp.unstack(theirs), factors, chunks.length, xp_shape(server), server)
    mine = _within(xp, mine + server, chunks.held(info.rank))
    steps = _steps(mine, max(chunks.held(info.rank), 1), scale)
    signs = xp.pack_signs(mine)
    parts, factors = yield Allgather(signs), Allgather(steps)
    server = _within(xp, _minus(xp, mine, signs, steps, chunks.length), chunks.held(info.rank))
    return _joined(xp, parts, factors, chunks, error), error, server


def xp_shape(x: Tensor) -> tuple[int, ...]:
    """The static shape."""
    return namespace(x).shape(x)


def _steps(x: Tensor, count: int, scale: str) -> Tensor:
    """For each row of `x` twice its scale, the distance of its two values; of `count` elements."""
    return norms(x, scale) * (2 / (math.sqrt(count) if scale == "l2" else count))


def norms(x: Tensor, kind: str) -> Tensor:
    """Of each row of `x` (or of the vector) the "l1" or "l2" norm, as a vector."""
    xp, width = namespace(x), xp_shape(x)[-1]
    if xp.dtype(x) != "float64":
        return xp.bucket_norms(x, width, kind)
    rows = xp.reshape(x, (-1, 1, width))
    if kind == "l1":
        rows = xp.maximum(rows, -rows)
        return xp.reshape(rows @ xp.full((width, 1), 1.0, "float64", xp.device(x)), (-1,))
    return xp.reshape(rows @ xp.transpose(rows), (-1,)) ** 0.5


def _cut(xp: ModuleType, signs: Tensor, total: Tensor, chunks: Chunks) -> Tensor:
    """Packed signs as (ranks, bytes): what goes to whom."""
    number = math.prod(xp_shape(total)[:-1])
    width = chunks.ranks * chunks.length
    if number > 1 and chunks.size % 8:  # a tensor's signs end within a byte
        signs = xp.pack_signs(xp.padded(total, width))
    rows = xp.padded(xp.reshape(signs, (number, -1)), width // 8)
    rows = xp.reshape(rows, (number, chunks.ranks, chunks.length // 8))
    return xp.reshape(xp.swapped(rows), (chunks.ranks, -1))


def _joined(
    xp: ModuleType, parts: Sequence[Tensor], steps: Sequence[Tensor], chunks: Chunks, like: Tensor
) -> Tensor:
    """The vectors whose chunks' signs and steps came from the ranks."""
    shape = xp_shape(like)
    number, width = math.prod(shape[:-1]), chunks.ranks * chunks.length
    rows = xp.reshape(xp.concat(list(parts)), (chunks.ranks, number, -1))
    signs = xp.reshape(xp.swapped(rows), (-1,))
    factors = xp.reshape(xp.transpose(xp.stack(list(steps))), (-1,))
    whole = _values(xp, [signs], [factors], chunks.length, (number, width), like)
    return xp.reshape(whole[:, : chunks.size], shape)


def _values(
    xp: ModuleType,
    parts: Sequence[Tensor],
    steps: Sequence[Tensor],
    bucket: int,
    shape: Sequence[int],
    like: Tensor,
) -> Tensor:
    """The sum of signs times half their steps; in the dtype of `like`, which is not consumed."""
    if xp.dtype(like) != "float64":
        room = xp.zeros(shape, "float32", xp.device(like))
        return xp.sum_quantized(parts, steps, bucket, 1, 0.5, room)
    count, total = math.prod(shape), 0.0
    for packed, step in zip(parts, steps, strict=True):
        codes = xp.reshape(xp.cast(xp.unpack_bits(packed, 1, count), "float64"), (-1, bucket))
        total = total + (codes - 0.5) * xp.reshape(step, (-1, 1))
    return xp.reshape(total, shape)


def _minus(xp: ModuleType, x: Tensor, signs: Tensor, steps: Tensor, bucket: int) -> Tensor:
    """`x` without what its signs and steps stand for. Consumes `x`."""
    if xp.dtype(x) != "float64":
        return xp.subtract_quantized(x, signs, steps, bucket, 1, 0.5)
    return x - _values(xp, [signs], [steps], bucket, xp_shape(x), x)


def _within(xp: ModuleType, x: Tensor, held: int) -> Tensor:
    """`x` with zeros behind the first `held` elements of each row."""
    width = xp_shape(x)[-1]
    return x if held == width else xp.padded(x[..., :held], width)
