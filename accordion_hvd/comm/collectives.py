"""The interface of an engine's collectives, and a model of the bytes that they move."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accordion_hvd.core.base import Allgather, Allreduce, Hosts, Neighbours, Request, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import ITEMSIZE

Group = tuple[int, ...] | None
Sizes = Sequence[int] | None


class Collectives(abc.ABC):
    """Interface of an engine for one of `size` processes.

    Attributes:
        xp: operations of the framework of the tensors.
        engine: name of the engine, "horovod" or "torch".
        label: name of the engine for people.
        native_fp16_allreduce: whether the engine should add fp16, as NCCL does well. None until
            `fp16_reduction.choose_reduction` decides; the engine does not add fp16 until then.
        native_bf16_allreduce: whether the engine adds bf16.
        hosts: ranks of each host; () until `agreement.discover_hosts` has found them.
        extensible: whether `register` can add groups that the engine does not know.
        ordered: whether the engine matches the operations of all ranks by their order instead of
            their names. Ranks must then start all operations in the same order.
        scratch: scratch memory on the CPU that is reused in the next step, by name; None if memory
            cannot be reused.
    """

    rank: int
    size: int
    xp: ModuleType
    engine: str = "horovod"
    label: str = "Horovod"
    native_fp16_allreduce: bool | None = None
    native_bf16_allreduce: bool = False
    hosts: Hosts = ()
    extensible: bool = True
    ordered: bool = False
    scratch: dict[str, Tensor] | None = None

    # ------------------------------------------ asynchronous operations, each returning a handle
    @abc.abstractmethod
    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """Start one reduction of several tensors, which it may overwrite."""

    @abc.abstractmethod
    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        """Start one concatenation of the ranks' vectors.

        Vectors of different lengths need `lengths`: the lengths of all members' vectors.
        """

    @abc.abstractmethod
    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        """Start one broadcast of a vector from `root`."""

    @abc.abstractmethod
    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        """Start one transfer of equal parts of a vector to all ranks; the result has its length.

        With `splits`, send the given numbers of rows of a matrix to the ranks. The result is then
        the received rows, in rank order, and the number of rows from each rank.
        """

    @abc.abstractmethod
    def poll(self, handle: Any) -> bool:
        """Return whether `wait` would return at once."""

    @abc.abstractmethod
    def wait(self, handle: Any) -> Any:
        """Wait for an operation and return its result; a list for `allreduce`."""

    # -------------------------------------------------------------------------------------- groups
    def ranks(self, group: Group) -> int:
        return self.size if group is None else len(group)

    def within_host(self, group: Group) -> bool:
        """Return whether all members of `group` are on one host, as far as hosts are known."""
        if group is None:
            return len(self.hosts) == 1
        host = next((host for host in self.hosts if group[0] in host), ())
        return set(group) <= set(host)

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Register groups that requests will name; collective."""
        return  # most engines take any group


# -------------------------------------------------------------------------------------------- bytes
# Bytes per rank, for n ranks that take part and B bytes in each rank's tensor:
#
# - ring allreduce: 2 (n - 1) / n B sent and received;
# - allgather: (n - 1) B sent, since a ring passes every block on; the other ranks' bytes received;
# - broadcast and alltoall: (n - 1) / n B sent and received;
# - neighbours: B sent to each receiver, B received from each sender.


@dataclass
class Traffic:
    """Numbers of bytes of one rank.

    Attributes:
        payload: bytes of the tensors in requests.
        sent: bytes that the rank sends.
        received: bytes that the rank receives.
        within: bytes that the rank sends to ranks of the same host, included in `sent`.
    """

    payload: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    within: float = 0.0

    def add(self, other: Traffic) -> None:
        self.payload += other.payload
        self.sent += other.sent
        self.received += other.received
        self.within += other.within


def size_of(tensor: Any, dtype: str | None = None, xp: ModuleType | None = None) -> int:
    xp = xp or namespace(tensor)
    return math.prod(xp.shape(tensor)) * ITEMSIZE[dtype or xp.dtype(tensor)]


def traffic_of(
    requests: Sequence[Request],
    ranks: int,
    gathered: int | None = None,
    xp: ModuleType | None = None,
) -> Traffic:
    """Return the bytes of one rank for requests of one kind, in one collective.

    Args:
        gathered: for uneven allgathers, the total number of bytes of all ranks' tensors.
        xp: operations of the tensors' framework, if known.
    """
    request, payload = requests[0], 0
    for one in requests:
        payload += size_of(one.tensor, one.wire if isinstance(one, Allreduce) else None, xp)
    if isinstance(request, Allreduce):
        moved = 2 * (ranks - 1) / ranks * payload
        return Traffic(payload, moved, moved)
    if isinstance(request, Allgather):
        received = gathered - payload if gathered is not None else (ranks - 1) * payload
        return Traffic(payload, (ranks - 1) * payload, received)
    if isinstance(request, Neighbours):
        return Traffic(payload, len(request.to) * payload, len(request.of) * payload)
    moved = (ranks - 1) / ranks * payload
    return Traffic(payload, moved, moved)
