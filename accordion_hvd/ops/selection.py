"""Which elements of a long vector are largest: the fastest exact way known on a CPU."""

from __future__ import annotations

import functools

import numpy as np

_SAMPLE = 1 << 14
_DIRECT = 1 << 16
_BLOCK = 1 << 18


def largest(x: np.ndarray, count: int) -> np.ndarray:
    """Indices (int32, ascending) of the `count` largest magnitudes of the vector `x`.

    A threshold read off a sample lets a few more than `count` candidates pass, among which the
    selection is exact; it is exact whenever at least `count` pass, and else starts over on all.
    NaN counts as smallest. Of zeros, the first are taken.
    """
    if count >= x.size:
        return np.arange(x.size, dtype=np.int32)
    if x.size >= _DIRECT:
        threshold = _threshold(x, count)
        candidates = np.flatnonzero(x) if threshold == 0 else _above(x, threshold)
        if candidates.size >= count:
            return candidates[_largest_of(x[candidates], count)].astype(np.int32)
        if threshold == 0 and not np.isnan(x[candidates]).any():
            return _filled(candidates, count).astype(np.int32)
    return _largest_of(x, count).astype(np.int32)


def _filled(chosen: np.ndarray, count: int) -> np.ndarray:
    """`chosen` and the first others, `count` in all; ascending."""
    others = np.setdiff1d(np.arange(min(count + chosen.size, 1 << 31)), chosen)
    return np.sort(np.concatenate([chosen, others[: count - chosen.size]]))


def _threshold(x: np.ndarray, count: int) -> float:
    """A magnitude that somewhat more than `count` elements of `x` exceed."""
    sample = np.abs(x[_places(x.size)])
    wanted = sample.size * count / x.size
    wanted = min(sample.size, int(wanted + 3 * wanted**0.5) + 1)  # three standard deviations more
    return float(np.partition(sample, sample.size - wanted)[sample.size - wanted])


@functools.lru_cache(maxsize=256)
def _places(size: int) -> np.ndarray:
    """Where to look for a sample: scattered, since regular steps fall in with rows and columns."""
    return np.random.Generator(np.random.Philox(size)).integers(0, size, _SAMPLE, np.int32)


def _above(x: np.ndarray, threshold: float) -> np.ndarray:
    """Indices of magnitudes of at least `threshold`, block by block so that each stays in cache."""
    found = []
    for start in range(0, x.size, _BLOCK):
        block = np.abs(x[start : start + _BLOCK])
        found.append(np.flatnonzero(block >= threshold) + start)
    return np.concatenate(found)


def _largest_of(x: np.ndarray, count: int) -> np.ndarray:
    magnitude = np.abs(x)
    magnitude[np.isnan(magnitude)] = -1
    chosen = np.argpartition(magnitude, x.size - count)[x.size - count :]
    chosen.sort()
    return chosen
