"""Averages in which each number travels as one bit or two, both ways, with feedback of errors.

The compressed allreduce of 1-bit Adam (Tang et al., ICML 2021), whose server is spread over the
ranks: each averages one chunk of everybody's signs and sends signs of that average to all.
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
"""In units of the mean magnitude: what is large; 1.23 would be best for normal numbers."""


@dataclass(frozen=True)
class Chunks:
    """The division of vectors of `size` elements among `ranks`: equal chunks of whole bytes.

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


def chunk(x: Tensor, info: Info) -> Tensor:
    """Return this rank's chunk of vectors that all ranks have; zeros complete the last one."""
    xp = namespace(x)
    chunks = Chunks(xp.shape(x)[-1], info.size)
    start = info.rank * chunks.length
    whole = xp.pad_last(x, info.size * chunks.length)
    return whole[..., start : start + chunks.length]


def check_bits(owner: Any, bits: Any) -> None:
    """Refuse what `speaks` cannot go by. Raises: ValueError."""
    if not check.is_number(bits) or not 0.1 <= bits <= 2:
        check.refuse(owner, "bits", bits, "a number in [0.1, 2]")


def speaks(bits: float, step: int) -> bool:
    """Return whether this exchange sends bits; fractions of `bits` skip exchanges."""
    part = Fraction(bits).limit_denominator(1000) / math.ceil(bits)
    return math.ceil((step + 1) * part) > math.ceil(step * part)


def averaged(
    total: Tensor,
    server: Tensor,
    info: Info,
    scale: str = "l2",
    room: Tensor = None,
    bits: int = 1,
) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor]]:
    """Average `total` over the ranks at one or two bits an element (the conversation's part of it).

    Each rank sends C(total) and keeps the difference; each averages what came of its chunk, adds
    `server`, sends C of that and keeps the difference. C(p) = s sgn(p) with sgn(0) = 1 and a scale
    s for each tensor, and for each chunk: |p|_2 / sqrt(d) ("l2", DeepSpeed's), or |p|_1 / d
    ("l1", least squares, and always a contraction). Elements beyond the end count nowhere.

    With two bits an element magnitudes have two values, the means of those above and of those not
    above `BOUND` times the mean of all: whatever the `scale`, C is a contraction then.

    In a ring of n ranks a rank sends, times `bits`, an alltoall of d / 8 bytes, an allgather of
    d / (8 n), and one scale for each.

    Args:
        total: (size,), or (tensors, size) for several; consumed after the first `yield`.
        server: the residual of this rank's chunk, (length,) or (tensors, length) of `Chunks`.
        info: rank and number of ranks.
        scale: "l2" or "l1".
        room: like `total`; memory that may hold the result, consumed after the first `yield`.
        bits: of an element, 1 or 2.

    Returns:
        What all ranks have then, like `total`; what this rank's total lacks of it, likewise; what
        its chunk owes now.
    """
    xp, shape = namespace(total), namespace(total).shape(total)
    chunks = Chunks(shape[-1], info.size)
    signs, steps, vectors = _coded(total, chunks.size, scale, bits)
    sent = [_cut(xp, *both, chunks) for both in zip(signs, vectors, strict=True)]
    theirs, factors = yield Alltoall(xp.concat(sent, 1)), Allgather(xp.concat(steps))
    error = _minus(xp, total, signs, steps, chunks.size)
    parts = xp.unstack(xp.reshape(theirs, (info.size * bits, -1)))
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
    """Encode `x`, of which `count` elements are no padding (zeros).

    The sum of signs times half their steps: s A, and with two bits s A + s' B, where s' is s for
    what is large and -s for the rest, so that A + B and A - B are magnitudes.

    Returns:
        Signs, packed; steps for each row of `x`; the vectors that have these signs.
    """
    xp, signs = namespace(x), [namespace(x).pack_signs(x)]
    if bits == 1:
        return signs, [norms(x, scale) * (2 / (math.sqrt(count) if scale == "l2" else count))], [x]
    width, steps = xp.shape(x)[-1], norms(x, "l1") * (2 / count)
    rest = _minus(xp, xp.copy(x), signs, [steps * BOUND], width)
    signs.append(xp.pack_signs(rest))
    one = xp.full(xp.shape(steps), 1.0, xp.dtype(steps), xp.device(steps))
    large = norms(_values(xp, signs, [one, one], width, xp.shape(x), x), "l1")  # how many are
    whole, apart = norms(x, "l1"), norms(rest, "l1")
    apart = apart + steps * (BOUND / 2) * (2 * large - width)  # sum of the large less the others
    high = (whole + apart) / (2 * xp.maximum(large, one))
    low = (whole - apart) / (2 * xp.maximum(count - large, one))
    return signs, [high + low, high - low], [x, rest]


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
    """Packed signs as (ranks, bytes): what goes to whom."""
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
    """Join vectors from their chunks' signs and steps; `room` as in `averaged`."""
    shape = xp.shape(like)
    tensors, width = math.prod(shape[:-1]), chunks.ranks * chunks.length
    vectors = xp.shape(steps[0])[0]  # of each tensor as many as an element has bits
    rows = xp.reshape(xp.concat(list(parts)), (chunks.ranks, vectors, -1))
    signs = xp.unstack(xp.reshape(xp.swap_leading(rows), (vectors // tensors, -1)))
    factors = xp.transpose(xp.stack(list(steps)))
    factors = xp.unstack(xp.reshape(factors, (vectors // tensors, -1)))
    if tensors == 1 and room is not None and xp.dtype(room) == "float32":
        return xp.sum_quantized(signs, factors, chunks.length, 1, 0.5, room)
    whole = _values(xp, signs, factors, chunks.length, (tensors, width), like)
    return xp.reshape(whole[:, : chunks.size], shape)


def _values(
    xp: ModuleType,
    parts: Sequence[Tensor],
    steps: Sequence[Tensor],
    bucket: int,
    shape: Sequence[int],
    like: Tensor,
) -> Tensor:
    """Add up signs times half their steps; in the dtype of `like`, which is not consumed."""
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
    """`x` without what its signs and steps stand for. Consumes `x`."""
    if xp.dtype(x) == "float64":
        return x - _values(xp, signs, steps, bucket, xp.shape(x), x)
    for packed, step in zip(signs, steps, strict=True):
        x = xp.subtract_quantized(x, packed, step, bucket, 1, 0.5)
    return x


def _within(xp: ModuleType, x: Tensor, held: int) -> Tensor:
    """`x` with zeros behind the first `held` elements of each row."""
    width = xp.shape(x)[-1]
    return x if held == width else xp.pad_last(x[..., :held], width)


def joint_residual(states: Sequence[State], size: int) -> Tensor:
    """Return the residuals of all ranks: the worker errors' mean and server errors (NumPy)."""
    workers = sum(state["error"] for state in states) / len(states)
    server = namespace(workers).concat([state["server"] for state in states])
    return workers + server[:size]


def advanced(count: Tensor) -> Tensor:
    """Count one more update of the first moment, none of the second."""
    xp = namespace(count)
    return count + xp.cast(1 - xp.arange(2, xp.device(count)), "float64")
