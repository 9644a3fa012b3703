"""Count sketch of long vectors (Charikar, Chen & Farach-Colton, 2002).

A sketch is a table, (rows, columns), that is linear in the vector: the sum of several ranks'
sketches is the sketch of the sum of their vectors. Each row adds every element, with a random sign,
to a random column. The estimate of an element is the median over the rows of the element's column,
multiplied by the element's sign in that row.

Hashing each element would take hundreds of passes over memory, so elements are moved in blocks
(ours): a vector is split into blocks with one element per column, and each row rotates a block
by a random offset and multiplies it by a random sign. Elements of one block never collide. Two
elements of different blocks collide in a row with probability 1 / columns, and then have
independent signs. The bounds on a row's mean and variance need no more than that. Rows are
independent.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd.ops import namespace, random

_PIECE = 1 << 15  # elements whose estimates fit into a core's cache


def blocks(size: int, columns: int) -> int:
    """Return the number of blocks into which a vector of `size` elements is split."""
    return -(-size // columns)


def hashes(
    xp: ModuleType, size: int, rows: int, columns: int, seed: Any, device: Any = None
) -> Any:
    """Return the offset and sign of each block in each row: (rows, blocks) int32.

    A code is twice the offset plus the sign bit; `columns` is below 2^30. Equal seeds (from
    `random.key`) give equal hashes on all ranks and in all frameworks.
    """
    count = blocks(size, columns)
    bits = random.words(xp, rows * count, seed, device)
    codes = bits // 2 % columns * 2 + bits % 2
    return xp.reshape(xp.cast(codes, "int32"), (rows, count))


# -------------------------------------------------------------------------------- NumPy, in pieces
def insert(x: np.ndarray, codes: np.ndarray, columns: int) -> np.ndarray:
    """Return the sketch, (rows, columns) fp32, of the vector `x` under the hashes `codes`."""
    table = np.zeros((len(codes), columns), np.float32)
    for number, column in enumerate(codes.T.tolist()):
        block = x[number * columns : (number + 1) * columns]
        for row, code in zip(table, column, strict=True):
            offset, add = code >> 1, np.subtract if code & 1 else np.add
            ahead = block[: columns - offset]
            wrapped = block[columns - offset :]  # continues at the start of the row
            part = row[offset : offset + ahead.size]
            add(part, ahead, out=part)
            add(row[: wrapped.size], wrapped, out=row[: wrapped.size])
    return table


def estimate(table: np.ndarray, codes: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write estimates of all elements of the sketched vector into `out`, (size,)."""
    columns = table.shape[1]
    piece = min(columns, _PIECE)
    signed = np.stack([table, -table])
    signed = np.concatenate([signed, signed[:, :, :piece]], 2)  # so that no piece wraps around
    scratch = np.empty((len(table) // 2 + 2, piece), np.float32)
    for number, column in enumerate(codes.T.tolist()):
        block = out[number * columns : (number + 1) * columns]
        for start in range(0, block.size, piece):
            part = block[start : start + piece]
            firsts = [((code >> 1) + start) % columns for code in column]
            estimates = [
                signed[code & 1, row, first : first + part.size]
                for row, (code, first) in enumerate(zip(column, firsts, strict=True))
            ]
            part[:] = _median(estimates, scratch[:, : part.size])
    return out


def _median(vectors: list[np.ndarray], scratch: np.ndarray) -> np.ndarray:
    """Return the element-wise median of an odd number of vectors that fit into the cache.

    The least and the largest of the first (rows + 3) / 2 vectors are not the median. Both are
    dropped and the next vector is added, until one vector remains.
    """
    few = len(vectors) // 2 + 2
    candidates, pending = vectors[:few], vectors[few:]
    while len(candidates) > 1:
        candidates = _without_extreme(candidates, np.maximum, np.minimum, scratch)
        candidates = _without_extreme(candidates, np.minimum, np.maximum, scratch)
        candidates += pending[:1]
        pending = pending[1:]
    return candidates[0]


def _without_extreme(
    vectors: list[np.ndarray], keep: np.ufunc, drop: np.ufunc, scratch: np.ndarray
) -> list[np.ndarray]:
    """Drop the least (or largest) value per element; the result is in `scratch`."""
    carried = scratch[-1]
    if len(vectors) > 2:
        drop(vectors[0], vectors[1], out=carried)
    remaining = [keep(vectors[0], vectors[1], out=scratch[0])]
    for i, vector in enumerate(vectors[2:], 1):
        remaining.append(keep(carried, vector, out=scratch[i]))
        if i < len(vectors) - 2:
            drop(carried, vector, out=carried)
    return remaining


# ------------------------------------------------------------------- any framework, on any device
def places(codes: Any, columns: int, turned: int) -> Any:
    """Return the columns to which a row's hashes `codes`, (blocks,), map: (blocks, columns) int64.

    If `turned` is 1, a block's element maps to its column; if -1, a column to the block's element.
    """
    xp = namespace(codes)
    offsets = xp.cast(xp.reshape(codes // 2, (-1, 1)), "int64")
    return (xp.arange(columns, xp.device(codes)) + columns + turned * offsets) % columns


def moved(x: Any, codes: Any, columns: int) -> Any:
    """Return the signed blocks that one row of the sketch adds up: (blocks, columns)."""
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
