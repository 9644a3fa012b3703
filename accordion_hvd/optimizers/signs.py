"""Compressed allreduce with one or two bits an element, with error feedback in both directions.

This is the compressed allreduce of 1-bit Adam (Tang et al., ICML 2021). Its server is distributed
over the ranks: each rank averages one chunk of all ranks' signs and sends the signs of the average
to all.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Allgather, Alltoall, Info, State, Tensor
from accordion_hvd.ops import namespace

SCALES = ("l2", "l1")

BOUND = 1.2
"""Threshold of large magnitudes, as a multiple of the mean magnitude (optimal for normally
distributed elements: 1.23)."""


@dataclass(frozen=True)
class Chunks:
    """The division of vectors of `size` elements: equal chunks, whose signs fill whole bytes."""

    size: int
    ranks: int

    @property
    def length(self) -> int:
        """Number of elements of a chunk, padding included; a multiple of 8."""
        return 8 * math.ceil(self.size / (8 * self.ranks))

    def held(self, rank: int) -> int:
        """Return the number of elements in a rank's chunk, without padding."""
        return min(max(self.size - rank * self.length, 0), self.length)


def chunk(x: Tensor, info: Info) -> Tensor:
    """Return this rank's chunk of vectors that are equal on all ranks, padded with zeros."""
    xp = namespace(x)
    chunks = Chunks(xp.shape(x)[-1], info.size)
    start = info.rank * chunks.length
    padded = xp.pad_last(x, info.size * chunks.length)
    return padded[..., start : start + chunks.length]


def check_bits(owner: Any, bits: Any) -> None:
    if not check.is_number(bits) or not 0.1 <= bits <= 2:
        check.refuse(owner, "bits", bits, "a number in [0.1, 2]")


def speaks(bits: float, step: int) -> bool:
    """Return whether this exchange sends anything; with fractional `bits` some exchanges do not."""
    fraction = Fraction(bits).limit_denominator(1000) / math.ceil(bits)
    return math.ceil((step + 1) * fraction) > math.ceil(step * fraction)


def averaged(
    total: Tensor, server: Tensor, info: Info, scale: str = "l2", room: Tensor = None, bits: int = 1
) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor]]:
    """Average `total` over the ranks at one or two bits an element, as part of an exchange.

    Each rank sends C(total) and stores the residual total - C(total). Each rank then averages the
    received parts of its chunk, adds `server`, sends C of the sum to all ranks and stores the
    residual. C(p) = s sgn(p) with sgn(0) = 1 and one scale s for each tensor or chunk p of d
    elements: s = |p|_2 / sqrt(d) ("l2", as in DeepSpeed), or s = |p|_1 / d ("l1", least squares;
    always a contraction). Padding does not count.

    With two bits an element, there are two magnitudes: the mean of those above `BOUND` times the
    mean magnitude, and the mean of the others. C is then a contraction, whatever the `scale`.

    In a ring of n ranks a rank sends, times `bits`, an alltoall of d / 8 bytes, an allgather of
    d / (8 n), and one scale for each.

    Args:
        total: (size,), or (tensors, size) for several tensors; consumed after the first `yield`.
        server: residual of this rank's chunk, (length,) or (tensors, length) of `Chunks`.
        info: rank and number of ranks.
        scale: "l2" or "l1".
        room: memory like `total` that may hold the result; consumed after the first `yield`.
        bits: bits an element, 1 or 2.

    Returns:
        The average, equal on all ranks, like `total`; this rank's residual, like `total`; the new
        residual of its chunk, like `server`.
    """
    xp, shape = namespace(total), namespace(total).shape(total)
    chunks = Chunks(shape[-1], info.size)
    signs, steps, vectors = _coded(total, chunks.size, scale, bits)
    sent = [_cut(xp, *both, chunks) for both in zip(signs, vectors, strict=True)]
    received, factors = yield Alltoall(xp.concat(sent, 1)), Allgather(xp.concat(steps))
    error = _minus(xp, total, signs, steps, chunks.size)
    parts = xp.unstack(xp.reshape(received, (info.size * bits, -1)))
    factors = xp.unstack(xp.reshape(xp.concat(list(factors)), (len(parts), -1)))
    factors = [factor / info.size for factor in factors]
    mine = _values(xp, parts, factors, chunks.length, xp.shape(server), server)
    held = chunks.held(info.rank)
    mine = _within(xp, mine + server, held)
    signs, steps, _ = _coded(mine, max(held, 1), scale, bits)
    parts, factors = yield Allgather(xp.concat(signs)), Allgather(xp.concat(steps))
    server = _within(xp, _minus(xp, mine, signs, steps, chunks.length), held)
    return _joined(xp, parts, factors, chunks, error, room), error, server


def _coded(
    x: Tensor, count: int, scale: str, bits: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Encode rows `x`, whose first `count` elements are data and whose others are zeros (padding).

    A code stands for the sum of signs times half their steps: s A with one bit, s A + s' B with
    two. Here s' = s for large elements and -s for the others, so that A + B and A - B are the two
    magnitudes.

    Returns:
        Packed signs; steps, one for each row of `x`; the vectors with these signs.
    """
    xp, signs = namespace(x), [namespace(x).pack_signs(x)]
    if bits == 1:
        return signs, [norms(x, scale) * (2 / (math.sqrt(count) if scale == "l2" else count))], [x]
    width, steps = xp.shape(x)[-1], norms(x, "l1") * (2 / count)
    delta = _minus(xp, xp.copy(x), signs, [steps * BOUND], width)
    signs.append(xp.pack_signs(delta))
    ones = xp.full(xp.shape(steps), 1.0, xp.dtype(steps), xp.device(steps))
    large = norms(_values(xp, signs, [ones, ones], width, xp.shape(x), x), "l1")  # their number
    total, difference = norms(x, "l1"), norms(delta, "l1")
    # The sum of the large magnitudes minus the sum of the others:
    difference = difference + steps * (BOUND / 2) * (2 * large - width)
    high = (total + difference) / (2 * xp.maximum(large, ones))
    low = (total - difference) / (2 * xp.maximum(count - large, ones))
    return signs, [high + low, high - low], [x, delta]


def norms(x: Tensor, kind: str) -> Tensor:
    """Return the "l1", "l2" or "max" norm of each row of `x` (or of the vector), as a vector."""
    xp = namespace(x)
    width = xp.shape(x)[-1]
    if xp.dtype(x) != "float64":
        return xp.bucket_norms(x, width, kind)
    rows = xp.reshape(x, (-1, 1, width))
    if kind == "l2":
        return xp.reshape(rows @ xp.transpose(rows), (-1,)) ** 0.5
    rows = xp.maximum(rows, -rows)
    if kind == "max":
        return xp.stack([xp.maximum_of([xp.reshape(row, (-1,))]) for row in xp.unstack(rows)])
    return xp.reshape(rows @ xp.full((width, 1), 1.0, "float64", xp.device(x)), (-1,))


def _cut(xp: ModuleType, signs: Tensor, total: Tensor, chunks: Chunks) -> Tensor:
    """Return packed signs as (ranks, bytes): one row for each receiver."""
    number = math.prod(xp.shape(total)[:-1])
    width = chunks.ranks * chunks.length
    if number > 1 and chunks.size % 8:  # a tensor's signs end within a byte
        signs = xp.pack_signs(xp.pad_last(total, width))
    rows = xp.pad_last(xp.reshape(signs, (number, -1)), width // 8)
    rows = xp.reshape(rows, (number, chunks.ranks, chunks.length // 8))
    return xp.reshape(xp.swap_leading(rows), (chunks.ranks, -1))


def _joined(
    xp: ModuleType,
    parts: Sequence[Tensor],
    steps: Sequence[Tensor],
    chunks: Chunks,
    like: Tensor,
    room: Tensor,
) -> Tensor:
    """Decode vectors from the signs and steps of their chunks; `room` as in `averaged`."""
    shape = xp.shape(like)
    tensors, width = math.prod(shape[:-1]), chunks.ranks * chunks.length
    vectors = xp.shape(steps[0])[0]  # tensors times bits
    rows = xp.reshape(xp.concat(list(parts)), (chunks.ranks, vectors, -1))
    signs = xp.unstack(xp.reshape(xp.swap_leading(rows), (vectors // tensors, -1)))
    factors = xp.transpose(xp.stack(list(steps)))
    factors = xp.unstack(xp.reshape(factors, (vectors // tensors, -1)))
    if tensors == 1 and room is not None and xp.dtype(room) == "float32":
        return xp.sum_quantized(signs, factors, chunks.length, 1, 0.5, room)
    values = _values(xp, signs, factors, chunks.length, (tensors, width), like)
    return xp.reshape(values[:, : chunks.size], shape)


def _values(
    xp: ModuleType,
    parts: Sequence[Tensor],
    steps: Sequence[Tensor],
    bucket: int,
    shape: Sequence[int],
    like: Tensor,
) -> Tensor:
    """Return the sum of signs times half their steps, in the dtype of `like` (not consumed)."""
    if xp.dtype(like) != "float64":
        room = xp.zeros(shape, "float32", xp.device(like))
        return xp.sum_quantized(parts, steps, bucket, 1, 0.5, room)
    count, total = math.prod(shape), 0.0
    for packed, step in zip(parts, steps, strict=True):
        codes = xp.reshape(xp.cast(xp.unpack_bits(packed, 1, count), "float64"), (-1, bucket))
        total = total + (codes - 0.5) * xp.reshape(step, (-1, 1))
    return xp.reshape(total, shape)


def _minus(
    xp: ModuleType, x: Tensor, signs: Sequence[Tensor], steps: Sequence[Tensor], bucket: int
) -> Tensor:
    """Return `x` minus the values of these signs and steps. Consumes `x`."""
    if xp.dtype(x) == "float64":
        return x - _values(xp, signs, steps, bucket, xp.shape(x), x)
    for packed, step in zip(signs, steps, strict=True):
        x = xp.subtract_quantized(x, packed, step, bucket, 1, 0.5)
    return x


def _within(xp: ModuleType, x: Tensor, held: int) -> Tensor:
    """Return `x` with zeros after the first `held` elements of each row."""
    width = xp.shape(x)[-1]
    return x if held == width else xp.pad_last(x[..., :held], width)


def joint_residual(states: Sequence[State], size: int) -> Tensor:
    """Return the mean of the ranks' residuals plus the residuals of all chunks (NumPy)."""
    workers = sum(state["error"] for state in states) / len(states)
    server = namespace(workers).concat([state["server"] for state in states])
    return workers + server[:size]


def advanced(count: Tensor) -> Tensor:
    """Return the counts after an update of the first moment only."""
    xp = namespace(count)
    return count + xp.cast(1 - xp.arange(2, xp.device(count)), "float64")
