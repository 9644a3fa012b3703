"""A communicator that rehearses an exchange on one rank, for measurements of the work around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from accordion_hvd.comm.collectives import Group
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.comm.recording import Operation
from accordion_hvd.comm.traffic import size_of
from accordion_hvd.core.base import Hosts, Tensor


class RehearsalCommunicator(LocalCommunicator):
    """The communicator of rank 0 of `size` ranks that all pass the same tensors.

    Requests are packed and unpacked as in a job. Only the engine's operations are replaced.

    Attributes:
        operations: the operations so far, by name.
        seconds: time spent on what engines would do outside of the training thread.
    """

    def __init__(self, xp: ModuleType, size: int, hosts: Hosts, native_fp16: bool) -> None:
        super().__init__(xp, size)
        self.hosts, self.native_fp16_allreduce, self.scratch = hosts, native_fp16, {}
        self.operations: dict[str, Operation] = {}
        self.seconds = 0.0

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        reduce = partial(super().allreduce, name, tensors, op, group)
        return self._answer(name, "allreduce", tensors, group, reduce)

    def allgather(
        self, name: str, tensor: Tensor, group: Group, lengths: Sequence[int] | None = None
    ) -> Any:
        gather = partial(super().allgather, name, tensor, group, lengths)
        return self._answer(name, "allgather", [tensor], group, gather)

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        broadcast = partial(super().broadcast, name, tensor, root, group)
        return self._answer(name, "broadcast", [tensor], group, broadcast)

    def alltoall(
        self, name: str, tensor: Tensor, group: Group, splits: Sequence[int] | None = None
    ) -> Any:
        exchange = partial(super().alltoall, name, tensor, group, splits)
        return self._answer(name, "alltoall", [tensor], group, exchange)

    def poll(self, handle: Any) -> bool:
        """Return False once for each operation, as if it took a while."""
        handle["polled"], polled = True, handle["polled"]
        return polled

    def wait(self, handle: Any) -> Any:
        return handle["result"]

    def pause(self, waited: float) -> None:
        """Return at once."""

    def _answer(
        self, name: str, kind: str, tensors: list[Tensor], group: Group, make: Callable[[], Any]
    ) -> dict[str, Any]:
        self.operations[name] = Operation(kind, float(sum(map(size_of, tensors))), group)
        began = time.perf_counter()
        handle = {"result": make(), "polled": False}
        self.seconds += time.perf_counter() - began
        return handle
