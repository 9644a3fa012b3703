"""How to take back what was done in place, should a rank report a non-finite gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], None]


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
