"""The ranks that wait for each other in an operation, for all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.base import Hosts, Neighbours, Request

Array = np.ndarray


class Members(Protocol):
    """The ranks that each rank waits for, itself included."""

    def latest(self, times: Array) -> Array:
        """Return, for each rank, the largest of the times of the ranks that it waits for."""

    def least(self, times: Array) -> Array:
        """Return, for each rank, the least of the times of the ranks that it waits for."""


@dataclass(frozen=True)
class Everyone:
    """Every rank waits for all ranks."""

    def latest(self, times: Array) -> Array:
        return times.max()

    def least(self, times: Array) -> Array:
        return times.min()


class Partition:
    """Disjoint groups, which together contain all ranks.

    Args:
        groups: the ranks of each group.

    Attributes:
        labels: number of each rank's group.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        sizes = [len(group) for group in groups]
        self._order = np.concatenate([np.asarray(group, np.int64) for group in groups])
        self._starts = np.cumsum([0, *sizes[:-1]])
        self.labels = np.empty(sum(sizes), np.int64)
        self.labels[self._order] = np.repeat(np.arange(len(groups)), sizes)

    def latest(self, times: Array) -> Array:
        """Return the largest time of each rank's group."""
        return np.maximum.reduceat(times[self._order], self._starts)[self.labels]

    def least(self, times: Array) -> Array:
        """Return the least time of each rank's group."""
        return np.minimum.reduceat(times[self._order], self._starts)[self.labels]


class Neighbourhood:
    """Each rank receives tensors from its senders, `of`, and sends its own to receivers, `to`."""

    def __init__(self, to: Sequence[Sequence[int]], of: Sequence[Sequence[int]]) -> None:
        self.to, self.of = tuple(map(tuple, to)), tuple(map(tuple, of))
        self._waits = np.concatenate([(rank, *of) for rank, of in enumerate(self.of)])
        self._starts = np.cumsum([0, *[1 + len(of) for of in self.of[:-1]]])

    def latest(self, times: Array) -> Array:
        return np.maximum.reduceat(times[self._waits], self._starts)

    def least(self, times: Array) -> Array:
        return np.minimum.reduceat(times[self._waits], self._starts)


def members_of_requests(requests: Mapping[int, Request], ranks: int) -> Members:
    """Return the groups of all ranks, given their requests of one kind; others wait for no one."""
    neighbours = {r: ask for r, ask in requests.items() if isinstance(ask, Neighbours)}
    if neighbours:
        pairs = [
            (neighbours[r].to, neighbours[r].of) if r in neighbours else ((), ())
            for r in range(ranks)
        ]
        return Neighbourhood([to for to, _ in pairs], [of for _, of in pairs])
    groups = list(dict.fromkeys(request.group for request in requests.values()))
    named = [group for group in groups if group is not None]
    if len(named) < len(groups):
        return Everyone()
    others = set(range(ranks)) - {rank for group in named for rank in group}
    return Partition([*named, *((rank,) for rank in sorted(others))])


def members_of(group: tuple[int, ...] | None, ranks: int, hosts: Hosts) -> Members:
    """Return the groups of all ranks, given that of rank 0, or None for all ranks.

    Raises:
        ValueError: if the group is neither a host nor the first ranks of all hosts.
    """
    if group is None or len(group) == ranks:
        return Everyone()
    if group == hosts[0]:
        return Partition(hosts)
    columns = list(zip(*hosts, strict=False))
    if group == columns[0]:
        return Partition(columns)
    check.refuse(
        "simulate_job", "group of rank 0", group, "all ranks, a host, or one rank per host"
    )
    raise AssertionError
