"""Ascending positions and their signs, bin by bin, in a byte or two each (Chen et al., AAAI 2018).

The paper sends 8 bits an element in bins of up to 64 and 16 bits in longer ones: 6 or 14 for the
position in the bin, 2 for the ternary value. Here one of these two is the sign and the other says
that the element is its bin's last, so that no sizes need to be told. A bin that sends nothing is
one entry of ones; so bins have at most 63 or 16383 elements. No entries: no bin sends anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SHORT, LONG = 63, 16383
"""Elements of a bin up to which an entry takes a byte, or two."""


def pack(index: np.ndarray, negative: np.ndarray, shape: Sequence[int], width: int) -> np.ndarray:
    """Entries as bytes.

    Args:
        index: ascending positions, counted through all rows.
        negative: whether the sign there is minus.
        shape: (size,), or (rows, size); bins do not cross rows.
        width: elements of a bin, at most `LONG`.
    """
    if not index.size:
        return np.zeros(0, np.uint8)
    kind, bits = _entry(width)
    size, per_row = shape[-1], -(-shape[-1] // width)
    row, column = np.divmod(index, size)
    place, position = np.divmod(column, width)
    place += row * per_row
    found = np.bincount(place, minlength=math.prod(shape[:-1]) * per_row)
    empty = found == 0
    entries = (position | (negative.astype(np.int64) << bits)).astype(kind)
    entries[np.cumsum(found)[~empty] - 1] |= kind(1 << (bits + 1))
    packed = np.full(index.size + np.count_nonzero(empty), np.iinfo(kind).max, kind)
    packed[np.arange(index.size) + np.cumsum(empty)[place]] = entries
    return packed.view(np.uint8)


def unpack(packed: np.ndarray, shape: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `pack`: positions (int32), and signs (fp32).

    Raises:
        ValueError: there are too many or too few bins, or positions outside of them.
    """
    kind, bits = _entry(width)
    size, per_row = shape[-1], -(-shape[-1] // width)
    bins = math.prod(shape[:-1]) * per_row
    if packed.size % kind(0).itemsize:
        raise ValueError(f"{packed.size} bytes are no whole number of entries")
    entries = np.frombuffer(packed.tobytes(), kind)
    last = (entries >> (bits + 1)).astype(np.int64)
    if entries.size and (last.sum() != bins or not last[-1]):
        raise ValueError(f"there are {last.sum()} bins instead of {bins}")
    place = np.cumsum(last) - last
    filled = entries != np.iinfo(kind).max
    entries, place = entries[filled], place[filled]
    row, place = np.divmod(place, per_row)
    position = (entries & ((1 << bits) - 1)).astype(np.int64)
    column = place * width + position
    if (position >= width).any() or (column >= size).any():
        raise ValueError("there are positions outside of their bins")
    signs = 1 - 2 * ((entries >> bits) & 1).astype(np.float32)
    return (row * size + column).astype(np.int32), signs


def _entry(width: int) -> tuple[type[np.unsignedinteger], int]:
    """The dtype of an entry, and how many bits of it are the position."""
    return (np.uint8, 6) if width <= SHORT else (np.uint16, 14)
