"""Compact encoding of ascending positions in a fixed size (Elias, 1974; Fano, 1971).

The lowest one or two bytes of each position are sent unpacked. The high parts never decrease and
are encoded in a bitmap: position number i with high part h sets bit h + i. If one element in a
hundred is selected, a position takes 9.4 bits instead of int32's 32. The encoding is lossless, and
its size depends only on the number of positions, so ranks need not exchange sizes.
"""

from __future__ import annotations

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
    bits = np.unpackbits(
        bitmap, bitorder="little"
    )  # a bit set beyond the last is an index too large
    high = np.flatnonzero(bits.view(bool)).astype(np.int32)
    if high.size != count:
        raise ValueError(f"there are {high.size} positions instead of {count}")
    high -= np.arange(count, dtype=np.int32)
    high <<= 8 * low
    high |= tail if low == 1 else np.frombuffer(tail.tobytes(), np.uint16)
    return high


def _length(count: int, size: int, low: int) -> int:
    return low * count + -(-bitmap_bits(count, size, low) // 8)
