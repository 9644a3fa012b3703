"""A communicator without an engine, and the reference implementation of the collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from accordion_hvd.comm.collectives import Group, Sizes
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allgather, Allreduce, Broadcast, Neighbours, Request, Tensor
from accordion_hvd.ops import namespace


class LocalCommunicator(Communicator):
    """A communicator for a process that is a single rank, or outside of a process set.

    If `size` is larger than 1, results are those of ranks that all pass the same tensors.
    """

    rank = 0
    label = "one rank"

    def __init__(self, xp: ModuleType, size: int = 1) -> None:
        self.xp, self.size = xp, size

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        return [repeated(self.xp, x, op, self.ranks(group)) for x in tensors]

    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        return self.xp.concat([tensor] * self.ranks(group))

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        return self.xp.copy(tensor)

    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        copied = self.xp.copy(tensor)
        return copied if splits is None else (copied, list(splits))

    def poll(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Any:
        return handle


def connect(
    process_set: Any, engine: Callable[[Any], Communicator], xp: ModuleType
) -> Communicator:
    """Return a communicator of a process set, a local one outside of it and for a single rank."""
    if process_set.included() and process_set.size() > 1:
        return engine(process_set)
    return LocalCommunicator(xp)


# -------------------------------------------------- the reference implementation of the collectives
# Simulations use it, and so do benchmarks and estimates of bytes without real ranks.


def results(requests: Mapping[int, Request]) -> dict[int, Any]:
    """Return the result of one collective for each rank; `requests` are in rank order."""
    first = next(iter(requests.values()))
    xp = namespace(first.tensor)
    tensors = [request.tensor for request in requests.values()]
    if isinstance(first, Neighbours):
        senders = {rank: cast(Neighbours, request).of for rank, request in requests.items()}
        return {
            rank: tuple(xp.copy(requests[sender].tensor) for sender in ranks)
            for rank, ranks in senders.items()
        }
    if isinstance(first, Allreduce):
        combined = reduce(xp, tensors, first.op)
        return {rank: xp.copy(combined) for rank in requests}
    if isinstance(first, Allgather):
        decode = first.decode or (lambda part: (part, None))
        return {rank: tuple(decode(xp.copy(x))[0] for x in tensors) for rank in requests}
    if isinstance(first, Broadcast):
        return {rank: xp.copy(requests[first.root].tensor) for rank in requests}
    parts = [deal(xp, x, len(tensors)) for x in tensors]
    received = {rank: [part[i] for part in parts] for i, rank in enumerate(requests)}
    read = first.decode
    if read is None:
        return {rank: xp.concat(rows) for rank, rows in received.items()}
    return {rank: tuple(read(row[0])[0] for row in rows) for rank, rows in received.items()}


def reduce(xp: ModuleType, tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return the mean, sum or maximum of the ranks' tensors.

    Tensors are added in rank order, 16-bit floats in fp32.
    """
    dtype = xp.dtype(tensors[0])
    half = dtype in ("float16", "bfloat16")
    total = xp.cast(tensors[0], "float32") if half else tensors[0]
    for x in tensors[1:]:
        total = xp.maximum(total, x) if op == "max" else total + xp.cast(x, xp.dtype(total))
    return xp.cast(total / len(tensors) if op == "mean" else total, dtype)


def deal(
    xp: ModuleType, tensor: Tensor, ranks: int, splits: Sequence[int] | None = None
) -> list[Tensor]:
    """Return the part of a tensor for each rank: equal numbers of rows, or `splits` rows."""
    even = [xp.shape(tensor)[0] // ranks] * ranks
    return list(xp.split(tensor, list(even if splits is None else splits)))


def repeated(xp: ModuleType, tensor: Tensor, op: str, ranks: int) -> Tensor:
    return tensor * ranks if op == "sum" and ranks > 1 else tensor
