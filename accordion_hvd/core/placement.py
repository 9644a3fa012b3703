"""Placement of ranks on hosts, for methods that exchange within hosts and between hosts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from accordion_hvd.core.base import Hosts


@dataclass(frozen=True)
class Placement:
    """Host of a rank, and the rank's number there.

    Attributes:
        intra: ranks of the same host, this rank included.
        inter: ranks with the same `local_rank`, one per host, this rank included.
        local_rank: position of the rank in `intra`.
        host: number of the host, which is the position of the rank in `inter`.
    """

    intra: tuple[int, ...]
    inter: tuple[int, ...]
    local_rank: int
    host: int


@functools.cache
def place(hosts: Hosts, rank: int, size: int) -> Placement:
    """Return the placement of `rank`. If the hosts are not known, each rank has its own host."""
    hosts = hosts or consecutive(size, 1)
    require_equal(hosts)
    number = next(i for i, members in enumerate(hosts) if rank in members)
    intra = hosts[number]
    local = intra.index(rank)
    return Placement(intra, tuple(members[local] for members in hosts), local, number)


def require_equal(hosts: Hosts) -> None:
    """Raise ValueError unless all hosts have equally many ranks."""
    counts = [len(members) for members in hosts]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the hosts have {', '.join(map(str, counts))} ranks, but to exchange host by host "
            "they must have equally many: a mean of the hosts' means would give some ranks more "
            "weight than others."
        )


def consecutive(ranks: int, local_size: int) -> Hosts:
    """Return hosts of `local_size` consecutive ranks each; the last host may have fewer."""
    numbers = tuple(range(ranks))
    return tuple(numbers[first : first + local_size] for first in range(0, ranks, local_size))


def groups(hosts: Hosts) -> list[tuple[int, ...]]:
    """Return the groups for exchanges within hosts, then those for exchanges between hosts.

    No groups are needed if there is only one host or only one rank per host.
    """
    if len(hosts) == 1 or len(hosts[0]) == 1:
        return []
    return [*hosts, *zip(*hosts, strict=True)]
