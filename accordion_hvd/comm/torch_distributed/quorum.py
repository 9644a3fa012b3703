"""A communicator over the process group of a torchft Manager."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.torch_distributed.communicator import Tensor, TorchCommunicator
from accordion_hvd.ops import torch as xp


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
        """Return the process group; a group of some replicas is refused (ValueError)."""
        self.register([] if group is None else [group])
        return self._process_group

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Refuse groups of some replicas (ValueError)."""
        if groups:
            raise ValueError(f"groups are {groups}, but torchft connects all replicas only.")
