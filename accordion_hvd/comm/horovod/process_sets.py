"""Horovod's process sets, for all frameworks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from horovod.common import process_sets as _horovod

from accordion_hvd.comm.agreement import started_by_mpi


def registered() -> list[Any]:
    """Return all process sets that Horovod knows, the global one first."""
    known = [_horovod.global_process_set]
    # Horovod has no public list of process sets.
    for number, ranks in _horovod._basics._get_process_set_ids_and_ranks().items():
        if number != _horovod.global_process_set.process_set_id:
            process_set = _horovod.ProcessSet(list(ranks))
            process_set.process_set_id = number
            known.append(process_set)
    return known


def of_ranks(ranks: list[int] | None) -> Any:
    return next(_of(ranks), _horovod.global_process_set)


def _of(ranks: list[int] | None) -> Iterator[Any]:
    return (known for known in registered() if known.ranks == ranks)


def addable() -> bool:
    value = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    return value.isdecimal() and int(value) > 0


def let_add() -> None:
    """Allow Horovod to add process sets later if it runs over MPI, where this costs nothing.

    Call this function before Horovod starts. Over Gloo, each small operation would take 1.5 times
    as long, even if no process set is added. A setting of the job has precedence.
    """
    over_gloo = os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
    if not over_gloo and started_by_mpi():
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


class Members:
    """Horovod's ranks by the ranks of a process set, from 0; `rank` is -1 outside of it."""

    def __init__(self, process_set: Any = None) -> None:
        self.process_set = process_set or _horovod.global_process_set
        self.size = self.process_set.size() or 1
        self.rank = self.process_set.rank() if self.process_set.included() else -1
        self._subsets: dict[tuple[int, ...], Any] = {}  # reading Horovod's list is slow

    def globally(self, rank: int) -> int:
        """Return Horovod's global rank of member `rank`.

        Horovod takes the root of a broadcast as a global rank, within a process set too.
        """
        ranks = self.process_set.ranks
        return ranks[rank] if ranks else rank

    def subset(self, group: tuple[int, ...] | None) -> Any:
        """Return the process set of a group of members; `process_set` itself for None.

        Raises:
            ValueError: if no such process set is registered.
        """
        if group is None:
            return self.process_set
        if group not in self._subsets:
            ranks = self._globally(group)
            found = next(_of(ranks), None)
            if found is None:
                raise ValueError(
                    f"no process set of ranks {ranks} is registered; pass it to "
                    "hvd.init(process_sets=...)."
                )
            self._subsets[group] = found
        return self._subsets[group]

    def register(self, groups: Sequence[tuple[int, ...]], addable: bool) -> None:
        """Add the process sets of groups that have none yet; collective.

        Raises:
            ValueError: on all ranks, if a process set is missing and cannot be added.
        """
        known = [process_set.ranks for process_set in registered()]
        missing = [ranks for ranks in map(self._globally, groups) if ranks not in known]
        # Adding a process set involves all ranks, but only members of this one run this function.
        if missing and self.process_set.process_set_id != 0:
            raise ValueError(
                f"the process set of ranks {self.process_set.ranks} needs process sets of the "
                f"ranks {missing}, too: pass them to hvd.init(process_sets=...)."
            )
        if missing and not addable:
            raise ValueError(
                f"process sets of ranks {missing} are needed: call "
                'hvd.init(process_sets="dynamic") or start all ranks with '
                "HOROVOD_DYNAMIC_PROCESS_SETS=1, so that they can be added."
            )
        for ranks in missing:
            _horovod.add_process_set(ranks)

    def _globally(self, group: Sequence[int]) -> list[int]:
        return sorted(self.globally(rank) for rank in group)
