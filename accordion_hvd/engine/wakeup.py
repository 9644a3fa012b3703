"""Waking another process' thread that sleeps: a datagram beside each message.

Waiting inside MPI takes a whole core, and polling it often enough for short delays several
percent of one. A thread that sleeps in poll(2) until a datagram comes takes next to nothing. A
datagram is a hint only: what it says is never read, and a lost one is made up for by a time limit.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Any

_PATIENCE = 0.05  # seconds that a lost datagram costs
_WITHOUT = 0.002  # between looks, where datagrams do not arrive
_TRIAL = 2.0  # seconds in which neighbours' first ones must come


class Wakeup:
    """One for each rank; made together.

    Args:
        comm: an mpi4py communicator, used for addresses only.
        neighbours: ranks that are tried to be rung.

    Attributes:
        heard: whether all ranks were heard; else waiting means looking every two milliseconds.
    """

    def __init__(self, comm: Any, neighbours: list[int]) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        names = comm.allgather(socket.gethostname())
        self._socket.bind((_own_address(names), 0))
        self._addresses = comm.allgather(self._socket.getsockname())
        self._rank = comm.Get_rank()
        self.heard = all(comm.allgather(self._try(neighbours, comm)))

    def ring(self, rank: int | None = None) -> None:
        """Wake a rank's thread; by default this rank's."""
        try:
            address = self._addresses[self._rank if rank is None else rank]
            self._socket.sendto(self._rank.to_bytes(4, "little"), address)
        except OSError:
            pass  # a hint that is lost

    def wait(self) -> None:
        """Sleep until somebody rings, but not for long."""
        if self._poll.poll(1000 * (_PATIENCE if self.heard else _WITHOUT)):
            self._drain()

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    def _drain(self) -> set[bytes]:
        found = set()
        try:
            while True:
                found.add(self._socket.recv(8))
        except OSError:
            return found

    def _try(self, neighbours: list[int], comm: Any) -> bool:
        """Return whether the other ranks' datagrams reach this rank."""
        due = {
            rank for rank, theirs in enumerate(comm.allgather(neighbours)) if self._rank in theirs
        }
        for rank in neighbours:
            self.ring(rank)
        waiting, until = {rank.to_bytes(4, "little") for rank in due}, time.monotonic() + _TRIAL
        while waiting and time.monotonic() < until:
            self._poll.poll(100)
            waiting -= self._drain()
        return not waiting


def _own_address(names: list[str]) -> str:
    """Return the address at which other ranks reach this process, as local as possible."""
    others = sorted(set(names) - {socket.gethostname()})
    if not others:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"  # nobody elsewhere will be heard
