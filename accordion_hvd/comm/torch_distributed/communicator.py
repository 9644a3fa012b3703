"""A communicator over torch.distributed."""

from __future__ import annotations

import secrets
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.collectives import Group, Sizes
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.torch_distributed.process_sets import Members
from accordion_hvd.comm.torch_distributed.watch import watch
from accordion_hvd.ops import torch as xp

Tensor: TypeAlias = torch.Tensor
_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name


class ConnectionLost(RuntimeError):
    """Raised if a collective fails, most likely because another rank has ended."""


@dataclass(slots=True)
class Handle:
    works: list[Any]
    result: Callable[[], Any]
    name: str


class TorchCommunicator(Communicator):
    """A communicator that connects the ranks of a process set, numbered from 0 within it.

    torch.distributed matches the operations of the ranks by their order (`ordered`). Its waits do
    not spin, and with NCCL they do not block the process at all.
    """

    engine, label = "torch", "torch.distributed"
    ordered = True
    _limit: timedelta | None = None
    _nccl = _whole = False

    def __init__(self, process_set: Any = None) -> None:
        self.members = Members(process_set)
        self.rank, self.size, self.xp = self.members.rank, self.members.size, xp
        self._whole = self.size == dist.get_world_size()
        self._nccl = "nccl" in dist.get_backend(self.members.group(None))  # perhaps for GPUs only
        self.native_bf16_allreduce = self._nccl
        self.native_fp16_allreduce = True if self._nccl else None
        self._limit = timedelta(seconds=timeouts.seconds())
        self.scratch = {}

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """Start one reduction, in place if there is one tensor; with NCCL, one per tensor.

        Other backends reduce a copy of all tensors: their reductions take many messages each, one
        after the other, which costs more than the copy as soon as messages have to travel.
        """
        divisor = self.size if group is None else len(group)
        whole = self._whole and group is None  # a group that is kept would outlive its end
        within = dist.group.WORLD if whole else self.members.group(group)
        shapes = [x.shape for x in tensors]
        sent = [x.contiguous() for x in tensors]
        averages = self._nccl and sent[0].is_cuda  # only NCCL has AVG
        if len(sent) > 1 and not averages:
            sent = [torch.cat([x.view(-1) for x in sent])]
        kind = dist.ReduceOp.AVG if op == "mean" and averages else _OPS[op]
        divides = op == "mean" and not averages

        def result() -> list[Tensor]:
            totals = [_divided(x, divisor) for x in sent] if divides else sent
            if len(totals) < len(shapes):
                parts = totals[0].split([shape.numel() for shape in shapes])
                totals = [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]
            return totals

        calls = [partial(dist.all_reduce, x, kind, within, async_op=True) for x in sent]
        return self._start(name, calls, result)

    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        within, ranks = self.members.group(group), self.ranks(group)
        # All parts of one allgather have one length.
        length = tensor.shape[0] if lengths is None else max(lengths)
        sent = tensor.contiguous()
        if length > tensor.shape[0]:
            sent = torch.cat([sent, sent.new_zeros(length - tensor.shape[0])])
        gathered = sent.new_empty(ranks * length)

        def result() -> Tensor:
            if lengths is None or min(lengths) == length:
                return gathered
            rows = gathered.view(ranks, length)
            return torch.cat([row[:count] for row, count in zip(rows, lengths, strict=True)])

        return self._start(name, [self.gathering(gathered, sent, within)], result)

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        # `dist.broadcast` overwrites its argument.
        value = tensor.clone()
        call = self.broadcasting(value, root, self.members.group(group))
        return self._start(name, [call], lambda: value)

    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        within, tensor = self.members.group(group), tensor.contiguous()
        counts: list[int] | None = None
        if splits is not None:
            # Receivers must know the numbers of rows before, so this operation is waited for.
            sent = torch.tensor(splits, device=tensor.device)
            numbers = torch.empty_like(sent)
            call = partial(dist.all_to_all_single, numbers, sent, group=within, async_op=True)
            counts = self.wait(self._start(name, [call], numbers.tolist))
        rows = tensor.shape[0] if counts is None else sum(counts)
        received = tensor.new_empty((rows, *tensor.shape[1:]))
        parts = None if splits is None else list(splits)
        exchange = dist.all_to_all_single
        call = partial(exchange, received, tensor, counts, parts, group=within, async_op=True)
        return self._start(name, [call], lambda: received if counts is None else (received, counts))

    def gathering(self, gathered: Tensor, sent: Tensor, within: Any) -> Callable[[], Any]:
        return partial(_GATHER, gathered, sent, within, async_op=True)

    def broadcasting(self, value: Tensor, root: int, within: Any) -> Callable[[], Any]:
        return partial(dist.broadcast, value, self.members.globally(root), within, async_op=True)

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        self.members.register(groups)

    def until(self, done: Callable[[], bool]) -> None:
        # Without pauses, since `ready` waits for an operation of an ordered engine.
        while not done():
            pass

    def poll(self, handle: Any) -> bool:
        return all(work.is_completed() for work in handle.works)

    def wait(self, handle: Any) -> Any:
        watch.count, watch.name = watch.count + 1, repr(handle.name)
        watch.began = time.monotonic()
        try:
            for work in handle.works:
                # A wait for NCCL with a limit would block the host.
                if self._limit is None or self._nccl:
                    work.wait()
                else:
                    # The script may have initialized torch.distributed with another limit.
                    work.wait(self._limit)
        except RuntimeError as error:
            if _is_of_a_signal(error):
                raise
            raise self._lost(repr(handle.name), error) from error
        finally:
            watch.began = None
        return handle.result()

    def _start(self, name: str, calls: Sequence[Callable[[], Any]], result: Any) -> Handle:
        try:
            return Handle([call() for call in calls], result, name)
        except RuntimeError as error:
            if _is_of_a_signal(error):
                raise
            raise self._lost(repr(name), error) from error

    def _lost(self, name: str, error: RuntimeError) -> ConnectionLost:
        return ConnectionLost(
            f"{name} of rank {self.rank} of {self.size} failed: a rank has ended, cannot be "
            f"reached, or runs other collectives ({watch.missing()}; {str(error).splitlines()[0]})"
        )


def _is_of_a_signal(error: BaseException) -> bool:
    # PyTorch's data loader, for example, has one that raises if a worker has been killed.
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _divided(x: Tensor, divisor: int) -> Tensor:
    if x.is_floating_point():
        return x.div_(divisor)
    return x.copy_(x / divisor)


# ------------------------------------------------------ over the process group of a torchft Manager
class QuorumCommunicator(TorchCommunicator):
    """A communicator that connects the replicas of the present quorum; collective.

    torchft's process groups are not registered with torch.distributed, and serve only the methods
    of torchft's `ProcessGroup`.

    Args:
        device: device of the tensors that the process group can send.
    """

    def __init__(self, process_group: Any, device: Any = None) -> None:
        self.members = _Everyone(process_group)  # type: ignore[assignment]
        self.rank, self.size, self.xp = 0, process_group.size(), xp
        self.scratch = {}
        # Some of torchft's process groups do not know their rank: find it by a random number.
        own = secrets.randbits(62)
        rows = self.run("accordion.quorum", gather(self, torch.tensor([own], device=device)))
        self.rank = [int(row[0]) for row in rows].index(own)

    def gathering(self, gathered: Tensor, sent: Tensor, within: Any) -> Callable[[], Any]:
        rows = list(gathered.chunk(self.size))
        return partial(within.allgather, [rows], [sent], AllgatherOptions())

    def broadcasting(self, value: Tensor, root: int, within: Any) -> Callable[[], Any]:
        options = BroadcastOptions()
        options.rootRank = root
        return partial(within.broadcast, [value], options)


class _Everyone:
    """The members of a process group, without smaller groups."""

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group

    def group(self, group: tuple[int, ...] | None) -> Any:
        self.register([] if group is None else [group])
        return self._process_group

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        if groups:
            raise ValueError(f"groups are {groups}, but torchft connects all replicas only.")
