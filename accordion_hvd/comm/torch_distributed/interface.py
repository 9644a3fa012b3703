"""Horovod's interface over torch.distributed; stands in for the module `horovod.torch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accordion_hvd.comm.agreement import host_name
from accordion_hvd.comm.torch_distributed import operations, start
from accordion_hvd.comm.torch_distributed import process_sets as _sets
from accordion_hvd.comm.torch_distributed.communicator import (
    ConnectionLost as HorovodInternalError,
)
from accordion_hvd.comm.torch_distributed.operations import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_parameters,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    reducescatter,
    synchronize,
)
from accordion_hvd.comm.torch_distributed.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from accordion_hvd.comm.torch_distributed.watch import watch

__all__ = [
    "Adasum", "Average", "Compression", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "init", "is_initialized", "join", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank",
    "reducescatter", "remove_process_set", "rocm_built", "shutdown", "size", "synchronize",
]  # fmt: skip

_places: list[tuple[int, int, int, int]] = []  # (local rank, local size, cross rank, cross size)
_ours = False  # whether `init` has initialized torch.distributed


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize torch.distributed if that has not been done, and the process sets; collective.

    Args:
        comm: accepted for compatibility with Horovod; must be None.
        process_sets: process sets to add. "dynamic", which Horovod knows, adds none: process sets
            can be added at any time.

    Raises:
        ValueError: if `comm` is given, or a process set is invalid.
    """
    global _ours
    if comm is not None:
        raise ValueError("comm is not None, but torch.distributed has no MPI communicators.")
    if is_initialized():
        return
    _ours = start.start_alone_or_launched()
    _places.append(_place())
    _sets.start(None if isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Forget all process sets, and end torch.distributed if `init` has initialized it."""
    global _ours
    operations.clear()
    _places.clear()
    if _ours:
        start.end()
    watch.end()
    _ours = False


def is_initialized() -> bool:
    """Return whether `init` has been called."""
    return bool(_places)


def rank() -> int:
    """Return the rank of this process."""
    _require_init()
    return dist.get_rank()


def size() -> int:
    """Return the number of ranks."""
    _require_init()
    return dist.get_world_size()


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    _require_init()
    return _places[0][0]


def local_size() -> int:
    """Return the number of ranks on this host."""
    _require_init()
    return _places[0][1]


def cross_rank() -> int:
    """Return the number of this host among those with a rank of the same local rank."""
    _require_init()
    return _places[0][2]


def cross_size() -> int:
    """Return the number of hosts with a rank of the same local rank."""
    _require_init()
    return _places[0][3]


def _require_init() -> None:
    if not _places:
        raise ValueError("torch.distributed has not been initialized; use hvd.init().")


def _place() -> tuple[int, int, int, int]:
    """Return local and cross ranks and sizes, from the names of all ranks' hosts; collective."""
    own, names = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(names, host_name())
    local = [rank for rank, name in enumerate(names) if name == names[own]]
    position = local.index(own)
    hosts = list(dict.fromkeys(names))
    alike = [host for host in hosts if names.count(host) > position]
    return position, len(local), alike.index(names[own]), len(alike)


def join(device: int = -1) -> int:
    """Raise RuntimeError: torch.distributed cannot let ranks end at different steps."""
    raise RuntimeError(
        "hvd.join is not available over torch.distributed; give all ranks the same number of "
        "batches, or use Horovod."
    )


def gloo_built() -> bool:
    """Return whether PyTorch has Gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Return whether the ranks use Gloo."""
    return "gloo" in dist.get_backend()


def mpi_built() -> bool:
    """Return whether PyTorch has MPI."""
    return dist.is_mpi_available()


def mpi_enabled() -> bool:
    """Return whether the ranks use MPI."""
    return dist.get_backend() == "mpi"


def mpi_threads_supported() -> bool:
    """Return False."""
    return False


def nccl_built() -> int:
    """Return whether PyTorch has NCCL."""
    return int(dist.is_nccl_available())


def cuda_built() -> bool:
    """Return whether PyTorch has CUDA."""
    return torch.backends.cuda.is_built()


def rocm_built() -> bool:
    """Return whether PyTorch has ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def __getattr__(name: str) -> Any:
    raise AttributeError(f"hvd.{name} is not available over torch.distributed.")
