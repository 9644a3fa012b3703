"""Compact encodings of ascending positions: in a fixed size (Elias, 1974; Fano, 1971), or by bins.

In a fixed size, the lowest one or two bytes of each position are sent unpacked. The high parts
never decrease and are encoded in a bitmap: position number i with high part h sets bit h + i. If
one element in a hundred is selected, a position takes 9.4 bits instead of int32's 32. The encoding
is lossless, and its size depends only on the number of positions, so ranks need not exchange sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def low_bytes(count: int, size: int) -> int:
    """Return the number of bytes of each position that are sent unpacked; 4 means all."""
    return min((1, 2, 4), key=lambda low: _length(count, size, low))


def packed_length(count: int, size: int) -> int:
    """Return the bytes that `count` ascending positions below `size` take."""
    return _length(count, size, low_bytes(count, size))


def bitmap_bits(count: int, size: int, low: int) -> int:
    """Return the length of the bitmap in bits."""
    return 0 if low == 4 else count + ((size - 1) >> 8 * low)


def pack(index: np.ndarray, size: int) -> np.ndarray:
    """Pack ascending distinct int32 positions below `size` into bytes."""
    low = low_bytes(index.size, size)
    if low == 4:
        return index.astype(np.int32).view(np.uint8)
    bits = np.zeros(bitmap_bits(index.size, size, low), bool)
    bits[(index >> 8 * low) + np.arange(index.size, dtype=np.int32)] = True
    tail = index.astype(np.uint8 if low == 1 else np.uint16).view(np.uint8)
    return np.concatenate([tail, np.packbits(bits, bitorder="little")])


def unpack(packed: np.ndarray, count: int, size: int) -> np.ndarray:
    """Recover the `count` positions that `pack` has encoded, in `packed` or in each row of it.

    The caller checks that positions ascend and are below `size`.

    Raises:
        ValueError: if `packed` holds a different number of positions.
    """
    if packed.ndim == 2:
        return np.stack([unpack(row, count, size) for row in packed])
    low = low_bytes(count, size)
    if packed.size != packed_length(count, size):
        raise ValueError(f"{count} positions below {size} do not take {packed.size} bytes")
    tail, bitmap = packed[: low * count], packed[low * count :]
    if low == 4:
        return np.frombuffer(tail.tobytes(), np.int32).copy()
    bits = np.unpackbits(bitmap, bitorder="little")  # one beyond the last is an index too large
    high = np.flatnonzero(bits.view(bool)).astype(np.int32)
    if high.size != count:
        raise ValueError(f"there are {high.size} positions instead of {count}")
    high -= np.arange(count, dtype=np.int32)
    high <<= 8 * low
    high |= tail if low == 1 else np.frombuffer(tail.tobytes(), np.uint16)
    return high


def _length(count: int, size: int, low: int) -> int:
    return low * count + -(-bitmap_bits(count, size, low) // 8)


# --------------------------------------------------------------------------------------------- bins
# Positions and their signs, by bins (Chen et al., AAAI 2018). An entry takes one byte in bins of up
# to 63 elements and two bytes in larger bins. The paper sends 8 bits per element in bins of up to
# 64 and 16 bits in longer ones: 6 or 14 bits for the position in the bin, and 2 for the ternary
# value. Here one of these two bits is the sign and the other marks the last element of a bin, so
# that sizes need not be sent. An empty bin is one entry of ones; bins therefore have at most 63 or
# 16383 elements. If all bins are empty, there are no entries.

SHORT, LONG = 63, 16383
"""Largest bins whose entries take one byte and two bytes."""


def pack_bins(
    index: np.ndarray, negative: np.ndarray, shape: Sequence[int], width: int
) -> np.ndarray:
    """Pack positions and signs into bytes.

    Args:
        index: ascending positions, counted through all rows.
        negative: whether the element at each position is negative.
        shape: (size,), or (rows, size); bins do not cross rows.
        width: elements per bin, at most `LONG`.
    """
    if not index.size:
        return np.zeros(0, np.uint8)
    kind, bits = _entry(width)
    size, per_row = shape[-1], -(-shape[-1] // width)
    row = index // size
    column = index - row * size
    place = column // width
    entries = (column - place * width).astype(kind)
    place += row * per_row
    entries |= negative.astype(kind) << kind(bits)
    last = np.append(place[1:] != place[:-1], True)
    entries |= last.astype(kind) << kind(bits + 1)
    empty = np.ones(math.prod(shape[:-1]) * per_row, bool)
    empty[place] = False
    skipped = np.cumsum(empty, dtype=np.int32)
    packed = np.full(index.size + int(skipped[-1]), np.iinfo(kind).max, kind)
    packed[np.arange(index.size, dtype=np.int32) + skipped[place]] = entries
    return packed.view(np.uint8)


def unpack_bins(
    packed: np.ndarray, shape: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Invert `pack_bins`; return positions (int32) and signs (fp32).

    Raises:
        ValueError: if the number of bins is wrong, or a position is outside its bin.
    """
    kind, bits = _entry(width)
    size, per_row = shape[-1], -(-shape[-1] // width)
    bins = math.prod(shape[:-1]) * per_row
    if packed.size % kind(0).itemsize:
        raise ValueError(f"{packed.size} bytes are not a multiple of an entry's size")
    entries = np.frombuffer(packed.tobytes(), kind)
    last = entries >> kind(bits + 1)
    place = np.cumsum(last, dtype=np.int32)
    if entries.size and (place[-1] != bins or not last[-1]):
        raise ValueError(f"there are {place[-1]} bins instead of {bins}")
    place -= last
    filled = entries != np.iinfo(kind).max
    entries, place = entries[filled], place[filled]
    position = (entries & kind((1 << bits) - 1)).astype(np.int32)
    row = place // per_row
    column = (place - row * per_row) * width + position
    if (position >= width).any() or (column >= size).any():
        raise ValueError("there are positions outside of their bins")
    signs = 1 - 2 * ((entries >> kind(bits)) & kind(1)).astype(np.float32)
    return row * size + column, signs


def _entry(width: int) -> tuple[type[np.unsignedinteger], int]:
    """Return the dtype of an entry and the number of its bits that hold the position."""
    return (np.uint8, 6) if width <= SHORT else (np.uint16, 14)
