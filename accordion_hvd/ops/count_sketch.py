"""The count sketch (Charikar, Chen & Farach-Colton, 2002) of long vectors.

A sketch is a table (rows, columns) that is linear in the vector: sketches of several ranks' vectors
add up to that of the sum. In each row every element is added, with a random sign, to a random
column; the median over the rows of what is found there, signed again, estimates the element.

Hashing element by element would take hundreds of passes over memory, so elements are moved block
by block (ours): a vector is cut into blocks of as many elements as there are columns, and in each
row a block is turned by a random offset and given a random sign. Elements of one block never meet;
two of different blocks meet in a row with a chance of 1 / columns and are then signed
independently. That is all that the bounds on a row's mean and variance need; rows are independent.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd.ops import namespace, random

_PIECE = 1 << 15  # elements whose estimates stay in a core's cache


def blocks(size: int, columns: int) -> int:
    """Into how many blocks a vector of `size` elements is cut."""
    return -(-size // columns)


def hashes(
    xp: ModuleType, size: int, rows: int, columns: int, seed: Any, device: Any = None
) -> Any:
    """Return blocks' offsets per row: (rows, blocks) int32, twice the offset plus the sign bit.

    Args:
        xp: the namespace of operations of the result.
        size: elements of the vector.
        rows: of the sketch.
        columns: of the sketch, below 2^30.
        seed: from `random.key`; equal seeds give equal hashes on all ranks, in all frameworks.
        device: where the result lives.
    """
    count = blocks(size, columns)
    bits = random.words(xp, rows * count, seed, device)
    codes = bits // 2 % columns * 2 + bits % 2
    return xp.reshape(xp.cast(codes, "int32"), (rows, count))


# -------------------------------------------------------------------------------- NumPy, by pieces
def insert(x: np.ndarray, codes: np.ndarray, columns: int) -> np.ndarray:
    """Return the sketch of the vector `x`, (rows, columns) fp32, under the hashes `codes`."""
    table = np.zeros((len(codes), columns), np.float32)
    for number, column in enumerate(codes.T.tolist()):
        block = x[number * columns : (number + 1) * columns]
        for row, code in zip(table, column, strict=True):
            offset, add = code >> 1, np.subtract if code & 1 else np.add
            ahead = block[: columns - offset]
            behind = block[columns - offset :]  # past the end: turned round to the start
            part = row[offset : offset + ahead.size]
            add(part, ahead, out=part)
            add(row[: behind.size], behind, out=row[: behind.size])
    return table


def estimate(table: np.ndarray, codes: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Estimates of all elements of the vector that was sketched, written into `out` (size,)."""
    columns = table.shape[1]
    piece = min(columns, _PIECE)
    signed = np.stack([table, -table])
    signed = np.concatenate([signed, signed[:, :, :piece]], 2)  # so that no piece is cut in two
    scratch = np.empty((len(table) // 2 + 2, piece), np.float32)
    for number, column in enumerate(codes.T.tolist()):
        block = out[number * columns : (number + 1) * columns]
        for start in range(0, block.size, piece):
            part = block[start : start + piece]
            firsts = [((code >> 1) + start) % columns for code in column]
            seen = [
                signed[code & 1, row, first : first + part.size]
                for row, (code, first) in enumerate(zip(column, firsts, strict=True))
            ]
            part[:] = _median(seen, scratch[:, : part.size])
    return out


def _median(seen: list[np.ndarray], scratch: np.ndarray) -> np.ndarray:
    """Return the element-wise median of an odd number of vectors that fit into the cache.

    Among the first (rows + 3) / 2 of them, neither the least nor the largest is the median: both
    are forgotten and the next vector takes part, until one is left.
    """
    few = len(seen) // 2 + 2
    left, rest = seen[:few], seen[few:]
    while len(left) > 1:
        left = _without_extreme(left, np.maximum, np.minimum, scratch)
        left = _without_extreme(left, np.minimum, np.maximum, scratch)
        left += rest[:1]
        rest = rest[1:]
    return left[0]


def _without_extreme(
    vectors: list[np.ndarray], keep: np.ufunc, forget: np.ufunc, scratch: np.ndarray
) -> list[np.ndarray]:
    """Remove the least (or largest) vector, element by element, in the memory of `scratch`."""
    carried = scratch[-1]
    if len(vectors) > 2:
        forget(vectors[0], vectors[1], out=carried)
    kept = [keep(vectors[0], vectors[1], out=scratch[0])]
    for i, vector in enumerate(vectors[2:], 1):
        kept.append(keep(carried, vector, out=scratch[i]))
        if i < len(vectors) - 2:
            forget(carried, vector, out=carried)
    return kept


# ------------------------------------------------------------------- any framework, on any device
def places(codes: Any, columns: int, turned: int) -> Any:
    """Columns that a row's hashes `codes` (blocks,) move to, or from: (blocks, columns) int64.

    Args:
        codes: as from `hashes`.
        columns: of the sketch.
        turned: 1: the column where a block's element is found; -1: the element of a block that is
            found in a column.
    """
    xp = namespace(codes)
    offsets = xp.cast(xp.reshape(codes // 2, (-1, 1)), "int64")
    return (xp.arange(columns, xp.device(codes)) + columns + turned * offsets) % columns


def moved(x: Any, codes: Any, columns: int) -> Any:
    """Blocks of `x` as they are added up in one row of the sketch: (blocks, columns), signed."""
    xp, (count,) = namespace(x), namespace(x).shape(codes)
    first = xp.reshape(xp.arange(count, xp.device(x)) * columns, (-1, 1))
    source = places(codes, columns, -1) + first
    values = xp.take(xp.pad_last(x, count * columns), xp.reshape(source, (-1,)))
    return xp.reshape(values, (count, columns)) * _signs(codes)


def found(row: Any, codes: Any, size: int) -> Any:
    """Return one row's estimates of all elements of the vector: (size,)."""
    xp, (columns,) = namespace(row), namespace(row).shape(row)
    values = xp.take(row, xp.reshape(places(codes, columns, 1), (-1,)))
    signed = xp.reshape(values, (-1, columns)) * _signs(codes)
    return xp.reshape(signed, (-1,))[:size]


def _signs(codes: Any) -> Any:
    xp = namespace(codes)
    return xp.reshape(1.0 - 2.0 * xp.cast(codes % 2, "float32"), (-1, 1))
