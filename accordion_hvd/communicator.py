"""From requests to an engine's collectives: what is requested together travels together.

A framework's communicator supplies the engine's asynchronous primitives (some forty lines); this
module packs requests into as few of them as it can, and emulates what engines cannot do.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Conversation,
    Request,
    Tensor,
)
from accordion_hvd.traffic import Traffic, traffic_of

Group = tuple[int, ...] | None
Program = Generator[Any, Any, list[Tensor]]
"""Yields handles of the engine's operations, is sent their results, returns the results wanted."""

_APART = 1 << 18  # bytes from which a tensor is not worth copying into a common buffer
_PAUSE = 5e-5  # seconds between two looks at operations under way


class Communicator(abc.ABC):
    """One process among `size`; `rank` is its number.

    Attributes:
        xp: the operations of the framework whose tensors it carries.
        half_allreduce: whether the engine adds 16-bit floats well (NCCL does).
    """

    rank: int
    size: int
    xp: ModuleType
    half_allreduce: bool = False

    # ------------------------------------------------- the engine: return a handle without waiting
    @abc.abstractmethod
    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """Start one combination of several tensors, whose memory it may use."""

    @abc.abstractmethod
    def allgather(self, name: str, tensor: Tensor, group: Group) -> Any:
        """Start gathering vectors, whose lengths may differ; the result is their concatenation."""

    @abc.abstractmethod
    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        """Start sending a vector from `root`."""

    @abc.abstractmethod
    def alltoall(self, name: str, tensor: Tensor, group: Group) -> Any:
        """Start sending equal parts of a vector to everybody; the result has the same length."""

    @abc.abstractmethod
    def poll(self, handle: Any) -> bool:
        """Whether `wait` would return at once."""

    @abc.abstractmethod
    def wait(self, handle: Any) -> Any:
        """The result of an operation; a list for `allreduce`."""

    # --------------------------------------------------------------------------- what callers use
    def ranks(self, group: Group) -> int:
        """How many take part in `group`."""
        return self.size if group is None else len(group)

    def pause(self) -> None:
        """Called between two looks at what is under way: sleep, since engines' waits spin."""
        time.sleep(_PAUSE)

    def launch(self, name: str, requests: Sequence[Request]) -> Pending:
        """Start `requests`; all ranks must pass requests alike under the same name."""
        return Pending(self, name, requests)

    def run(self, name: str, conversation: Generator[Any, Any, Any]) -> Any:
        """Run a conversation to its end, waiting; returns what it returns."""
        result, round_ = None, 0
        while True:
            try:
                wanted = conversation.send(result)
            except StopIteration as stop:
                return stop.value
            several = isinstance(wanted, tuple)
            answers = self.launch(f"{name}.{round_}", wanted if several else (wanted,)).result()
            result, round_ = (tuple(answers) if several else answers[0]), round_ + 1


class Pending:
    """Requests under way; `ready()` moves them on without waiting, `result()` waits."""

    def __init__(self, communicator: Communicator, name: str, requests: Sequence[Request]) -> None:
        self.traffic = Traffic()
        self._communicator = communicator
        self._results: list[Any] = [None] * len(requests)
        self._running: list[tuple[list[int], Program, Any]] = []
        for number, (members, program) in enumerate(self._programs(requests)):
            labelled = program(f"{name}.{number}", [requests[i] for i in members])
            self._move(members, labelled, None)

    def ready(self) -> bool:
        """Whether every result is here; starts what follows on what has arrived."""
        running, self._running = self._running, []
        for members, program, handle in running:
            if self._communicator.poll(handle):
                self._move(members, program, self._communicator.wait(handle))
            else:
                self._running.append((members, program, handle))
        return not self._running

    def result(self) -> list[Any]:
        """The results in the order of the requests. Sleeps between looks: engines spin."""
        while not self.ready():
            self._communicator.pause()
        return self._results

    def _move(self, members: list[int], program: Program, answer: Any) -> None:
        while True:
            try:
                handle = program.send(answer)
            except StopIteration as stop:
                for member, result in zip(members, stop.value, strict=True):
                    self._results[member] = result
                return
            if not self._communicator.poll(handle):
                self._running.append((members, program, handle))
                return
            answer = self._communicator.wait(handle)

    def _programs(self, requests: Sequence[Request]) -> list[tuple[list[int], Any]]:
        """Which requests travel together, and by which program."""
        together: dict[Any, list[int]] = {}
        for i, request in enumerate(requests):
            together.setdefault(self._key(request), []).append(i)
        programs = {
            "reduce": self._reduce,
            "half": self._reduce_half,
            "gather": self._gather,
            "uneven": self._gather_uneven,
            "broadcast": self._broadcast,
            "alltoall": self._alltoall,
        }
        return [(members, programs[key[0]]) for key, members in together.items()]

    def _key(self, request: Request) -> tuple[Any, ...]:
        if not isinstance(request, Request):
            raise TypeError(f"a conversation yielded {request!r}, which is no request.")
        xp, group = self._communicator.xp, request.group
        if isinstance(request, Allreduce):
            dtype = request.wire or xp.dtype(request.tensor)
            half = dtype in ("float16", "bfloat16") and request.op == "mean"
            if half and not (self._communicator.half_allreduce and dtype == "float16"):
                return "half", dtype, group
            return "reduce", dtype, request.op, group
        if isinstance(request, Allgather):
            return ("uneven" if request.uneven else "gather"), group
        if isinstance(request, Broadcast):
            return "broadcast", request.root, group
        if isinstance(request, Alltoall):
            return "alltoall", group
        raise TypeError(f"a conversation yielded {request!r}, which is no request.")

    def _count(self, requests: Sequence[Request], gathered: Sequence[int] | None = None) -> None:
        for i, request in enumerate(requests):
            ranks = self._communicator.ranks(request.group)
            self.traffic.add(traffic_of(request, ranks, gathered[i] if gathered else None))

    # -------------------------------------------------------------------------------- the programs
    def _reduce(self, name: str, requests: list[Allreduce]) -> Program:
        """Large tensors as they are, small ones in one buffer, all in one operation."""
        self._count(requests)
        xp = self._communicator.xp
        sent = [_as_wire(xp, request) for request in requests]
        large = [i for i, x in enumerate(sent) if _elements(xp, x) * 4 >= _APART or len(sent) == 1]
        small = [i for i in range(len(sent)) if i not in set(large)]
        buffers = [
            sent[i] if requests[i].reuse or requests[i].wire else xp.copy(sent[i]) for i in large
        ]
        if small:
            buffers.append(xp.concat([xp.reshape(sent[i], (-1,)) for i in small]))
        first = requests[0]
        buffers = yield self._communicator.allreduce(name, buffers, first.op, first.group)
        results: list[Any] = [None] * len(sent)
        for i, result in zip(large, buffers, strict=False):
            results[i] = xp.cast(result, xp.dtype(requests[i].tensor))
        if small:
            parts = xp.split(buffers[-1], [_elements(xp, sent[i]) for i in small])
            for i, part in zip(small, parts, strict=True):
                shaped = xp.reshape(part, xp.shape(sent[i]))
                results[i] = xp.cast(shaped, xp.dtype(requests[i].tensor))
        return results

    def _reduce_half(self, name: str, requests: list[Allreduce]) -> Program:
        """The mean of 16-bit floats: parts to their owners, added there in fp32 in rank order,
        and back. As many bytes as a ring allreduce, and exact where the engine's own addition is
        missing (bf16) or scalar and slow (fp16 over Gloo).
        """
        self._count(requests)
        xp, group = self._communicator.xp, requests[0].group
        ranks = self._communicator.ranks(group)
        wire = requests[0].wire or xp.dtype(requests[0].tensor)
        sizes = [_elements(xp, request.tensor) for request in requests]
        whole = [xp.wire_bytes(xp.reshape(request.tensor, (-1,)), wire) for request in requests]
        part = -(-sum(sizes) // ranks)
        padding = xp.zeros((2 * (part * ranks - sum(sizes)),), "uint8", xp.device(whole[0]))
        flat = xp.concat([*whole, padding])
        flat = yield self._communicator.alltoall(f"{name}.parts", flat, group)
        theirs = xp.from_wire(flat, wire, (ranks, part))
        mean = theirs[0]
        for peer in range(1, ranks):
            mean = mean + theirs[peer]
        mean = xp.wire_bytes(mean / ranks, wire)
        flat = yield self._communicator.allgather(f"{name}.means", mean, group)
        means = xp.split(xp.from_wire(flat, wire, (-1,))[: sum(sizes)], sizes)
        return [
            xp.cast(xp.reshape(x, xp.shape(request.tensor)), xp.dtype(request.tensor))
            for x, request in zip(means, requests, strict=True)
        ]

    def _gather(self, name: str, requests: list[Allgather]) -> Program:
        """Everything as bytes in one operation of known size."""
        self._count(requests)
        xp, group = self._communicator.xp, requests[0].group
        ranks = self._communicator.ranks(group)
        parts = [xp.to_bytes(request.tensor) for request in requests]
        sizes = [_elements(xp, part) for part in parts]
        flat = yield self._communicator.allgather(name, xp.concat(parts), group)
        pieces = xp.split(flat, sizes * ranks)
        return [
            tuple(
                xp.from_bytes(
                    pieces[peer * len(requests) + i],
                    xp.dtype(request.tensor),
                    xp.shape(request.tensor),
                )
                for peer in range(ranks)
            )
            for i, request in enumerate(requests)
        ]

    def _gather_uneven(self, name: str, requests: list[Allgather]) -> Program:
        """Sizes first, then everything as bytes."""
        xp, group = self._communicator.xp, requests[0].group
        ranks = self._communicator.ranks(group)
        parts = [xp.to_bytes(request.tensor) for request in requests]
        lengths = np.array([_elements(xp, part) for part in parts], np.int64)
        mine = xp.asarray(lengths, xp.device(parts[0]))
        table = yield self._communicator.allgather(f"{name}.sizes", xp.to_bytes(mine), group)
        table = xp.to_numpy(xp.from_bytes(table, "int64", (ranks, len(parts))))
        self._count(requests, [int(total) for total in table.sum(0)])
        flat = yield self._communicator.allgather(name, xp.concat(parts), group)
        pieces = xp.split(flat, [int(size) for size in table.reshape(-1)])
        return [
            tuple(
                xp.from_bytes(
                    pieces[peer * len(requests) + i],
                    xp.dtype(request.tensor),
                    (-1, *xp.shape(request.tensor)[1:]),
                )
                for peer in range(ranks)
            )
            for i, request in enumerate(requests)
        ]

    def _broadcast(self, name: str, requests: list[Broadcast]) -> Program:
        self._count(requests)
        xp, first = self._communicator.xp, requests[0]
        parts = [xp.to_bytes(request.tensor) for request in requests]
        sizes = [_elements(xp, part) for part in parts]
        flat = yield self._communicator.broadcast(name, xp.concat(parts), first.root, first.group)
        pieces = xp.split(flat, sizes)
        return [
            xp.from_bytes(piece, xp.dtype(request.tensor), xp.shape(request.tensor))
            for piece, request in zip(pieces, requests, strict=True)
        ]

    def _alltoall(self, name: str, requests: list[Alltoall]) -> Program:
        """Row by row, the bytes of all requests side by side."""
        self._count(requests)
        xp, group = self._communicator.xp, requests[0].group
        ranks = self._communicator.ranks(group)
        rows = [xp.reshape(xp.to_bytes(request.tensor), (ranks, -1)) for request in requests]
        widths = [xp.shape(row)[1] for row in rows]
        flat = xp.concat([xp.reshape(row[peer], (-1,)) for peer in range(ranks) for row in rows])
        flat = yield self._communicator.alltoall(name, flat, group)
        pieces = xp.split(flat, widths * ranks)
        return [
            xp.from_bytes(
                xp.concat([pieces[peer * len(rows) + i] for peer in range(ranks)]),
                xp.dtype(request.tensor),
                xp.shape(request.tensor),
            )
            for i, request in enumerate(requests)
        ]


def _elements(xp: ModuleType, tensor: Tensor) -> int:
    return math.prod(xp.shape(tensor))


def _as_wire(xp: ModuleType, request: Allreduce) -> Tensor:
    return xp.cast(request.tensor, request.wire) if request.wire else request.tensor


__all__ = ["Communicator", "Conversation", "Pending"]
