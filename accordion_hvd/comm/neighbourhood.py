"""MPI's neighbourhood collectives, for methods whose ranks tell their neighbours something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accordion_hvd.comm.traffic import Traffic, traffic_of
from accordion_hvd.core.base import Neighbours, Tensor
from accordion_hvd.core.composition import RequestGenerator, intercept
from accordion_hvd.ops import namespace


class Neighbourhood:
    """Carries `Neighbours` requests, which always name the same ranks.

    Args:
        pause: called between two polls, with the seconds waited so far.
        comm: ranks as MPI knows them, with whose messages ours are not confused; by default all.
    """

    def __init__(self, pause: Callable[[float], None], comm: Any = None) -> None:
        from mpi4py import MPI

        self._world, self._pause = comm or MPI.COMM_WORLD, pause
        self._named: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._graph: Any = None

    def serving(self, conversation: RequestGenerator, traffic: Traffic) -> RequestGenerator:
        """Wrap an exchange: carry its `Neighbours` requests and count them in `traffic`."""

        def serve(asked: Any) -> RequestGenerator:
            if not isinstance(asked, Neighbours):
                return (yield asked)
            traffic.add(traffic_of(asked, self._world.Get_size()))
            return self.exchange(asked)

        return intercept(conversation, serve)

    def exchange(self, asked: Neighbours) -> tuple[Tensor, ...]:
        """Return the result of the request; all ranks call it together."""
        if self._named is None:
            self._named = asked.of, asked.to
            self._graph = self._world.Create_dist_graph_adjacent(list(asked.of), list(asked.to))
        assert self._named == (asked.of, asked.to), "the topology has changed"
        xp = namespace(asked.tensor)
        sent = np.ascontiguousarray(xp.to_numpy(xp.to_bytes(asked.tensor)))
        room = np.empty((len(asked.of), sent.size), np.uint8)
        began, under_way = time.perf_counter(), self._graph.Ineighbor_allgather(sent, room)
        while not under_way.Test():
            self._pause(time.perf_counter() - began)
        kind = xp.dtype(asked.tensor), xp.shape(asked.tensor)
        device = xp.device(asked.tensor)
        return tuple(xp.from_bytes(xp.asarray(row, device), *kind) for row in room)

    def close(self) -> None:
        """Free what MPI keeps for it; collective."""
        if self._graph is not None:
            self._graph.Free()
            self._named = self._graph = None
