"""Undo of operations that worked in place, should a rank report a non-finite gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Undo = Callable[[], Any]
_poison = False


class _Active(threading.local):
    entries: list[Undo] | None = None


_active = _Active()


@contextmanager
def recording(entries: list[Undo]) -> Iterator[None]:
    """Append to `entries` an undo for each in-place operation that this thread performs."""
    previous, _active.entries = _active.entries, entries
    try:
        yield
    finally:
        _active.entries = previous


def record(undo: Undo) -> None:
    """Called by an in-place operation: `undo` restores what it consumed, at worst to one ulp."""
    if _active.entries is not None:
        _active.entries.append(undo)


def rewind(entries: list[Undo]) -> None:
    """Undo everything, last first, and forget it."""
    while entries:
        entries.pop()()


@contextmanager
def poisoning() -> Iterator[None]:
    """Let NumPy's operations that consume an argument fill it with NaN: using it again shows."""
    global _poison
    _poison, previous = True, _poison
    try:
        yield
    finally:
        _poison = previous


def consume(array: np.ndarray, undo: Undo | None = None) -> np.ndarray:
    """Return the array that an in-place operation may write: `array`, or a copy when poisoning.

    Without `undo`, which takes it back, what becomes of `array` is for good.
    """
    if not _poison:
        if undo is not None:
            record(undo)
        return array
    fresh, saved = array.copy(), array.copy()
    array.fill(np.nan)
    record(lambda: np.copyto(array, saved))
    return fresh


def room(like: np.ndarray) -> np.ndarray:
    """fp32 in the shape of `like`, in its memory where possible; consumes it."""
    out = consume(like)
    if out.dtype == np.float32 and out.flags.c_contiguous and out.flags.writeable:
        return out
    return np.empty(like.shape, np.float32)
