"""Communicators that record an exchange's operations, or rehearse it on one rank.

Recording a request costs no more than its tensor on one rank, also where thousands of ranks take
part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm import local, packing
from accordion_hvd.comm.collectives import Group, Sizes, Traffic, size_of
from accordion_hvd.comm.communicator import Pending
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Alltoall,
    ExchangeGenerator,
    Hosts,
    Neighbours,
    Request,
    Tensor,
    consecutive,
)
from accordion_hvd.core.running import Running

Rounds = tuple[tuple[Request, ...], ...]

CHAIN = re.compile(r"(.*\.r\d+)\.(\d+)")
"""Name of a launch and number of a chain, in the name of an operation."""

FEW = 16
"""Ranks up to which an exchange generator runs to its end."""

LARGE = 16 << 20
"""Bytes by which answers may exceed the rank's own tensors, if a generator of more ranks is to
receive them. Those of an alltoall or an allreduce do not exceed them on any number of ranks."""


@dataclass(frozen=True)
class Operation:
    """One operation of an engine, as rank 0 sees it.

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall" or "neighbours".
        size: bytes that the rank passes.
        group: the ranks that take part, or None for all; in a simulation of all ranks' requests,
            the groups of all ranks (`simulation.links.MemberTimes`).
    """

    kind: str
    size: float
    group: Any = None


Launch = tuple[tuple[Operation, ...], ...]
"""Chains of operations that start together; the operations of a chain follow one another."""


class Recorded(Pending):
    """The answers to recorded requests, as if all ranks had sent this rank's tensors."""

    def __init__(self, communicator: RecordingCommunicator, requests: Sequence[Request]) -> None:
        self.traffic = communicator.traffic(requests)
        self._answers = [communicator.answer(request) for request in requests]

    def ready(self) -> bool:
        return True

    def result(self, checked: bool = True) -> list[Any]:
        return self._answers


class RecordingCommunicator(LocalCommunicator):
    """The communicator of rank 0 of `size` ranks; it records requests and sends nothing.

    The engine is assumed to add fp16, as NCCL does.

    Attributes:
        launched: (name, operations) of all launches so far.
    """

    native_fp16_allreduce = True

    def __init__(self, xp: ModuleType, size: int, hosts: Hosts = ()) -> None:
        super().__init__(xp, size)
        self.hosts = hosts
        self.launched: list[tuple[str, Launch]] = []

    def launch(self, name: str, requests: Sequence[Request]) -> Pending:
        self.launched.append((name, self.chains(requests)))
        return Recorded(self, requests)

    def pause(self, waited: float) -> None:
        """Return at once: all requests are answered."""

    def traffic(self, requests: Sequence[Request]) -> Traffic:
        traffic = Traffic()
        for request in requests:
            if packing.key(self, request)[0] != "single":
                total = self.ranks(request.group) * size_of(request.tensor)
                uneven = isinstance(request, Allgather) and request.uneven
                packing.count(self, traffic, [request], total if uneven else None)
        return traffic

    def chains(self, requests: Sequence[Request]) -> Launch:
        return tuple(
            tuple(self._chain([requests[i] for i in members]))
            for _, members in packing.together(self, requests)
        )

    def _chain(self, requests: Sequence[Request]) -> list[Operation]:
        first = requests[0]
        kind: str = packing.key(self, first)[0]
        group, size = first.group, self.traffic(requests).payload
        if kind == "single":
            return []
        if kind in ("half", "small"):
            part = size / self.ranks(group)
            return [Operation("alltoall", size, group), Operation("allgather", part, group)]
        if kind == "uneven":
            sizes = Operation("allgather", 8 * len(requests), group)
            return [sizes, Operation("allgather", size, group)]
        if isinstance(first, Allreduce):
            return [Operation("allreduce", size, group)]
        names = {"gather": "allgather", "splits": "alltoall"}
        return [Operation(names.get(kind, kind), size, group)]

    def received(self, request: Request) -> int:
        parts = 1
        if isinstance(request, Allgather):
            parts = self.ranks(request.group)
        if isinstance(request, Neighbours):
            parts = len(request.of)
        return parts * size_of(request.tensor)

    def answer(self, request: Request) -> Any:
        """Return the result of a request if all ranks send this rank's tensor.

        The result may be in the memory of the request's tensor.
        """
        part, ranks = request.tensor, self.ranks(request.group)
        if isinstance(request, Allreduce):
            part = local.repeated(self.xp, part, request.op, ranks)
        if request.decode is not None and isinstance(request, Alltoall):
            return tuple(request.decode(row)[0] for row in self.xp.unstack(part))
        if request.decode is not None:
            part = request.decode(part)[0]
        if isinstance(request, Neighbours):
            return (part,) * len(request.of)
        return (part,) * ranks if isinstance(request, Allgather) else part


def record(
    make: Callable[[int, Hosts], ExchangeGenerator], xp: ModuleType, ranks: int, hosts: Hosts = ()
) -> Rounds:
    """Return the requests of an exchange generator, round by round, with tensors of zeros.

    The generator runs to its last requests. To find out which these are, it runs to its end on few
    ranks first: the answers of thousands of ranks can be large, and so can their decoding. If the
    answers to earlier requests exceed `LARGE`, the later requests are those on few ranks.

    Args:
        make: returns the generator of rank 0, given the number of ranks and the hosts.

    Raises:
        ValueError: if answers exceed `LARGE` and the later requests depend on the number of ranks.
    """
    local = len(hosts[0]) if hosts else 1
    few = max(2 * local, 2)

    def run(size: int, number: int | None = None) -> Rounds:
        given = hosts if size == ranks else (consecutive(size, local) if hosts else ())
        return _run(make(size, given), RecordingCommunicator(xp, size, given), number)

    if ranks <= max(few, FEW):
        return run(ranks)
    nearby = run(few)
    rounds = run(ranks, len(nearby))
    rest = nearby[len(rounds) :]
    if rest and _shapes(run(2 * few)[len(rounds) :]) != _shapes(rest):
        allowed = f"fewer, since the answers have more than {LARGE} bytes"
        check.refuse("record", "ranks", ranks, allowed)
    return rounds + tuple(tuple(_among(x, hosts) for x in requests) for requests in rest)


def _among(request: Request, hosts: Hosts) -> Request:
    """Return a request of few hosts, addressed to the same group of all hosts."""
    if request.group is None or request.group == hosts[0]:
        return request
    return replace(request, group=tuple(host[0] for host in hosts))


def _run(
    exchange: ExchangeGenerator, communicator: RecordingCommunicator, number: int | None
) -> Rounds:
    running = Running(exchange)
    rounds: list[tuple[Request, ...]] = []
    while not running.done:
        requests = running.requests
        rounds.append(tuple(map(_without_values, requests)))
        excess = sum(communicator.received(x) - size_of(x.tensor) for x in requests)
        if number is not None and (len(rounds) == number or excess > LARGE):
            running.close()
            break
        # Answers may lie in the requests' memory, which the generator may overwrite.
        copies = [replace(x, tensor=communicator.xp.copy(x.tensor)) for x in requests]
        running.answer([communicator.answer(request) for request in copies])
    return tuple(rounds)


def _shapes(rounds: Rounds) -> list[list[tuple[Any, ...]]]:
    return [[(type(x), x.tensor.dtype, x.tensor.shape) for x in requests] for requests in rounds]


def _without_values(request: Request) -> Request:
    # A view of one element, which takes no memory.
    tensor = np.broadcast_to(np.zeros((), request.tensor.dtype), request.tensor.shape)
    if isinstance(request, Allreduce):
        return replace(request, tensor=tensor, decode=None, reuse=True)
    return replace(request, tensor=tensor, decode=None)


# --------------------------------------------------------- the rehearsal of an exchange on one rank
class RehearsalCommunicator(LocalCommunicator):
    """The communicator of rank 0 of `size` ranks that all pass the same tensors.

    Requests are packed and unpacked as in a job. Only the engine's operations are replaced.

    Attributes:
        launches: chains of operations so far, by the names of their launches and their numbers.
        seconds: time spent on what engines would do outside of the training thread.
    """

    def __init__(self, xp: ModuleType, size: int, hosts: Hosts, native_fp16: bool) -> None:
        super().__init__(xp, size)
        self.hosts, self.native_fp16_allreduce, self.scratch = hosts, native_fp16, {}
        self.launches: dict[str, dict[str, list[Operation]]] = {}
        self.seconds = 0.0

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        reduce = partial(super().allreduce, name, tensors, op, group)
        return self._answer(name, "allreduce", tensors, group, reduce)

    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        gather = partial(super().allgather, name, tensor, group, lengths)
        return self._answer(name, "allgather", [tensor], group, gather)

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        broadcast = partial(super().broadcast, name, tensor, root, group)
        return self._answer(name, "broadcast", [tensor], group, broadcast)

    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        exchange = partial(super().alltoall, name, tensor, group, splits)
        return self._answer(name, "alltoall", [tensor], group, exchange)

    @property
    def launched(self) -> list[tuple[str, Launch]]:
        return [(name, tuple(map(tuple, x.values()))) for name, x in self.launches.items()]

    def poll(self, handle: Any) -> bool:
        # False once for each operation, as if it took a while.
        handle["polled"], polled = True, handle["polled"]
        return polled

    def wait(self, handle: Any) -> Any:
        return handle["result"]

    def pause(self, waited: float) -> None:
        """Return at once."""

    def _answer(
        self, name: str, kind: str, tensors: list[Tensor], group: Group, make: Callable[[], Any]
    ) -> dict[str, Any]:
        if place := CHAIN.match(name):
            chains = self.launches.setdefault(place[1], {})
            operation = Operation(kind, float(sum(map(size_of, tensors))), group)
            chains.setdefault(place[2], []).append(operation)
        began = time.perf_counter()
        handle = {"result": make(), "polled": False}
        self.seconds += time.perf_counter() - began
        return handle
