"""Undo of in-place operations, in case a rank reports a non-finite gradient."""

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
    """Append an undo function to `entries` for each in-place operation of this thread."""
    previous, _active.entries = _active.entries, entries
    try:
        yield
    finally:
        _active.entries = previous


def record(undo: Undo) -> None:
    """Record `undo`, which restores a consumed argument, in the worst case to within one ulp."""
    if _active.entries is not None:
        _active.entries.append(undo)


def rewind(entries: list[Undo]) -> None:
    while entries:
        entries.pop()()


@contextmanager
def poisoning() -> Iterator[None]:
    """Make NumPy operations fill consumed arguments with NaN, to expose later uses."""
    global _poison
    _poison, previous = True, _poison
    try:
        yield
    finally:
        _poison = previous


def consume(array: np.ndarray, undo: Undo | None = None) -> np.ndarray:
    """Return the array that an in-place operation may write: `array`, or a copy when poisoning.

    `undo` restores `array`; None if the operation is irreversible.
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
    """Return fp32 memory in the shape of `like`, which it consumes and reuses where possible."""
    out = consume(like)
    if out.dtype == np.float32 and out.flags.c_contiguous and out.flags.writeable:
        return out
    return np.empty(like.shape, np.float32)
