"""Wakeup of a sleeping thread in another process by datagrams that accompany MPI messages.

Waiting inside MPI occupies a full core. Polling MPI often enough for short delays takes several
percent of a core. A thread that sleeps in poll(2) until a datagram arrives takes almost no time. A
datagram is only a hint: its content does not matter, and a time limit makes up for a lost one.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Any

_TIMEOUT = 0.05  # seconds of delay by a lost datagram
_POLL_INTERVAL = 0.002  # seconds between polls of MPI where datagrams do not arrive
_TEST_TIMEOUT = 2.0  # seconds to wait for the neighbours' first datagrams


class Wakeup:
    """A rank's socket for wakeups; collective.

    Args:
        comm: an mpi4py communicator, used only to set up the sockets.
        neighbours: ranks to which this rank sends a first datagram as a test.

    Attributes:
        heard: whether all test datagrams arrived on all ranks. If not, `wait` returns after two
            milliseconds, so that its caller polls MPI.
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
        """Wake the thread of `rank`; by default that of this rank."""
        try:
            address = self._addresses[self._rank if rank is None else rank]
            self._socket.sendto(self._rank.to_bytes(4, "little"), address)
        except OSError:
            pass  # datagrams are hints and may be lost

    def wait(self) -> None:
        """Sleep until a datagram arrives or the time limit has passed."""
        if self._poll.poll(1000 * (_TIMEOUT if self.heard else _POLL_INTERVAL)):
            self._drain()

    def close(self) -> None:
        self._socket.close()

    def _drain(self) -> set[bytes]:
        received = set()
        try:
            while True:
                received.add(self._socket.recv(8))
        except OSError:
            return received

    def _try(self, neighbours: list[int], comm: Any) -> bool:
        """Return whether the test datagrams of other ranks reach this rank."""
        senders = {
            rank for rank, theirs in enumerate(comm.allgather(neighbours)) if self._rank in theirs
        }
        for rank in neighbours:
            self.ring(rank)
        missing, until = (
            {rank.to_bytes(4, "little") for rank in senders},
            time.monotonic() + _TEST_TIMEOUT,
        )
        while missing and time.monotonic() < until:
            self._poll.poll(100)
            missing -= self._drain()
        return not missing


def _own_address(names: list[str]) -> str:
    """Return the address at which other ranks reach this process: loopback on a single host."""
    others = sorted(set(names) - {socket.gethostname()})
    if not others:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"  # then datagrams from other hosts do not arrive
