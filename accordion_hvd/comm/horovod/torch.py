"""A communicator over `horovod.torch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import horovod.torch as hvd
import torch

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.collectives import Group, Sizes
from accordion_hvd.comm.communicator import Communicator, RankLost
from accordion_hvd.comm.horovod import process_sets
from accordion_hvd.comm.horovod.process_sets import Members, addable
from accordion_hvd.ops import torch as xp

__all__ = ["HorovodCommunicator", "hvd", "process_sets"]

Tensor: TypeAlias = torch.Tensor
_OPS = {"mean": hvd.Average, "sum": hvd.Sum, "max": hvd.Max}


class HorovodCommunicator(Communicator):
    def __init__(self, process_set: Any = None) -> None:
        self.members = Members(process_set)
        self.rank, self.size, self.xp = self.members.rank, self.members.size, xp
        self.extensible = addable()
        nccl = hvd.nccl_built() and torch.cuda.is_available()
        self.native_fp16_allreduce = True if nccl else None
        self.scratch = {}
        timeouts.register()
        # Over MPI, Horovod's calls may wait and hold Python's lock meanwhile.
        if hvd.mpi_enabled():
            timeouts.guard_lock(hvd.rank())

    def pause(self, waited: float) -> None:
        try:
            super().pause(waited)
        except RankLost:
            timeouts.give_up()  # the end of Horovod would wait for the lost rank once more
            raise

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        tensors = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        return hvd.grouped_allreduce_async_(
            tensors, name=name, op=_OPS[op], process_set=self.members.subset(group)
        )

    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        return hvd.allgather_async(tensor, name=name, process_set=self.members.subset(group))

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        return hvd.broadcast_async(
            tensor, self.members.globally(root), name=name, process_set=self.members.subset(group)
        )

    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        counts = None if splits is None else torch.tensor(splits, dtype=torch.int32)
        return hvd.alltoall_async(
            tensor, splits=counts, name=name, process_set=self.members.subset(group)
        ), splits is None

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        self.members.register(groups, self.extensible)

    def poll(self, handle: Any) -> bool:
        return hvd.poll(handle[0] if isinstance(handle, tuple) else handle)

    def wait(self, handle: Any) -> Any:
        # Called only after `poll` was True, because Horovod's own wait spins.
        if isinstance(handle, tuple):
            received, counts = hvd.synchronize(handle[0])
            return received if handle[1] else (received, counts.tolist())
        result = hvd.synchronize(handle)
        return list(result) if isinstance(result, tuple) else result
