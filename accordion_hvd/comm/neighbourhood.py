"""MPI's neighbourhood collectives, for methods whose ranks send messages to their neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accordion_hvd.comm import mpi
from accordion_hvd.comm.traffic import Traffic, traffic_of
from accordion_hvd.core.base import Neighbours, Tensor
from accordion_hvd.core.running import RequestGenerator, intercept
from accordion_hvd.ops import namespace


class Neighbourhood:
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

    def exchange(self, asked: Neighbours) -> tuple[Tensor, ...]:
        """Serve a request and return its result; collective."""
        with mpi.in_use():
            return self._exchange(asked)

    def _exchange(self, asked: Neighbours) -> tuple[Tensor, ...]:
        if self._named is None:
            mpi.free_retired()
            self._named = asked.of, asked.to
            self._graph = self._world.Create_dist_graph_adjacent(list(asked.of), list(asked.to))
        assert self._named == (asked.of, asked.to), "the topology has changed"
        xp = namespace(asked.tensor)
        sent = np.ascontiguousarray(xp.to_numpy(xp.to_bytes(asked.tensor)))
        received = np.empty((len(asked.of), sent.size), np.uint8)
        began, operation = time.perf_counter(), self._graph.Ineighbor_allgather(sent, received)
        while not operation.Test():
            self._pause(time.perf_counter() - began)
        kind = xp.dtype(asked.tensor), xp.shape(asked.tensor)
        device = xp.device(asked.tensor)
        return tuple(xp.from_bytes(xp.asarray(row, device), *kind) for row in received)

    def close(self) -> None:
        """Give up the MPI communicator of the neighbourhood; collective."""
        if self._graph is not None:
            mpi.retire(self._graph)
            self._named = self._graph = None
