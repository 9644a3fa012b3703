"""Exact and fast selection of the largest elements of vectors on a CPU.

A threshold is estimated from a sample, deliberately low, so that slightly more elements than needed
reach it. The selection among these candidates is exact. An unlucky sample costs time but never
exactness: if too few elements reach the threshold, all elements are searched. A full pass is one
addition, one comparison and one search for candidates, in blocks that fit into the cache.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import numpy as np

from accordion_hvd.ops.journal import consume

_LONG = 1 << 16  # length from which each vector gets its own pass
_SHORT = 1 << 9  # length up to which a sample costs more than it saves
_BLOCK = 1 << 18
_SAMPLE = 1 << 14
_DEVIATIONS = 3  # margin of a threshold, in standard deviations of the sample


def largest_index(x: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the `count` largest magnitudes of each row of `x`; exact.

    Args:
        x: (size,), or (rows, size).
        count: elements to select per row; at most `size` are selected.

    Returns:
        int32, ascending, counted through all rows. NaN counts as smallest. Of equal magnitudes the
        first are selected.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = min(count, rows.shape[1])
    if count == rows.shape[1]:
        return np.arange(x.size, dtype=np.int32)
    if rows.shape[1] < _LONG:
        per_block = max(1, _BLOCK // rows.shape[1])
        blocks = range(0, len(rows), per_block)
        selected = [_of_rows(rows[s : s + per_block], count) + s * rows.shape[1] for s in blocks]
    else:
        selected = [_of_long(row, count) + i * row.size for i, row in enumerate(rows)]
    return np.concatenate(selected).astype(np.int32)


def accumulate_largest(
    error: np.ndarray, grad: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return error + grad and its `largest_index`; one pass where possible. Consumes `error`."""
    total = _accumulator(error, grad)
    size = total.shape[-1]
    if total.size != size or size < _LONG or count >= size:
        np.add(total, grad, out=total)
        return total, largest_index(total, count)
    places = _places(size, _SAMPLE)
    threshold = _threshold(total[places] + grad[places], count, size)
    candidates = _above(total, threshold, grad)
    return total, _chosen(total, candidates, threshold, count).astype(np.int32)


def accumulate_reaching(
    error: np.ndarray, grad: np.ndarray, limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return error + grad and the positions where |error + grad| >= limit: int32, ascending.

    If `limit` is 0, returns the positions of nonzero elements. Not available in a graph: the number
    of positions depends on values, and reading it synchronizes a GPU. Consumes `error`.
    """
    total = _accumulator(error, grad)
    return total, _above(total.reshape(-1), limit, grad.reshape(-1)).astype(np.int32)


def accumulate_outgrown(
    error: np.ndarray, grad: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return error + grad, the positions that AdaComp selects, and the scale of each row.

    Each row is split into bins of `width` elements. With total = error + grad, an element is
    selected if |total + grad| is at least the largest |total| in its bin. Zeros are not selected,
    and neither is any element of a bin of zeros. The scale of a row is the mean of the bins'
    largest magnitudes. Not available in a graph, like `accumulate_reaching`. Consumes `error`.

    Returns:
        The sum, positions (int32, ascending, counted through all rows), scales (fp32, one per row).
    """
    total = _accumulator(error, grad)
    rows, fresh = total.reshape(-1, total.shape[-1]), grad.reshape(-1, total.shape[-1])
    positions, scales = [np.zeros(0, np.int64)], []
    for number, (row, new) in enumerate(zip(rows, fresh, strict=True)):
        largest = []
        for part in _of_bins(row.size, width):
            index, most = _outgrown(row[part], new[part], width)
            positions.append(index + (number * row.size + part.start))
            largest.append(most)
        scales.append(np.concatenate(largest).mean(dtype=np.float64))
    return total, np.concatenate(positions).astype(np.int32), np.array(scales, np.float32)


def _accumulator(error: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """Return the memory for error + grad, which still holds `error`."""
    return consume(error, lambda: np.subtract(error, grad, out=error))


def _outgrown(block: np.ndarray, grad: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and the largest magnitude of each bin, for full bins or one shorter bin."""
    bins = (-1, min(width, block.size))
    np.add(block, grad, out=block)
    magnitude = np.abs(block, out=_scratch.magnitude[: block.size])
    most = magnitude.reshape(bins).max(1)
    np.add(block, grad, out=magnitude)
    np.abs(magnitude, out=magnitude)
    limits = np.where(most > 0, most, np.inf)[:, None]
    mask = _scratch.mask[: block.size]
    np.greater_equal(magnitude.reshape(bins), limits, out=mask.reshape(bins))
    index = np.flatnonzero(mask)
    return index[block[index] != 0], most


def largest_of_bins(x: np.ndarray, width: int) -> np.ndarray:
    """Return the positions (int32) of the largest magnitude in each bin of `width` elements.

    Positions ascend and are counted through all rows; of equal magnitudes the first is taken.
    """
    rows, positions = x.reshape(-1, x.shape[-1]), []
    for number, row in enumerate(rows):
        for part in _of_bins(row.size, width):
            block = row[part]
            magnitude = np.abs(block, out=_scratch.magnitude[: block.size])
            index = magnitude.reshape(-1, min(width, block.size)).argmax(1)
            index += np.arange(index.size) * width + (number * row.size + part.start)
            positions.append(index)
    return np.concatenate(positions).astype(np.int32)


def largest_of_chunks(x: np.ndarray, chunks: int, count: int) -> np.ndarray:
    """Return the places of the `count` largest magnitudes in each chunk of each row of `x`.

    Chunk j of a row has the row's elements j, j + chunks, j + 2 chunks, ...

    Returns:
        int32 (rows, count, chunks), ascending in each chunk: place i is that of element
        i * chunks + j. Of equal magnitudes the first are selected.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = np.pad(rows, [(0, 0), (0, -rows.shape[1] % chunks)])
    by_chunk = np.ascontiguousarray(padded.reshape(len(rows), -1, chunks).swapaxes(1, 2))
    place = largest_index(by_chunk, count) % np.int32(by_chunk.shape[2])
    return np.ascontiguousarray(place.reshape(len(rows), chunks, count).swapaxes(1, 2))


def index_of_chunks(place: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of elements, given their places in chunks (`largest_of_chunks`).

    Args:
        place: int32 (..., rows, count, chunks); before the rows, there may be one dimension more.
        size: number of elements of each row.

    Returns:
        The positions (int32, counted through all rows), flat but for the first dimension if there
        is one more, and for each of its elements one fp32 flag: 0 if places ascend in each chunk
        and stay within the row, else 1.
    """
    *lead, rows, _, chunks = place.shape
    place = np.minimum(place, np.int32(-(-size // chunks)))  # else a product may wrap around
    index = place * np.int32(chunks) + np.arange(chunks, dtype=np.int32)
    wrong = index >= size
    wrong[..., 1:, :] |= place[..., 1:, :] <= place[..., :-1, :]
    index = np.minimum(index, size - 1) + np.arange(rows, dtype=np.int32)[:, None, None] * size
    flags = wrong.reshape(*lead, -1).any(-1).astype(np.float32)
    return index.reshape(*lead, -1).astype(np.int32), flags.reshape(-1)


def _of_bins(size: int, width: int) -> Iterator[slice]:
    """Yield parts of a vector with full bins that fit into the cache; then the shorter last bin."""
    full, step = size // width * width, max(_BLOCK // width, 1) * width
    for start in range(0, full, step):
        yield slice(start, min(start + step, full))
    if full < size:
        yield slice(full, size)


def _of_long(x: np.ndarray, count: int) -> np.ndarray:
    threshold = _threshold(x[_places(x.size, _SAMPLE)], count, x.size)
    return _chosen(x, _above(x, threshold), threshold, count)


def _chosen(x: np.ndarray, candidates: np.ndarray, threshold: float, count: int) -> np.ndarray:
    """Return the `count` largest of `x`, given the `candidates` that reach `threshold`."""
    if candidates.size >= count:
        magnitude = np.abs(x[candidates])
        return candidates[_exactly(magnitude, count)]
    if threshold == 0 and not np.isnan(x).any():
        others = np.setdiff1d(np.arange(min(count + candidates.size, x.size)), candidates)
        return np.sort(np.concatenate([candidates, others[: count - candidates.size]]))
    magnitude = np.abs(x)
    magnitude[np.isnan(magnitude)] = -1
    return _exactly(magnitude, count)


def _exactly(magnitude: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the `count` largest, ascending; of equal magnitudes the first."""
    least = np.partition(magnitude, magnitude.size - count)[magnitude.size - count]
    chosen = np.flatnonzero(magnitude >= least)
    surplus = chosen.size - count
    if surplus:
        equal = np.flatnonzero(magnitude[chosen] == least)
        chosen = np.delete(chosen, equal[equal.size - surplus :])
    return chosen


def _of_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """Return `largest_index` of rows that fit into the cache together."""
    magnitude = np.abs(rows)
    number, size = rows.shape
    if size <= _SHORT:
        least = np.partition(magnitude, size - count, axis=1)[:, size - count]
    else:
        least = _least_of_rows(magnitude, count)
    mask = magnitude >= least[:, None]
    chosen = np.flatnonzero(mask)
    if chosen.size == number * count and (np.count_nonzero(mask, axis=1) == count).all():
        return chosen
    magnitude[np.isnan(magnitude)] = -1
    return np.concatenate([_exactly(row, count) + i * size for i, row in enumerate(magnitude)])


def _least_of_rows(magnitude: np.ndarray, count: int) -> np.ndarray:
    """Return the `count`-th largest of each row, or a lower value if the sample was unlucky."""
    number, size = magnitude.shape
    sample = np.take(magnitude, _places(size, max(_SHORT // 2, size // 8)), axis=1)
    wanted = _wanted(sample.shape[1], count, size)
    low = np.partition(sample, sample.shape[1] - wanted, axis=1)[:, sample.shape[1] - wanted]
    candidates = np.flatnonzero(magnitude >= low[:, None])
    row = candidates // size
    counts = np.bincount(row, minlength=number)
    if counts.min() < count:
        return np.partition(magnitude, size - count, axis=1)[:, size - count]
    start = np.cumsum(counts) - counts
    table = np.full((number, counts.max()), -1, magnitude.dtype)
    table[row, np.arange(candidates.size) - start[row]] = magnitude.reshape(-1)[candidates]
    place = table.shape[1] - count
    return np.partition(table, place, axis=1)[:, place]


def _threshold(sample: np.ndarray, count: int, size: int) -> float:
    """Estimate a magnitude that slightly more than `count` of `size` elements exceed."""
    magnitude = np.abs(sample)
    place = magnitude.size - _wanted(magnitude.size, count, size)
    return float(np.partition(magnitude, place)[place])


def _wanted(sample: int, count: int, size: int) -> int:
    expected = sample * count / size
    return min(sample, int(expected + _DEVIATIONS * expected**0.5) + 1)


@functools.lru_cache(maxsize=256)
def _places(size: int, sample: int) -> np.ndarray:
    """Return scattered sample positions; a regular step could coincide with rows or columns."""
    return np.random.Generator(np.random.Philox(size)).integers(0, size, sample, np.int32)


class _Scratch(threading.local):
    """Memory for one block, reused because allocation costs more than a pass over it."""

    def __init__(self) -> None:
        self.magnitude = np.empty(_BLOCK, np.float32)
        self.mask = np.empty(_BLOCK, bool)


_scratch = _Scratch()


def _above(x: np.ndarray, threshold: float, grad: np.ndarray | None = None) -> np.ndarray:
    """Return the positions of magnitudes of at least `threshold`, or of nonzero ones if it is 0.

    If `grad` is given, adds it to `x` first.
    """
    positions = []
    for start in range(0, x.size, _BLOCK):
        block = x[start : start + _BLOCK]
        if grad is not None:
            np.add(block, grad[start : start + _BLOCK], out=block)
        magnitude = np.abs(block, out=_scratch.magnitude[: block.size])
        compare = np.greater if threshold == 0 else np.greater_equal
        mask = compare(magnitude, threshold, out=_scratch.mask[: block.size])
        positions.append(np.flatnonzero(mask) + start)
    return np.concatenate(positions)
