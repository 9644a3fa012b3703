"""Ascending positions in as few bytes as a fixed format allows (Elias, 1974; Fano, 1971).

The low byte (or two) of each position travels as it is. The rest, which never falls, is told by a
bitmap: position number i with high part h sets bit h + i. With one element in a hundred a position
takes 9.4 bits instead of int32's 32, without loss and without sizes that ranks would have to tell.
"""

from __future__ import annotations

import numpy as np


def low_bytes(count: int, size: int) -> int:
    """Return how many bytes of each of `count` positions below `size` travel unpacked; 4 is all."""
    return min((1, 2, 4), key=lambda low: _length(count, size, low))


def packed_length(count: int, size: int) -> int:
    """Bytes that `count` ascending positions below `size` take."""
    return _length(count, size, low_bytes(count, size))


def bitmap_bits(count: int, size: int, low: int) -> int:
    """Bits of the bitmap."""
    return 0 if low == 4 else count + ((size - 1) >> 8 * low)


def pack(index: np.ndarray, size: int) -> np.ndarray:
    """Ascending distinct int32 positions below `size` as bytes."""
    low = low_bytes(index.size, size)
    if low == 4:
        return index.astype(np.int32).view(np.uint8)
    bits = np.zeros(bitmap_bits(index.size, size, low), bool)
    bits[(index >> 8 * low) + np.arange(index.size, dtype=np.int32)] = True
    tail = index.astype(np.uint8 if low == 1 else np.uint16).view(np.uint8)
    return np.concatenate([tail, np.packbits(bits, bitorder="little")])


def unpack(packed: np.ndarray, count: int, size: int) -> np.ndarray:
    """Invert `pack`; the caller checks whether positions ascend below `size`.

    Raises:
        ValueError: `packed` holds another number of positions.
    """
    low = low_bytes(count, size)
    if packed.size != packed_length(count, size):
        raise ValueError(f"{count} positions below {size} do not take {packed.size} bytes")
    tail, bitmap = packed[: low * count], packed[low * count :]
    if low == 4:
        return np.frombuffer(tail.tobytes(), np.int32).copy()
    bits = np.unpackbits(bitmap, count=bitmap_bits(count, size, low), bitorder="little")
    high = np.flatnonzero(bits.view(bool)).astype(np.int32)
    if high.size != count:
        raise ValueError(f"there are {high.size} positions instead of {count}")
    high -= np.arange(count, dtype=np.int32)
    high <<= 8 * low
    high |= tail if low == 1 else np.frombuffer(tail.tobytes(), np.uint16)
    return high


def _length(count: int, size: int, low: int) -> int:
    return low * count + -(-bitmap_bits(count, size, low) // 8)
