"""Horovod's process sets, whichever framework's module registered them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from horovod.common import process_sets as _horovod

from accordion_hvd.comm.launcher import started_by_mpi


def registered() -> list[Any]:
    """Return all process sets that Horovod knows, the global one first."""
    known = [_horovod.global_process_set]
    # Horovod has no public list of them.
    for number, ranks in _horovod._basics._get_process_set_ids_and_ranks().items():
        if number != _horovod.global_process_set.process_set_id:
            found = _horovod.ProcessSet(list(ranks))
            found.process_set_id = number
            known.append(found)
    return known


def of_ranks(ranks: list[int] | None) -> Any:
    """Return the process set of these ranks; the global one for None or unknown ranks."""
    matching = [known for known in registered() if known.ranks == ranks]
    return matching[0] if matching else _horovod.global_process_set


def addable() -> bool:
    """Return whether process sets can be added now (Horovod decides at its start)."""
    word = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    return word.isdecimal() and int(word) > 0


def let_add() -> None:
    """Before Horovod starts: let it add process sets later where that costs nothing, over MPI.

    Over Gloo each small operation takes half as long again then, whether groups are used or not.
    What the job says of it stays.
    """
    over_gloo = os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
    if not over_gloo and started_by_mpi():
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


class Members:
    """Conversion between Horovod's ranks and the ranks within a process set, which count from 0.

    Attributes:
        process_set: the process set.
        size: how many members it has.
        rank: this process' number among them; -1 outside.
    """

    def __init__(self, process_set: Any = None) -> None:
        self.process_set = process_set or _horovod.global_process_set
        self.size = self.process_set.size() or 1
        self.rank = self.process_set.rank() if self.process_set.included() else -1
        self._subsets: dict[tuple[int, ...], Any] = {}  # Horovod's list of them is slow to read

    def globally(self, rank: int) -> int:
        """Horovod's number of member `rank`; it counts roots globally, within a set too."""
        ranks = self.process_set.ranks
        return ranks[rank] if ranks else rank

    def subset(self, group: tuple[int, ...] | None) -> Any:
        """Return the process set of some members; the whole set for None.

        Raises:
            ValueError: nobody has registered one.
        """
        if group is None:
            return self.process_set
        if group not in self._subsets:
            self._subsets[group] = self._registered(group)
        return self._subsets[group]

    def register(self, groups: Sequence[tuple[int, ...]], addable: bool) -> None:
        """See that each group has a process set; collective.

        Args:
            groups: the same on all ranks.
            addable: whether Horovod can add process sets on all of them.

        Raises:
            ValueError: on all ranks, one is missing and cannot be added.
        """
        known = [process_set.ranks for process_set in registered()]
        wanted = [sorted(self.globally(rank) for rank in group) for group in groups]
        missing = [ranks for ranks in wanted if ranks not in known]
        if missing and self.process_set.process_set_id != 0:  # others do not get here
            raise ValueError(
                f"the process set of ranks {self.process_set.ranks} needs process sets of its "
                f"parts {missing}: pass them to hvd.init(process_sets=...) as well."
            )
        if missing and not addable:
            raise ValueError(
                f"process sets of ranks {missing} are needed: call "
                'hvd.init(process_sets="dynamic") or start all ranks with '
                "HOROVOD_DYNAMIC_PROCESS_SETS=1, so that they can be added."
            )
        for ranks in missing:
            _horovod.add_process_set(ranks)

    def _registered(self, group: tuple[int, ...]) -> Any:
        ranks = sorted(self.globally(rank) for rank in group)
        for known in registered():
            if known.ranks == ranks:
                return known
        raise ValueError(
            f"no process set of ranks {ranks} is registered; pass it to hvd.init(process_sets=...)."
        )
