"""Requests over `horovod.torch`."""

from __future__ import annotations

from typing import Any, TypeAlias

import horovod.torch as hvd
import torch

from accordion_hvd.communicator import Communicator, Group
from accordion_hvd.ops import torch as xp

Tensor: TypeAlias = torch.Tensor
_OPS = {"mean": hvd.Average, "sum": hvd.Sum, "max": hvd.Max}


class HorovodCommunicator(Communicator):
    """The ranks of a Horovod process set, numbered from 0 within it.

    Args:
        process_set: by default all ranks.
    """

    def __init__(self, process_set: Any = None) -> None:
        self.process_set = process_set or hvd.global_process_set
        self.xp = xp
        self.size = self.process_set.size() or 1
        self.rank = self.process_set.rank() if self.process_set.included() else -1
        self.half_allreduce = hvd.nccl_built() and torch.cuda.is_available()

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """One grouped, in-place allreduce."""
        tensors = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        return hvd.grouped_allreduce_async_(
            tensors, name=name, op=_OPS[op], process_set=self._process_set(group)
        )

    def allgather(self, name: str, tensor: Tensor, group: Group) -> Any:
        """One allgather."""
        return hvd.allgather_async(tensor, name=name, process_set=self._process_set(group))

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        """One broadcast; Horovod counts roots globally, also within a process set."""
        return hvd.broadcast_async(
            tensor, self._global(root), name=name, process_set=self._process_set(group)
        )

    def alltoall(self, name: str, tensor: Tensor, group: Group) -> Any:
        """One even alltoall."""
        return hvd.alltoall_async(tensor, name=name, process_set=self._process_set(group)), "first"

    def poll(self, handle: Any) -> bool:
        """Ask Horovod."""
        return hvd.poll(handle[0] if isinstance(handle, tuple) else handle)

    def wait(self, handle: Any) -> Any:
        """Only called after `poll`: Horovod's own waiting spins."""
        if isinstance(handle, tuple):
            return hvd.synchronize(handle[0])[0]  # alltoall adds its splits
        result = hvd.synchronize(handle)
        return list(result) if isinstance(result, tuple) else result

    def _global(self, rank: int) -> int:
        ranks = self.process_set.ranks
        return ranks[rank] if ranks else rank

    def _process_set(self, group: Group) -> Any:
        if group is None:
            return self.process_set
        ranks = sorted(self._global(rank) for rank in group)
        for known in registered_process_sets():
            if known.ranks == ranks:
                return known
        raise ValueError(
            f"no process set of ranks {ranks} is registered; pass it to hvd.init(process_sets=...)."
        )


def registered_process_sets() -> list[Any]:
    """The process sets that Horovod knows."""
    from horovod.torch.mpi_ops import _basics  # Horovod has no public list

    known = [hvd.global_process_set]
    for number, ranks in _basics._get_process_set_ids_and_ranks().items():
        if number != hvd.global_process_set.process_set_id:
            found = hvd.ProcessSet(list(ranks))
            found.process_set_id = number
            known.append(found)
    return known


def process_set_of(ranks: list[int] | None) -> Any:
    """The registered process set of these ranks; the global one for None or unknown ranks."""
    for known in registered_process_sets():
        if known.ranks == ranks:
            return known
    return hvd.global_process_set
