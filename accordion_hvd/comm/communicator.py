"""The base class of communicators, which serve requests by an engine's collectives.

The communicator of a framework supplies the engine's asynchronous operations, in some forty lines.
`accordion_hvd.comm.packing` packs requests that are launched together into as few operations as
possible.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from accordion_hvd import check
from accordion_hvd.comm import packing, timeouts
from accordion_hvd.comm.collectives import Collectives, Traffic
from accordion_hvd.core.base import Allgather, Alltoall, Broadcast, Request, Tensor
from accordion_hvd.core.running import Running, drive
from accordion_hvd.ops import on_cpu

_PAUSE = 0.1  # length of a pause, as a part of the time waited so far
_SHORTEST, _LONGEST = 1e-4, 2e-3  # seconds
_SAFE = 1.0  # seconds; no timeout is shorter, so that most polls need not read it


class ProcessSet(Protocol):
    """A set of ranks, of Horovod or of torch.distributed (`hvd.ProcessSet`)."""

    def size(self) -> int | None:
        """Return the number of ranks; None if the process set has not been added."""

    def rank(self) -> int | None:
        """Return this process' rank within the set; None if the set has not been added."""

    def included(self) -> bool | None:
        """Return whether this process is a member; None if the ranks are not known yet."""


class RankLost(RuntimeError):
    """Raised if other ranks do not take part in an operation within the timeout."""


class Communicator(Collectives):
    def pause(self, waited: float) -> None:
        """Sleep between two polls of the pending operations, after `waited` seconds of polling.

        The engines' own waits spin, which takes cores from ranks that still compute. Pauses grow
        with the time waited, so that polling costs almost nothing and adds 5 % to the wait on
        average.

        Raises:
            RankLost: after ACCORDION_HVD_TIMEOUT seconds (default: 900).
        """
        if waited > _SAFE and waited > timeouts.seconds():
            raise RankLost(
                f"rank {self.rank} of {self.size} has waited for {waited:.0f} s: a rank does not "
                f"answer, or takes more than {timeouts.VARIABLE} seconds before its next exchange."
            )
        time.sleep(min(max(waited * _PAUSE, _SHORTEST), _LONGEST))

    def until(self, done: Callable[[], bool]) -> None:
        """Call `done`, which continues what is pending, until it returns True."""
        wait = timeouts.Wait()
        while not done():
            self.pause(wait.seconds())

    def watch(self, began: Callable[[], float]) -> None:
        """Have waits within graphs observed, if the engine has no timeout for them.

        Args:
            began: a function that returns a number for the present wait, such as the time at which
                it began; 0 between waits.
        """

    def launch(self, name: str, requests: Sequence[Request]) -> Pending:
        """Start requests, equal in name, kinds and sizes on all ranks; return a handle."""
        return Pending(self, name, requests)

    def run(
        self, name: str, exchange: Generator[Any, Any, Any], traffic: Traffic | None = None
    ) -> Any:
        """Run a generator of requests to its end; add their bytes to `traffic`."""
        rounds = itertools.count()

        def serve(requests: Sequence[Request]) -> list[Any]:
            pending = self.launch(f"{name}.{next(rounds)}", requests)
            results = pending.result()
            if traffic is not None:
                traffic.add(pending.traffic)
            return results

        return drive(exchange, serve)


class Pending:
    """Requests that were started together; `ready()` polls them, `result()` waits for them.

    Attributes:
        doubts: flags of the decoded payloads, and who sent them; None if they are checked.
    """

    doubts: tuple[Tensor, Sequence[Any]] | None = None

    def __init__(self, communicator: Communicator, name: str, requests: Sequence[Request]) -> None:
        self.traffic = Traffic()
        self._communicator = communicator
        together = packing.together(communicator, requests)
        self._decoders = [  # without the requests' tensors, so that their memory can be freed
            (i, request.decode, _senders(request, communicator), getattr(request, "rows", None))
            for i, request in enumerate(requests)
            if request.decode is not None
        ]
        self._results: list[Any] = [None] * len(requests)
        self._running: list[tuple[list[int], Running]] = []
        for number, (kind, members) in enumerate(together):
            chosen = [requests[i] for i in members]
            label = f"{name}.{number}"
            program = packing.program(communicator, self.traffic, label, kind, chosen)
            self._move(members, Running(program))

    def ready(self) -> bool:
        """Return whether all results have arrived; start the operations that can follow.

        If the engine matches operations by their order (`Collectives.ordered`), wait for the
        present operation of each program, so that all ranks start the following ones in the same
        order.
        """
        running, self._running = self._running, []
        for members, program in running:
            if self._communicator.ordered:
                program.send(self._communicator.wait(program.asked))
            self._move(members, program)
        return not self._running

    def result(self, checked: bool = True) -> list[Any]:
        """Wait for the results and return them in the order of the requests.

        Args:
            checked: whether to read the flags of payloads now, for which the host would wait for an
                accelerator; otherwise `doubts` holds them.

        Raises:
            PayloadError: if the payload of a rank does not decode.
        """
        self._communicator.until(self.ready)
        return self._decoded(checked)

    def _decoded(self, checked: bool) -> list[Any]:
        xp, results = self._communicator.xp, list(self._results)
        senders: list[Any] = []
        flags: list[Tensor] = []
        for i, decode, ranks, rows in self._decoders:
            parts = [results[i]] if rows is None else results[i]  # None: it is for one rank
            parts = parts if isinstance(parts, (list, tuple)) else xp.unstack(parts)
            # On an accelerator, one call for the parts of all ranks costs less than one for each.
            if rows and not on_cpu(xp.device(parts[0])):
                values, invalid = decode(xp.stack(parts))
                results[i] = tuple(zip(*map(xp.unstack, values), strict=True))
                flags.append(invalid)
                senders += ranks
                continue
            decoded = []
            for rank, part in zip(ranks, parts, strict=True):
                try:
                    value, invalid = decode(part)
                except ValueError as error:
                    check.refuse_payload([rank], str(error))
                decoded.append(value)
                flags.append(invalid)
                senders.append(rank)
            results[i] = decoded[0] if rows is None else tuple(decoded)
        if not flags:
            return results
        doubts = xp.concat(flags)
        if checked or xp.symbolic(doubts):  # a graph checks by an assertion in it
            return xp.raise_on_invalid(results, doubts, senders)
        self.doubts = doubts, senders
        return results

    def _move(self, members: list[int], program: Running) -> None:
        communicator = self._communicator
        while not program.done:
            # A poll differs between ranks. Ordered engines go on in `ready` only, in one order.
            if communicator.ordered or not communicator.poll(program.asked):
                self._running.append((members, program))
                return
            program.send(communicator.wait(program.asked))
        for member, result in zip(members, program.result, strict=True):
            self._results[member] = result


def _senders(request: Request, communicator: Communicator) -> Sequence[Any]:
    if isinstance(request, Allgather | Alltoall):
        return request.group or range(communicator.size)
    return [request.root if isinstance(request, Broadcast) else getattr(request, "sender", None)]


# ------------------------------------------------------------------------------------------ engines
@dataclass(frozen=True)
class Engine:
    """An engine: it connects ranks, carries their tensors, or both.

    Attributes:
        name: name in `init(engine=...)` and ACCORDION_HVD_ENGINE.
        launched: whether the launcher of this process, or the script, connects ranks with it.
        installed: whether it can serve a process that no launcher has started.
        interface: returns the module with the interface of `horovod.torch`.
        init: connects the ranks; takes the arguments of `horovod.torch.init`.
        connect: returns a communicator of the ranks of a process set.
        process_set_of: returns the process set of ranks; the global one for None or if there is
            none.
        join: connects the ranks that another engine, of the given interface, has connected, to
            carry their tensors; None if the engine cannot do so.
    """

    name: str
    launched: Callable[[], bool]
    installed: Callable[[], bool]
    interface: Callable[[], Any]
    init: Callable[..., Any]
    connect: Callable[[Any], Communicator]
    process_set_of: Callable[[list[int] | None], Any]
    join: Callable[[Any], None] | None = None
