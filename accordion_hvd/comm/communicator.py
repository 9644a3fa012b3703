"""From requests to an engine's collectives: what is requested together travels together.

A framework's communicator supplies the engine's asynchronous primitives (some forty lines);
`accordion_hvd.comm.packing` turns requests into as few of them as it can.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from typing import Any

from accordion_hvd import check
from accordion_hvd.comm import packing
from accordion_hvd.comm.collectives import Collectives
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.core.base import Allgather, Broadcast, Request, Tensor
from accordion_hvd.core.running import Running, drive

_PATIENCE = 0.1  # of the time waited so far
_SHORTEST, _LONGEST = 1e-4, 2e-3  # seconds


class Communicator(Collectives):
    """Carries requests from one process among `size` to the others, and their results back."""

    def pause(self, waited: float) -> None:
        """Sleep between two polls of the pending operations, after `waited` seconds of polling.

        Sleeps, since engines' own waits spin and take cores from ranks that still compute; longer
        after long waits, so that looking costs next to nothing and delays by a twentieth.
        """
        time.sleep(min(max(waited * _PATIENCE, _SHORTEST), _LONGEST))

    def launch(self, name: str, requests: Sequence[Request]) -> Pending:
        """Start `requests`; all ranks must pass requests alike under the same name."""
        return Pending(self, name, requests)

    def run(
        self, name: str, conversation: Generator[Any, Any, Any], traffic: Traffic | None = None
    ) -> Any:
        """Run a conversation to its end, waiting; returns what it returns.

        Args:
            name: of its collectives, the same on all ranks.
            conversation: whose requests are carried.
            traffic: its bytes are added to it.
        """
        rounds = itertools.count()

        def serve(requests: Sequence[Request]) -> list[Any]:
            pending = self.launch(f"{name}.{next(rounds)}", requests)
            results = pending.result()
            if traffic is not None:
                traffic.add(pending.traffic)
            return results

        return drive(conversation, serve)


class Pending:
    """Pending requests; `ready()` moves them on without waiting, `result()` waits."""

    def __init__(self, communicator: Communicator, name: str, requests: Sequence[Request]) -> None:
        self.traffic = Traffic()
        self._communicator = communicator
        together = packing.together(communicator, requests)
        self._readers = [  # without the requests' tensors, which may go
            (i, request.decode, _senders(request, communicator), isinstance(request, Allgather))
            for i, request in enumerate(requests)
            if request.decode is not None
        ]
        self._results: list[Any] = [None] * len(requests)
        self._running: list[tuple[list[int], Running]] = []
        for number, members in enumerate(together):
            chosen = [requests[i] for i in members]
            label = f"{name}.{number}"
            program = packing.program(communicator, self.traffic, label, chosen)
            self._move(members, Running(program))

    def ready(self) -> bool:
        """Return whether every result is here; start operations that can follow."""
        running, self._running = self._running, []
        for members, program in running:
            self._move(members, program)
        return not self._running

    def result(self) -> list[Any]:
        """Return the results in the order of the requests. Sleeps between looks: engines spin.

        Raises:
            PayloadError: what a rank has sent does not decode.
        """
        began = time.perf_counter()
        while not self.ready():
            self._communicator.pause(time.perf_counter() - began)
        return self._decoded()

    def _decoded(self) -> list[Any]:
        """Return the results as the requests' `decode` parses them, once all payloads are valid."""
        xp, results = self._communicator.xp, list(self._results)
        senders: list[Any] = []
        doubts: list[Tensor] = []
        for i, decode, ranks, several in self._readers:
            read = []
            for rank, part in zip(ranks, results[i] if several else [results[i]], strict=True):
                try:
                    thing, doubt = decode(part)
                except ValueError as error:
                    check.refuse_payload([rank], str(error))
                read.append(thing)
                doubts.append(doubt)
                senders.append(rank)
            results[i] = tuple(read) if several else read[0]
        return xp.raise_on_invalid(results, xp.concat(doubts), senders) if doubts else results

    def _move(self, members: list[int], program: Running) -> None:
        """Advance a program until it waits for a pending operation."""
        while not program.done:
            if not self._communicator.poll(program.asked):
                self._running.append((members, program))
                return
            program.send(self._communicator.wait(program.asked))
        for member, result in zip(members, program.result, strict=True):
            self._results[member] = result


def _senders(request: Request, communicator: Communicator) -> Sequence[Any]:
    if isinstance(request, Allgather):
        return request.group or range(communicator.size)
    return [request.root if isinstance(request, Broadcast) else getattr(request, "sender", None)]
