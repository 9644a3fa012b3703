"""The place of each rank on its host, for methods that treat hosts in two levels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from accordion_hvd.core.base import Machines


@dataclass(frozen=True)
class Place:
    """The place of a rank: its host and its number there.

    Attributes:
        near: the ranks of its machine, itself among them.
        far: the ranks that have its place on each of the machines, itself among them.
        local: its number among `near`.
        machine: its machine's number, which is its own among `far`.
    """

    near: tuple[int, ...]
    far: tuple[int, ...]
    local: int
    machine: int


@functools.cache
def place(machines: Machines, rank: int, size: int) -> Place:
    """Return the place of `rank`; without known hosts, each rank has one of its own.

    Raises:
        ValueError: machines have different numbers of ranks.
    """
    machines = machines or consecutive(size, 1)
    require_equal(machines)
    number = next(i for i, members in enumerate(machines) if rank in members)
    near = machines[number]
    local = near.index(rank)
    return Place(near, tuple(members[local] for members in machines), local, number)


def require_equal(machines: Machines) -> None:
    """See that all machines have equally many ranks.

    Raises:
        ValueError: they have not.
    """
    counts = [len(members) for members in machines]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the machines have {', '.join(map(str, counts))} ranks, but to exchange machine by "
            "machine they must have equally many: a mean over machines of their means would weigh "
            "some ranks more."
        )


def consecutive(ranks: int, local_size: int) -> Machines:
    """Machines of `local_size` consecutive ranks each; the last one may have fewer."""
    everybody = tuple(range(ranks))
    return tuple(everybody[first : first + local_size] for first in range(0, ranks, local_size))


def groups(machines: Machines) -> list[tuple[int, ...]]:
    """Return all groups between one rank and all ranks: hosts, then ranks of the same place."""
    if len(machines) == 1 or len(machines[0]) == 1:
        return []
    return [*machines, *zip(*machines, strict=True)]
