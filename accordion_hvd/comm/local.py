"""A rank without an engine: it is alone, or takes the other ranks to be like itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from accordion_hvd.comm import reference
from accordion_hvd.comm.collectives import Group
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Tensor


class LocalCommunicator(Communicator):
    """Carry the requests of a process that is alone, or outside of a process set.

    With a size above 1, results are those of ranks that all pass the same tensors; the cost model
    counts their bytes so.

    Args:
        xp: the operations of the framework whose tensors it carries.
        size: number of ranks.
    """

    rank = 0

    def __init__(self, xp: ModuleType, size: int = 1) -> None:
        self.xp, self.size = xp, size

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """Return the mean, sum or maximum of equal tensors."""
        return [reference.repeated(self.xp, x, op, self.ranks(group)) for x in tensors]

    def allgather(self, name: str, tensor: Tensor, group: Group) -> Any:
        """Return a copy of the vector for each rank, one after the other."""
        return self.xp.concat([tensor] * self.ranks(group))

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        """Return a copy of the vector."""
        return self.xp.copy(tensor)

    def alltoall(
        self, name: str, tensor: Tensor, group: Group, splits: Sequence[int] | None = None
    ) -> Any:
        """Return a copy of the vector; with `splits`, also how many rows came from this rank."""
        copied = self.xp.copy(tensor)
        return copied if splits is None else (copied, list(splits))

    def poll(self, handle: Any) -> bool:
        """Return True: no operation is ever pending."""
        return True

    def wait(self, handle: Any) -> Any:
        """Return the result."""
        return handle


def connect(
    process_set: Any, engine: Callable[[Any], Communicator], xp: ModuleType
) -> Communicator:
    """Return a communicator among the ranks of a process set.

    Args:
        process_set: the ranks; a process outside of them, or alone among them, gets one of its own.
        engine: makes a communicator of the engine's.
        xp: the operations of the framework whose tensors it carries.
    """
    if process_set.included() and process_set.size() > 1:
        return engine(process_set)
    return LocalCommunicator(xp)
