"""A communicator without an engine, for a single rank or for ranks with equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from accordion_hvd.comm import reference
from accordion_hvd.comm.collectives import Group
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Tensor


class LocalCommunicator(Communicator):
    """A communicator for a process that is a single rank, or outside of a process set.

    If `size` is larger than 1, results are those of ranks that all pass the same tensors.
    """

    rank = 0

    def __init__(self, xp: ModuleType, size: int = 1) -> None:
        self.xp, self.size = xp, size

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        return [reference.repeated(self.xp, x, op, self.ranks(group)) for x in tensors]

    def allgather(
        self, name: str, tensor: Tensor, group: Group, lengths: Sequence[int] | None = None
    ) -> Any:
        return self.xp.concat([tensor] * self.ranks(group))

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        return self.xp.copy(tensor)

    def alltoall(
        self, name: str, tensor: Tensor, group: Group, splits: Sequence[int] | None = None
    ) -> Any:
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
