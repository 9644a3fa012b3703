"""Horovod's interface over torch.distributed; stands in for the module `horovod.torch`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from accordion_hvd.comm.agreement import host_name, require_agreement
from accordion_hvd.comm.torch_distributed import process_sets as _sets
from accordion_hvd.comm.torch_distributed import start
from accordion_hvd.comm.torch_distributed.communicator import (
    ConnectionLost,
    Handle,
    TorchCommunicator,
)
from accordion_hvd.comm.torch_distributed.process_sets import (  # noqa: F401
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from accordion_hvd.comm.torch_distributed.watch import watch

HorovodInternalError = ConnectionLost

Place: TypeAlias = tuple[int, int, int, int]
"""Local rank, local size, cross rank and cross size of a process."""

_place: Place | None = None
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
    global _ours, _place
    if comm is not None:
        raise ValueError("comm is not None, but torch.distributed has no MPI communicators.")
    if is_initialized():
        return
    _ours = start.start_alone_or_launched()
    _place = _find_place()
    _sets.start(None if isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Forget all process sets, and end torch.distributed if `init` has initialized it."""
    global _ours, _place
    _pending.clear()
    _sets.stop()
    _place = None
    if _ours:
        start.end()
    watch.end()
    _ours = False


def is_initialized() -> bool:
    return _place is not None


def rank() -> int:
    _place_here()
    return dist.get_rank()


def size() -> int:
    _place_here()
    return dist.get_world_size()


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return _place_here()[0]


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _place_here()[1]


def cross_rank() -> int:
    """Return the number of this host among those with a rank of the same local rank."""
    return _place_here()[2]


def cross_size() -> int:
    """Return the number of hosts with a rank of the same local rank."""
    return _place_here()[3]


def _place_here() -> Place:
    if _place is None:
        raise ValueError("torch.distributed has not been initialized; use hvd.init().")
    return _place


def _find_place() -> Place:
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
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    return "gloo" in dist.get_backend()


def mpi_built() -> bool:
    return dist.is_mpi_available()


def mpi_enabled() -> bool:
    return dist.get_backend() == "mpi"


def nccl_built() -> int:
    return int(dist.is_nccl_available())


def cuda_built() -> bool:
    return torch.backends.cuda.is_built()


def rocm_built() -> bool:
    return torch.version.hip is not None


def ddl_built() -> bool:
    return False


mpi_threads_supported = ccl_built = ddl_built


# -------------------------------------------------------------------------------------- compression
class NoneCompressor:
    """No compression, the default."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Sends floating-point tensors in half precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """Compression objects, as arguments of `DistributedOptimizer` and `allreduce`."""

    none = NoneCompressor
    fp16 = FP16Compressor


Tensor: TypeAlias = torch.Tensor

Average, Sum, Adasum, Min, Max, Product = range(6)
"""Reductions, with Horovod's values."""

_KINDS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_numbers = itertools.count()


# ------------------------------------------------------------------------------ pending operations
_pending: dict[int, tuple[TorchCommunicator, Handle, Callable[[Any], Any]]] = {}


def _communicator(process_set: Any) -> TorchCommunicator:
    communicator = TorchCommunicator(process_set)
    if communicator.rank < 0:
        raise ValueError(f"this rank is not a member of {process_set!r}.")
    return communicator


def _start(
    communicator: TorchCommunicator, handle: Handle, finish: Callable[[Any], Any] = lambda x: x
) -> int:
    number = next(_numbers)
    _pending[number] = communicator, handle, finish
    return number


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once."""
    communicator, started, _ = _pending[handle]
    return communicator.poll(started)


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result."""
    communicator, started, finish = _pending.pop(handle)
    return finish(communicator.wait(started))


_WIDER = {torch.bfloat16: torch.float32, torch.int16: torch.int32, torch.bool: torch.int32}
"""Dtypes that not all backends can reduce, and dtypes that can take their place."""


def _bytes(tensor: Tensor) -> Tensor:
    # Every backend transfers bytes.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------- reductions
# Names and arguments are Horovod's: `..._async` returns a handle, and a last `_` means in place.
def _operation(average: bool | None, op: int | None) -> int:
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = op if op is not None else Sum if average is False else Average
    if chosen == Adasum:
        raise ValueError("op is hvd.Adasum, which torch.distributed does not have; use Horovod.")
    if chosen not in _KINDS:
        raise ValueError(f"op is {op!r}, but must be hvd.Average, Sum, Min, Max or Product.")
    return chosen


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    chosen, communicator = _operation(average, op), _communicator(process_set)
    group, size = communicator.members.group(None), communicator.size
    sent = [x.detach().to(_WIDER.get(x.dtype, x.dtype)).contiguous() for x in tensors]
    if prescale_factor != 1.0:
        sent = [x * prescale_factor for x in sent]
    works = [dist.all_reduce(x, _KINDS[chosen], group, async_op=True) for x in sent]

    def finish() -> list[Tensor]:
        factor = postscale_factor / size if chosen == Average else postscale_factor
        for tensor, total in zip(tensors, sent, strict=True):
            if factor != 1.0:
                total = total * factor
            with torch.no_grad():
                tensor.copy_(total)
        return list(tensors)

    return _start(communicator, Handle(works, finish, "allreduce"))


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:  # fmt: skip
    copies = [x.detach().clone() for x in tensors]
    return grouped_allreduce_async_(
        copies, average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> list[Tensor]:  # fmt: skip
    """Return the reductions of several tensors; without gradients for autograd."""
    small, contexts = zip(*(compression.compress(x) for x in tensors), strict=True)
    handle = grouped_allreduce_async(
        small, average, name, op, prescale_factor, postscale_factor, process_set
    )
    results = zip(synchronize(handle), contexts, strict=True)
    return [compression.decompress(x, context) for x, context in results]


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    return synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))


def _single(handle: int) -> int:
    communicator, started, finish = _pending[handle]
    _pending[handle] = communicator, started, lambda result: finish(result)[0]
    return handle


def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    return _single(grouped_allreduce_async([tensor], *args, **kwargs))


def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    return _single(grouped_allreduce_async_([tensor], *args, **kwargs))


def allreduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the reduction of a tensor; arguments as in `grouped_allreduce`."""
    return grouped_allreduce([tensor], *args, **kwargs)[0]


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return grouped_allreduce_([tensor], *args, **kwargs)[0]


# ------------------------------------------------------------------------------ other collectives
def allgather_async(tensor: Tensor, name: str | None = None, process_set: Any = None) -> int:
    """Start an allgather along the first dimension, which may differ; return a handle."""
    communicator = _communicator(process_set)
    sent = _bytes(tensor)
    size = torch.tensor([sent.numel()], device=tensor.device)
    lengths = communicator.wait(communicator.allgather("sizes", size, None)).tolist()
    handle = communicator.allgather("gather", sent, None, lengths)
    shape = (-1, *tensor.shape[1:])
    return _start(communicator, handle, lambda flat: flat.view(tensor.dtype).view(shape))


def allgather(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Tensor:
    """Return all ranks' tensors, concatenated along the first dimension."""
    return synchronize(allgather_async(tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None
) -> list[Tensor]:
    handles = [allgather_async(x, name, process_set) for x in tensors]
    return [synchronize(handle) for handle in handles]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> int:
    communicator = _communicator(process_set)
    value = _bytes(tensor)
    group = communicator.members.group(None)
    works = [dist.broadcast(value, root_rank, group, async_op=True)]

    def finish() -> Tensor:
        with torch.no_grad():
            return tensor.copy_(value.view(tensor.dtype).view(tensor.shape))

    return _start(communicator, Handle(works, finish, "broadcast"))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> int:
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Tensor:
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Tensor:
    """Return the tensor of the global rank `root_rank`."""
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> int:
    """Start an alltoall of rows; return a handle.

    With `splits`, the result is the received rows and the number of rows from each rank.
    """
    communicator = _communicator(process_set)
    counts = None if splits is None else [int(count) for count in splits]
    width = tensor.element_size() * math.prod(tensor.shape[1:])
    rows = _bytes(tensor).view(tensor.shape[0], width)
    handle = communicator.alltoall("alltoall", rows, None, counts)

    def finish(result: Any) -> Any:
        received = result if counts is None else result[0]
        received = received.view(tensor.dtype).view(-1, *tensor.shape[1:])
        return received if counts is None else (received, torch.tensor(result[1]))

    return _start(communicator, handle, finish)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Return the rows that all ranks send to this rank; see `alltoall_async`."""
    return synchronize(alltoall_async(tensor, splits, name, process_set))


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none,
    op: int = Average, process_set: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return this rank's rows of the reduced tensor; the first ranks get one row more."""
    communicator = _communicator(process_set)
    total = allreduce(
        tensor, name=name, compression=compression, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip
    return torch.tensor_split(total, communicator.size)[communicator.rank]


def barrier(process_set: Any = None) -> None:
    """Wait until all ranks have called this function."""
    communicator = _communicator(process_set)
    communicator.wait(communicator.allreduce("barrier", [torch.zeros(1)], "sum", None))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """Return the object of the global rank `root_rank`, which travels pickled."""
    values = [obj]
    group = _communicator(process_set).members.group(None)
    dist.broadcast_object_list(values, root_rank, group)
    return values[0]


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return the objects of all ranks, which travel pickled."""
    communicator = _communicator(process_set)
    values: list[Any] = [None] * communicator.size
    dist.all_gather_object(values, obj, communicator.members.group(None))
    return values


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcast the tensors of a dict, or of (name, tensor) pairs, from a rank in place.

    Raises:
        RanksDisagree: on every rank, if the names, shapes or dtypes of the tensors differ.
    """
    rows = sorted(params.items()) if isinstance(params, dict) else params
    pairs = [(name, x) for name, x in rows if x is not None]
    lines = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in pairs]
    device = pairs[0][1].device if pairs else None
    # Ranks with fewer tensors would wait in other collectives, until the timeout.
    require_agreement(_communicator(None), "\n".join(["parameters to broadcast", *lines]), device)
    for handle in [broadcast_async_(x, root_rank) for _, x in pairs]:
        synchronize(handle)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"hvd.{name} is not available over torch.distributed.")
