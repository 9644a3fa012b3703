"""MPI while this process uses it, and its neighbourhood collectives.

Horovod ends MPI in a thread of its own as soon as any rank leaves, whatever the other threads of
this process do. A call of MPI that comes later, or is still running, then crashes the process.
MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI 4.1, section 11.2.4), and the
function that deletes ours waits for the calls in `in_use`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from accordion_hvd.comm.collectives import Traffic, traffic_of
from accordion_hvd.core.base import Neighbours, Tensor
from accordion_hvd.core.running import RequestGenerator, intercept
from accordion_hvd.ops import namespace

_changed = threading.Condition()
_uses = 0
_retired: list[Any] = []


@contextmanager
def in_use() -> Iterator[None]:
    """Let MPI continue until the end of the `with` block, or of the decorated function."""
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


# ------------------------------------------------------------------------ neighbourhood collectives
class MPINeighbours:
    """An MPI neighbourhood, which serves `Neighbours` requests that all name the same ranks.

    Its messages use an MPI communicator of their own, separate from other messages over `comm`.

    Args:
        pause: function that is called between two polls, with the seconds waited so far.
    """

    def __init__(self, pause: Callable[[float], None], comm: Any = None) -> None:
        from mpi4py import MPI

        self._world, self._pause = comm or MPI.COMM_WORLD, pause
        self._named: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._graph: Any = None

    def serving(self, exchange: RequestGenerator, traffic: Traffic) -> RequestGenerator:
        """Run a generator: serve its `Neighbours` requests, count their bytes, yield the others."""

        def serve(asked: Any) -> RequestGenerator:
            if not isinstance(asked, Neighbours):
                return (yield asked)
            traffic.add(traffic_of([asked], self._world.Get_size()))
            return self.exchange(asked)

        return intercept(exchange, serve)

    @in_use()
    def exchange(self, asked: Neighbours) -> tuple[Tensor, ...]:
        if self._named is None:
            free_retired()
            self._named = asked.of, asked.to
            self._graph = self._world.Create_dist_graph_adjacent(list(asked.of), list(asked.to))
        assert self._named == (asked.of, asked.to), "the topology has changed"
        xp = namespace(asked.tensor)
        sent = np.ascontiguousarray(xp.to_numpy(xp.to_bytes(asked.tensor)))
        received = np.empty((len(asked.of), sent.size), np.uint8)
        began, operation = time.perf_counter(), self._graph.Ineighbor_allgather(sent, received)
        while not operation.Test():  # a wait within MPI would occupy a core
            self._pause(time.perf_counter() - began)
        kind = xp.dtype(asked.tensor), xp.shape(asked.tensor)
        device = xp.device(asked.tensor)
        return tuple(xp.from_bytes(xp.asarray(row, device), *kind) for row in received)

    def close(self) -> None:
        """Give up the MPI communicator of the neighbourhood; collective."""
        if self._graph is not None:
            retire(self._graph)
            self._named = self._graph = None
