"""Process sets with Horovod's interface, over process groups of torch.distributed."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from accordion_hvd.comm import timeouts

_groups: dict[tuple[int, ...], Any] = {}  # process groups by their ranks
_known: list[ProcessSet] = []  # process sets without the global one
_numbers = itertools.count(1)


class ProcessSet:
    """A set of ranks that run collectives together.

    Args:
        ranks: the ranks.

    Attributes:
        ranks: the sorted ranks; None for all ranks before initialization.
        process_set_id: number of the process set; None until it is added.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: list[int] | None = sorted(ranks)

    def size(self) -> int | None:
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        if self.process_set_id is None:
            return None
        own = dist.get_rank()
        return self.ranks.index(own) if self.ranks and own in self.ranks else -1

    def included(self) -> bool | None:
        return None if self.ranks is None else dist.get_rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet(())
global_process_set.ranks = None


def start(process_sets: Sequence[ProcessSet] | None) -> None:
    """Add the given process sets after torch.distributed has been initialized; collective."""
    global_process_set.ranks = list(range(dist.get_world_size()))
    global_process_set.process_set_id = 0
    for process_set in process_sets or ():
        add_process_set(process_set)


def stop() -> None:
    for process_set in (global_process_set, *_known):
        process_set.process_set_id = None
    global_process_set.ranks = None
    _known.clear()
    _groups.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all ranks must add the same process sets in the same order.

    Raises:
        ValueError: if there is a process set of the same ranks, or a rank does not exist.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks, size = process_set.ranks or [], dist.get_world_size()
    if any(known.ranks == ranks for known in (global_process_set, *_known)):
        raise ValueError(f"there is a process set of ranks {ranks} already.")
    if not ranks or ranks[0] < 0 or ranks[-1] >= size or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"the ranks of a process set are {ranks}, but must be different ones from 0 to "
            f"{size - 1}."
        )
    _known.append(process_set)
    process_set.process_set_id = next(_numbers)
    if dist.get_rank() in ranks:
        group_of(tuple(ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    if process_set not in _known:
        return False
    _known.remove(process_set)
    process_set.process_set_id = None
    return True


def of_ranks(ranks: list[int] | None) -> ProcessSet:
    matching = [known for known in _known if known.ranks == ranks]
    return matching[0] if matching else global_process_set


def of_group(group: Any) -> ProcessSet:
    """Return a process set of a process group (None: all ranks), which its collectives use."""
    if group is None or group == dist.group.WORLD:
        ranks = tuple(range(dist.get_world_size()))
    else:
        ranks = tuple(dist.get_process_group_ranks(group))
        _groups[ranks] = group  # an earlier one of these ranks may have been destroyed
    process_set = ProcessSet(ranks)
    process_set.process_set_id = 0  # as if it was added; `size` and `rank` ask for it
    return process_set


def group_of(ranks: tuple[int, ...]) -> Any:
    """Return the process group of `ranks`, of which this process is a member.

    The group is created at the first call, which all its members must make.
    """
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if ranks not in _groups:
        limit = datetime.timedelta(seconds=timeouts.seconds())  # else PyTorch's half an hour
        members = list(ranks)
        # Only members get here: without this option, all ranks would have to.
        _groups[ranks] = dist.new_group(members, limit, use_local_synchronization=True)
    return _groups[ranks]


class Members:
    """Global ranks by the ranks of a process set, from 0; `rank` is -1 outside of it."""

    def __init__(self, process_set: Any = None) -> None:
        self.process_set = process_set
        ranks = None if process_set is None else process_set.ranks
        self._ranks = tuple(ranks or range(dist.get_world_size()))
        own = dist.get_rank()
        self.size = len(self._ranks)
        self.rank = self._ranks.index(own) if own in self._ranks else -1

    def globally(self, rank: int) -> int:
        return self._ranks[rank]

    def group(self, group: tuple[int, ...] | None) -> Any:
        members = range(self.size) if group is None else group
        return group_of(tuple(self._ranks[rank] for rank in members))

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        for group in groups:
            if self.rank in group:
                self.group(group)
