"""Quantization on a CPU, in blocks whose intermediate results stay in the cache.

QSGD, TernGrad, 8-bit blocks and scaled signs share one grid of values, `(code - middle) * step`,
with one step per bucket. Codes of 1 to 8 bits are packed in sections of 8, 4, 2 and 1 bits (7 is
4 + 2 + 1), lowest bits first within a section and within a byte, so that a few operations on
machine words pack and unpack them.

Stochastic rounding takes its random numbers from windows of one table; a hash of (seed, window)
selects the position in the table. A random number thus costs one load and one addition, and is the
same in every framework. The table holds each multiple of 2^-16 (plus half of that) equally often.
Over seeds, the number at every position is therefore exactly uniform on that grid, and the bias of
rounding is at most 2^-17 of a step. Rounding to bfloat16 takes the 16-bit numbers themselves, so it
has no bias.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from accordion_hvd.ops import backend, random
from accordion_hvd.ops.journal import consume, room

BLOCK = 1 << 16  # elements processed at once; a multiple of WINDOW
WINDOW = 1 << 14  # consecutive elements with consecutive random numbers from the table
TABLE = 1 << 18
SHRINK = 1 - 2**-22  # keeps rounding from pushing the largest value beyond the last code
LEAST = 2.0**-120  # smallest step; buckets with smaller ones quantize to zero
SMALLEST = 2.0**-126  # smallest normal fp32 number


def middle(bits: int) -> float:
    """Return the code of zero for `bits` bits: 0.5 for one bit, whose values are -1 and 1."""
    return (2**bits - 1) // 2 if bits > 1 else 0.5


# ------------------------------------------------------------------------------------------ codes
def sections(bits: int) -> list[int]:
    """Return the widths of the sections of codes, lowest bits first."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_length(count: int, bits: int) -> int:
    """Return the bytes that `count` codes take."""
    return sum(-(-count * width // 8) for width in sections(bits))


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes (uint8, below 2^bits) of 1 to 8 bits."""
    codes = np.ascontiguousarray(codes).reshape(-1)
    packed = np.empty(packed_length(codes.size, bits), np.uint8)
    for start, block in _blocks(codes):
        _pack_block(block, bits, packed, start, codes.size)
    return packed


def unpack_bits(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Invert `pack_bits`."""
    codes = np.empty(count, np.uint8)
    for start, block in _blocks(codes):
        block[:] = _unpack_block(packed, bits, start, block.size, count)
    return codes


def _pack_block(codes: np.ndarray, bits: int, packed: np.ndarray, start: int, count: int) -> None:
    """Pack the codes at `start` of `count` to their position in `packed`."""
    offset, remaining = 0, bits
    for width in sections(bits):
        remaining -= width
        low = codes & (2**width - 1) if remaining else codes
        first = offset + start * width // 8
        packed[first : first + -(-codes.size * width // 8)] = _pack_width(low, width)
        offset += -(-count * width // 8)
        if remaining:
            codes = codes >> width


def _pack_width(codes: np.ndarray, width: int) -> np.ndarray:
    if width == 8:
        return codes
    if width == 1:
        return np.packbits(codes, bitorder="little")
    per = 8 // width
    if codes.size % per:
        codes = np.concatenate([codes, np.zeros(-codes.size % per, np.uint8)])
    words = codes.view(f"<u{per}")
    words = words | words >> (8 - width)
    if per == 4:
        words |= words >> 2 * (8 - width)
    return words.astype(np.uint8)  # the lowest byte


def _unpack_block(packed: np.ndarray, bits: int, start: int, size: int, count: int) -> np.ndarray:
    """Return codes start, ..., start + size - 1 of `count`."""
    codes, offset, shift = None, 0, 0
    for width in sections(bits):
        first = offset + start * width // 8
        part = _unpack_width(packed[first : first + -(-size * width // 8)], width)[:size]
        codes = part if codes is None else codes | part << shift
        offset += -(-count * width // 8)
        shift += width
    assert codes is not None
    return codes


def _unpack_width(packed: np.ndarray, width: int) -> np.ndarray:
    if width == 8:
        return packed
    if width == 1:
        return np.unpackbits(packed, bitorder="little")
    words = packed.astype(f"<u{8 // width}")
    if width == 2:
        words |= words << 12
        words &= 0x000F000F
    words |= words << (8 - width)
    words &= 0x0F0F if width == 4 else 0x03030303
    return words.view(np.uint8)


# ------------------------------------------------------------------------------------------ grids
def bucket_norms(x: np.ndarray, bucket: int, kind: str) -> np.ndarray:
    """Return the "max", "l1" or "l2" norm of each `bucket` elements of `x`; fp32.

    With `kind` "mean", the l1 norm divided by `bucket`, which overflows only if an element does.
    The norm of a bucket with a non-finite element is not finite.
    """
    x = _flat(x)
    norms = np.zeros(-(-x.size // bucket), np.float32 if kind == "max" else np.float64)
    for start, block in _blocks(x):
        starts = np.arange(-start % bucket, block.size, bucket)
        if start % bucket:
            starts = np.concatenate([[0], starts])
        if kind == "l2":
            values = np.multiply(block, block, dtype=np.float64)
        else:
            values = np.abs(block, out=_scratch.values[: block.size])
        target = norms[start // bucket : start // bucket + starts.size]
        combine = np.maximum if kind == "max" else np.add
        with np.errstate(over="ignore"):
            parts = combine.reduceat(values, starts)
        if values.dtype == np.float32 and not np.isfinite(parts).all():  # an fp32 sum overflowed
            parts = combine.reduceat(values.astype(np.float64), starts)
        combine(target, parts, out=target)
    if kind == "mean":
        norms = np.divide(norms, bucket)
    with np.errstate(over="ignore"):
        return (np.sqrt(norms) if kind == "l2" else norms).astype(np.float32)


def quantize(
    x: np.ndarray, steps: np.ndarray, bucket: int, bits: int, seed: int | None = None
) -> np.ndarray:
    """Round x / step to the grid, stochastically or to nearest; return packed codes.

    Args:
        x: tensor of any shape.
        steps: distance between grid points, for each `bucket` elements; magnitudes of `x` are at
            most `middle(bits)` steps.
        bucket: number of elements that share a step.
        bits: bits per code, 1 to 8.
        seed: from `random.key`; None rounds to nearest.
    """
    x = _flat(x)
    packed = np.empty(packed_length(x.size, bits), np.uint8)
    codes = _scratch.codes
    with np.errstate(all="ignore"):
        inverse = inverse_of(steps)
        places = [] if seed is None else _places(x.size, seed)
        for start, block in _blocks(x):
            factor = _spread(inverse, bucket, start, block.size)
            values = np.multiply(block, factor, out=_scratch.values[: block.size])
            if seed is None:
                values += np.float32(middle(bits) + 0.5)
            else:
                _add_noise(values, start, places, _shifted(middle(bits)))
            np.copyto(codes[: block.size], values, casting="unsafe")
            _pack_block(codes[: block.size], bits, packed, start, x.size)
    return packed


def inverse_of(steps: np.ndarray) -> np.ndarray:
    """Return the factors that `quantize` uses; 0 for steps of zero and non-finite steps."""
    return np.where(steps > LEAST, np.float32(SHRINK) / steps, np.float32(0))


def sum_quantized(
    parts: Sequence[np.ndarray],
    steps: Sequence[np.ndarray],
    bucket: int,
    bits: int,
    middle: float,
    like: np.ndarray,
) -> np.ndarray:
    """Return the sum of (code - middle) * step over `parts` from `quantize`, in order; fp32.

    The result has the shape of `like`. Consumes `like` irreversibly.
    """
    out = room(like)
    with np.errstate(all="ignore"):
        for start, block in _blocks(out.reshape(-1)):
            for i, (packed, step) in enumerate(zip(parts, steps, strict=True)):
                values = _scratch.values[: block.size] if i else block
                _values_of(packed, bits, middle, start, values, out.size)
                factor = _spread(step, bucket, start, block.size)
                np.multiply(values, factor, out=values)
                if i:
                    np.add(block, values, out=block)
    return out


def subtract_quantized(
    total: np.ndarray, packed: np.ndarray, steps: np.ndarray, bucket: int, bits: int, middle: float
) -> np.ndarray:
    """Return total - (code - middle) * step. Consumes `total` irreversibly."""
    out = np.ascontiguousarray(consume(total))
    with np.errstate(all="ignore"):
        for start, block in _blocks(out.reshape(-1)):
            values = _scratch.values[: block.size]
            _values_of(packed, bits, middle, start, values, out.size)
            np.multiply(values, _spread(steps, bucket, start, block.size), out=values)
            np.subtract(block, values, out=block)
    return out


def _values_of(
    packed: np.ndarray, bits: int, middle: float, start: int, out: np.ndarray, count: int
) -> None:
    """Write code - middle to `out` as fp32."""
    if bits == 1:
        _bits_of(packed, middle, start, out)
        return
    codes = _unpack_block(packed, bits, start, out.size, count)
    np.copyto(out, np.subtract(codes, np.uint8(middle)).view(np.int8))


def _bits_of(packed: np.ndarray, middle: float, start: int, out: np.ndarray) -> None:
    """Write bit - middle to `out` as fp32, for bits start, start + 1, ..."""
    first, full = start // 8, out.size // 8
    if start % 8:
        bits = np.unpackbits(packed[first : first + full + 2], bitorder="little")
        np.subtract(bits[start % 8 :][: out.size], np.float32(middle), out=out)
        return
    table, chosen = _eights(middle), packed[first : first + -(-out.size // 8)]
    np.take(table, chosen[:full], axis=0, out=out[: 8 * full].reshape(-1, 8), mode="clip")
    if out.size % 8:
        out[8 * full :] = table[chosen[full]][: out.size % 8]


@functools.lru_cache(maxsize=4)
def _eights(middle: float) -> np.ndarray:
    """Return a table of the eight values bit - middle for each byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return bits.astype(np.float32) - np.float32(middle)


def _spread(steps: np.ndarray, bucket: int, start: int, size: int) -> np.ndarray | np.float32:
    """Return the steps of elements start, ..., start + size - 1; one number if all are equal."""
    first, last = start // bucket, (start + size - 1) // bucket
    if first == last:
        return steps[first]
    out, head = _scratch.steps[:size], -start % bucket
    full = (size - head) // bucket
    tail = head + full * bucket
    out[:head] = steps[first]
    first += head > 0
    out[head:tail].reshape(full, bucket)[:] = steps[first : first + full, None]
    if tail < size:
        out[tail:] = steps[last]
    return out


# --------------------------------------------------------------------------------- random numbers
@functools.cache
def table() -> np.ndarray:
    """Return a table of fp32 values in (0, 1), in the order of a hash.

    Each value (i + 1/2) / 2^16 with a 16-bit i is equally frequent. The first `WINDOW` values are
    repeated at the end.
    """
    order = np.argsort(random.words(backend("numpy"), TABLE, random.key("table")), kind="stable")
    values = ((order % (1 << 16) + 0.5) / (1 << 16)).astype(np.float32)
    return np.concatenate([values, values[:WINDOW]])


@functools.lru_cache(maxsize=4)
def _shifted(shift: float) -> np.ndarray:
    return table() + np.float32(shift)


@functools.cache
def mantissas() -> np.ndarray:
    """Return the table as 23-bit integers."""
    return (table() * (1 << 23)).astype(np.uint32)


def _places(count: int, seed: int) -> list[int]:
    """Return the table position at which each `WINDOW` of `count` elements starts."""
    return (random.words(backend("numpy"), -(-count // WINDOW), seed) % TABLE).tolist()


def _add_noise(values: np.ndarray, start: int, places: list[int], noise: np.ndarray) -> None:
    """Add to each element its random number from `noise`, the table in some form."""
    for i in range(0, values.size, WINDOW):
        part, place = values[i : i + WINDOW], places[(start + i) // WINDOW]
        np.add(part, noise[place : place + part.size], out=part)


# ------------------------------------------------------------------------------------------ signs
def pack_signs(x: np.ndarray, turn: int | None = None) -> np.ndarray:
    """Return one bit per element: 1 if it is at least 0; eight bits per byte, lowest bit first.

    NaN is negative.

    Args:
        x: tensor of any shape.
        turn: number of the step. If None, zeros are positive. Otherwise every other zero is
            positive (even positions in even steps), and magnitudes below 2^-126 count as zero.
    """
    x = _flat(x)
    packed = np.empty(-(-x.size // 8), np.uint8)
    for start, block in _blocks(x):
        mask = _scratch.mask[: block.size]
        if turn is None:
            np.greater_equal(block, 0, out=mask)
        else:
            np.greater(block, _bounds(turn % 2)[: block.size], out=mask)
        first = start // 8
        packed[first : first + -(-block.size // 8)] = np.packbits(mask, bitorder="little")
    return packed


@functools.cache
def _bounds(turn: int) -> np.ndarray:
    signs = (-1.0, 1.0) if turn == 0 else (1.0, -1.0)
    return np.tile(np.array(signs, np.float32) * np.float32(SMALLEST), BLOCK // 2)


def pack_random_signs(x: np.ndarray, seed: int) -> np.ndarray:
    """Return a random bit per element of `x` in [-1, 1], which is 1 with probability (1 + x) / 2.

    The probability is accurate to 2^-17, and exact for -1 and 1. Eight bits form a byte.

    With r from the random table, a bit is 1 if r >= (1 - x) / 2. `seed` is from `random.key`.
    """
    x = _flat(x)
    packed = np.empty(-(-x.size // 8), np.uint8)
    places = _places(x.size, seed)
    for start, block in _blocks(x):
        values = np.multiply(block, np.float32(0.5), out=_scratch.values[: block.size])
        _add_noise(values, start, places, table())
        mask = np.greater_equal(values, np.float32(0.5), out=_scratch.mask[: block.size])
        first = start // 8
        packed[first : first + -(-block.size // 8)] = np.packbits(mask, bitorder="little")
    return packed


# ---------------------------------------------------------------------------------- powers of two
def pack_powers(x: np.ndarray, seed: int) -> np.ndarray:
    """Round each element stochastically to a power of two (or zero); pack signs and exponents.

    Adding a random mantissa carries into the exponent with the right probability, also below
    2^-126, where the neighbouring values are 0 and 2^-126.

    Returns:
        Bytes: the signs as in `pack_signs` (1 is negative), then IEEE 754 exponents.
    """
    x = _flat(x)
    packed = np.empty(-(-x.size // 8) + x.size, np.uint8)
    exponents, noise = packed[packed.size - x.size :], mantissas()
    places = _places(x.size, seed)
    for start, block in _blocks(x):
        bits, values = block.view(np.uint32), _scratch.values[: block.size].view(np.uint32)
        negative = np.less(block.view(np.int32), 0, out=_scratch.mask[: block.size])
        first = start // 8
        packed[first : first + -(-block.size // 8)] = np.packbits(negative, bitorder="little")
        np.bitwise_and(bits, 0x7FFFFFFF, out=values)
        _add_noise(values, start, places, noise)
        np.minimum(values, 0x7FFFFFFF, out=values)  # NaN must not carry into the sign
        values >>= 23
        np.copyto(exponents[start : start + block.size], values, casting="unsafe")
    return packed


def sum_powers(parts: Sequence[np.ndarray], weight: float, like: np.ndarray) -> np.ndarray:
    """Return `weight` times the sum of `parts` from `pack_powers`, in order; fp32.

    The result has the shape of `like`. Consumes `like` irreversibly.
    """
    out = room(like)
    with np.errstate(all="ignore"):
        for start, block in _blocks(out.reshape(-1)):
            for i, packed in enumerate(parts):
                values = _scratch.values[: block.size] if i else block
                _powers_of(packed, start, values, out.size)
                if i:
                    np.add(block, values, out=block)
            np.multiply(block, np.float32(weight), out=block)
    return out


def _powers_of(packed: np.ndarray, start: int, out: np.ndarray, count: int) -> None:
    first, exponents = start // 8, packed[packed.size - count :]
    bits, signs = out.view(np.uint32), _scratch.steps[: out.size].view(np.uint32)
    chosen = packed[first : first + -(-out.size // 8)]
    np.copyto(signs, np.unpackbits(chosen, count=out.size, bitorder="little"))
    signs <<= 8
    np.copyto(bits, exponents[start : start + out.size])
    bits |= signs
    bits <<= 23


# --------------------------------------------------------------------------------------- bfloat16
@functools.cache
def sixteens() -> np.ndarray:
    """Return the table as 16-bit integers, each equally often."""
    return (table() * (1 << 16)).astype(np.uint32)


@functools.lru_cache(1 << 12)
def windows(names: tuple[str, ...], count: int) -> tuple[np.ndarray, int]:
    """Return counters of the windows of tensors of `count` elements, and the windows' width.

    A tensor's counters, a row, derive from its name only. Its windows have equal widths, so that a
    stack of many small tensors reads hardly more random numbers than it has elements.
    """
    number = -(-count // WINDOW)
    rows = [random.words(backend("numpy"), number, random.key(name)) for name in names]
    return np.stack(rows), -(-count // number)


def narrow(x: np.ndarray, names: Sequence[str], seed: int) -> np.ndarray:
    """Round fp32 stochastically to bfloat16; return its words (int16) in the shape of `x`.

    A random number is added to the lower 16 bits of each fp32 word, and the upper 16 bits remain.
    The mean over seeds is thus exactly x, and no error reaches a unit of bfloat16. Values that
    bfloat16 has, infinities among them, do not change, and NaN remains NaN. Consumes `x`
    irreversibly.

    Args:
        x: tensors of one size, side by side; fp32.
        names: their names. The random numbers of a tensor depend on its name and on `seed` only.
        seed: from `random.key`.
    """
    rows = _flat(consume(x)).reshape(len(names), -1)
    words = np.empty(rows.shape, np.int16)
    counters, width = windows(tuple(names), rows.shape[1])
    places, noise = (random.hashed(counters, seed) % TABLE).tolist(), sixteens()
    for row, out, starts in zip(rows, words, places, strict=True):
        for i, place in enumerate(starts):
            part = row[i * width : (i + 1) * width]
            bits = _scratch.values[: part.size].view(np.uint32)
            np.add(part.view(np.uint32), noise[place : place + part.size], out=bits)
            np.copyto(bits, _NAN, where=np.isnan(part, out=_scratch.mask[: part.size]))
            out[i * width : (i + 1) * width] = bits.view(np.int16)[1::2]  # little-endian
    return words.reshape(x.shape)


_NAN = np.uint32(0x7FC00000)  # a sum could carry out of the NaN of some processors


def widen(words: np.ndarray) -> np.ndarray:
    """Return words of bfloat16 (int16) as fp32, in new memory; inverse of `narrow`."""
    bits = words.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


# ---------------------------------------------------------------------------------------- columns
def column_means(x: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """Return the means per column of the elements with bit 0 and of those with bit 1.

    The mean of no elements is 0.

    Args:
        x: (n, m), or several matrices (k, n, m).
        packed: bits from `pack_signs`: whether each element is at least 0.

    Returns:
        (2, m), or (k, 2, m), fp32.
    """
    *_, n, m = x.shape
    total, magnitude, ones = np.zeros((3, x.size // (n * m), m))
    for matrix, start, block in _rows(x):
        values = _scratch.room(block)
        block = np.ascontiguousarray(block)  # NumPy's order of addition follows the strides
        total[matrix] += block.sum(0)
        magnitude[matrix] += np.abs(block, out=values).sum(0)
        _bits_of(packed, 0, start, values.reshape(-1))
        ones[matrix] += values.sum(0)
    low = (total - magnitude) / (2 * np.maximum(n - ones, 1)) * (ones < n)
    high = (total + magnitude) / (2 * np.maximum(ones, 1)) * (ones > 0)
    return np.stack([low, high], 1).astype(np.float32).reshape(*x.shape[:-2], 2, m)


def sum_columns(
    parts: Sequence[np.ndarray], means: Sequence[np.ndarray], like: np.ndarray
) -> np.ndarray:
    """Return the sum of the bits `parts`, decoded with their `column_means`, in order; fp32.

    The result has the shape of `like`. Consumes `like` irreversibly.
    """
    out, grids = room(like), [_columns(mean) for mean in means]
    for matrix, start, block in _rows(out):
        for i, (packed, (center, step)) in enumerate(zip(parts, grids, strict=True)):
            values = _scratch.room(block) if i else block
            _bits_of(packed, 0.5, start, values.reshape(-1))
            values *= step[matrix]
            values += center[matrix]
            if i:
                np.add(block, values, out=block)
    return out


def subtract_columns(total: np.ndarray, packed: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return `total` minus the column means that its bits select.

    Consumes `total` irreversibly.
    """
    out, (center, step) = np.ascontiguousarray(consume(total)), _columns(means)
    for matrix, start, block in _rows(out):
        values = _scratch.room(block)
        _bits_of(packed, 0.5, start, values.reshape(-1))
        values *= step[matrix]
        values += center[matrix]
        np.subtract(block, values, out=block)
    return out


def _columns(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the midpoint and the distance of the two values of each column of each matrix."""
    low, high = means[..., 0, :], means[..., 1, :]
    center, step = (low + high) * np.float32(0.5), high - low
    return center.reshape(-1, center.shape[-1]), step.reshape(-1, step.shape[-1])


def _rows(x: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield blocks of rows: the matrix's number, the block's offset in `x`, and the rows."""
    *_, n, m = x.shape
    count = max(1, BLOCK // m // 8 * 8)
    for i, matrix in enumerate(x.reshape(-1, n, m)):
        for row in range(0, n, count):
            yield i, (i * n + row) * m, matrix[row : row + count]


# ---------------------------------------------------------------------------------------- scratch
class _Scratch(threading.local):
    """Memory for one block, reused because allocation costs more than a pass over it."""

    def __init__(self) -> None:
        self.values = np.empty(BLOCK, np.float32)
        self.steps = np.empty(BLOCK, np.float32)
        self.codes = np.empty(BLOCK, np.uint8)
        self.mask = np.empty(BLOCK, bool)

    def room(self, block: np.ndarray) -> np.ndarray:
        """Return fp32 memory in the shape of `block`."""
        if block.size > self.values.size:
            self.values = np.empty(block.size, np.float32)
        return self.values[: block.size].reshape(block.shape)


_scratch = _Scratch()


def _flat(x: np.ndarray) -> np.ndarray:
    """Return a vector of fp32, without a copy where possible."""
    return np.ascontiguousarray(x, np.float32).reshape(-1)


def _blocks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, x.size, BLOCK):
        yield start, x[start : start + BLOCK]
