"""Checkpoints of an older version in `tests/engine/saved`: their gradients and expected results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

SAVED = Path(__file__).resolve().parents[1] / "engine" / "saved"
LR = 0.1
MORE = 6
"""Steps after a checkpoint whose results are known."""


def values(name: str, shape: tuple[int, ...], rank: int, step: int) -> np.ndarray:
    """Return values that are equal on every host.

    Most rows of large matrices are zeros, so that files are small.
    """
    size = int(np.prod(shape))
    numbers = np.arange(size) + 31 * rank + 17 * step + 7 * len(name) + ord(name[0])
    found = ((numbers**3 + 5 * numbers) % 97 / 48.5 - 1).astype(np.float32).reshape(shape)
    if size >= 1024:
        found[np.arange(shape[0]) % 6 > 0] = 0
    return found * np.float32({"v": 2 ** (step // 2), "w": 4 if step > 8 else 1}.get(name, 1))


def digest(arrays: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return 60 numbers that distinguish results from each other; NaN if there is no result."""
    if arrays is None:
        return np.full(60, np.nan)
    flat = np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)]).astype(float)
    weighed = flat * np.cos(np.arange(flat.size))
    return np.concatenate([[np.linalg.norm(flat), weighed.sum()], np.resize(flat, 58 * 5)[::5]])


def results(folder: Path) -> np.ndarray:
    with np.load(folder / "expected.npz") as file:
        return file["results"]
