"""The place of each rank on its host, for methods that treat hosts in two levels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from accordion_hvd.core.base import Hosts


@dataclass(frozen=True)
class Placement:
    """The place of a rank: its host and its number there.

    Attributes:
        intra: the ranks of its host, itself among them.
        inter: the ranks that have its place on each of the hosts, itself among them.
        local_rank: its number among `intra`.
        host: its host's number, which is its own among `inter`.
    """

    intra: tuple[int, ...]
    inter: tuple[int, ...]
    local_rank: int
    host: int


@functools.cache
def place(hosts: Hosts, rank: int, size: int) -> Placement:
    """Return the place of `rank`; without known hosts, each rank has one of its own.

    Raises:
        ValueError: hosts have different numbers of ranks.
    """
    hosts = hosts or consecutive(size, 1)
    require_equal(hosts)
    number = next(i for i, members in enumerate(hosts) if rank in members)
    intra = hosts[number]
    local = intra.index(rank)
    return Placement(intra, tuple(members[local] for members in hosts), local, number)


def require_equal(hosts: Hosts) -> None:
    """See that all hosts have equally many ranks.

    Raises:
        ValueError: they have not.
    """
    counts = [len(members) for members in hosts]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the hosts have {', '.join(map(str, counts))} ranks, but to exchange host by "
            "host they must have equally many: a mean over hosts of their means would weigh "
            "some ranks more."
        )


def consecutive(ranks: int, local_size: int) -> Hosts:
    """Hosts of `local_size` consecutive ranks each; the last one may have fewer."""
    everybody = tuple(range(ranks))
    return tuple(everybody[first : first + local_size] for first in range(0, ranks, local_size))


def groups(hosts: Hosts) -> list[tuple[int, ...]]:
    """Return all groups between one rank and all ranks: hosts, then ranks of the same place."""
    if len(hosts) == 1 or len(hosts[0]) == 1:
        return []
    return [*hosts, *zip(*hosts, strict=True)]
