"""A network of four ranks that costs nothing: each sends what this process sends.

`install` must run before `accordion_hvd` is imported, which looks functions up then. It replaces
functions of torch.distributed rather than a communicator of this package, so that hooks of PyTorch
and other versions of this package meet the same network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4


class _Done:
    """An operation that has ended."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        devices = [x.device for x in self._result[:1] if x.is_cuda]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices or None)
        future.set_result(self._result)
        return future


def _all_reduce(
    x: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    if op == dist.ReduceOp.SUM:  # else an average or a maximum, which equal ranks leave as it is
        x.mul_(RANKS)
    return _Done([x]) if async_op else None


def _gather(gathered: Any, x: Any, group: Any = None, async_op: bool = False) -> Any:
    gathered.view(RANKS, -1).copy_(x.reshape(1, -1).expand(RANKS, -1))
    return _Done([gathered]) if async_op else None


def _alltoall(
    received: Any, x: Any, there: Any = None, here: Any = None, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    received.copy_(x[: len(received)] if there is None else _of_first(x, here, len(received)))
    return _Done([received]) if async_op else None


def _of_first(x: Any, here: Any, rows: int) -> Any:
    """Return what all ranks send to the first one, if each sends as much as this one."""
    return x[: here[0]].repeat((RANKS,) + (1,) * (x.dim() - 1))[:rows]


def _broadcast(x: Any, src: Any = 0, group: Any = None, async_op: bool = False, **more: Any) -> Any:
    return _Done([x]) if async_op else None


def install(device: str) -> None:
    """Make this process rank 0 of the four."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    replaced: dict[str, Callable[..., Any]] = {
        "all_reduce": _all_reduce, "all_gather_into_tensor": _gather, "broadcast": _broadcast,
        "all_gather_single": _gather, "all_to_all_single": _alltoall,
    }  # fmt: skip
    for name, function in replaced.items():
        if hasattr(dist, name):
            setattr(dist, name, function)
    if device == "cuda":
        dist.get_backend = lambda group=None: "nccl"


def without_watch() -> None:
    """Have nobody look for ranks that have ended, for which versions of today use the store."""
    from accordion_hvd.torch import hooked

    if hasattr(hooked, "watch_ranks"):
        hooked.watch_ranks = lambda: None
