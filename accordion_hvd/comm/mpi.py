"""Keep MPI running while this process uses it.

Horovod ends MPI in a thread of its own as soon as any rank leaves, whatever the other threads of
this process do. A call of MPI that comes later, or is still running, then crashes the process.
MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI 4.1, section 11.2.4), and the
function that deletes ours waits for the calls in `in_use`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_changed = threading.Condition()
_uses = 0
_retired: list[Any] = []


@contextmanager
def in_use() -> Iterator[None]:
    """Let MPI continue until the end of the `with` block."""
    global _uses
    _delay_end()
    with _changed:
        _uses += 1
    try:
        yield
    finally:
        with _changed:
            _uses -= 1
            _changed.notify_all()


def retire(comm: Any) -> None:
    """Take a communicator that is no longer needed.

    `free_retired` frees it. Freeing it here could wait for a lock of Open MPI's attributes, which
    MPI_Finalize holds while it waits for this thread.
    """
    _retired.append(comm)


def free_retired() -> None:
    """Free retired communicators; all ranks call it before they make new ones."""
    while _retired:
        _retired.pop(0).Free()


@functools.cache
def _delay_end() -> None:
    from mpi4py import MPI

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_wait), None)


def _wait(*_: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        return  # a script that ends MPI itself may wait for nobody
    with _changed:
        _changed.wait_for(lambda: _uses == 0)
