"""Who shares a machine with whom: for exchanges that are dense within one, compressed between."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd.base import Machines

if TYPE_CHECKING:
    from accordion_hvd.communicator import Communicator
    from accordion_hvd.policy import Policy

VARIABLE = "ACCORDION_HVD_LOCAL_SIZE"
"""The environment variable that says how many consecutive ranks pass for a machine."""


@dataclass(frozen=True)
class Place:
    """Where a rank is.

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
    """Where `rank` of `size` ranks is; without machines, each rank has one of its own.

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


def meet(communicator: Communicator, policy: Policy, device: Any = None) -> None:
    """Learn who shares a machine, if a level of `policy` asks for it; collective, once.

    All groups that requests will name are registered here: every rank registers all of them, in
    one order, also those that it is not part of.

    Raises:
        ValueError: on every rank: machines have different numbers of ranks, or the engine does
            not know the groups and cannot learn them.
    """
    if not policy.by_machine or communicator.machines or communicator.size == 1:
        return
    from accordion_hvd.guard import gather

    mine = np.array([_key(communicator.rank), communicator.extensible], np.int64)
    conversation = gather(communicator, communicator.xp.asarray(mine, device))
    table = communicator.run("accordion.machines", conversation)
    members: dict[int, list[int]] = {}
    for rank, row in enumerate(table):
        members.setdefault(int(row[0]), []).append(rank)
    machines = tuple(tuple(ranks) for ranks in members.values())
    require_equal(machines)
    communicator.extensible = all(bool(row[1]) for row in table)
    communicator.register(groups(machines))
    communicator.machines = machines


def groups(machines: Machines) -> list[tuple[int, ...]]:
    """All groups that are neither one rank nor all: machines, then ranks of the same place."""
    if len(machines) == 1 or len(machines[0]) == 1:
        return []
    return [*machines, *zip(*machines, strict=True)]


def _key(rank: int) -> int:
    """A number that ranks of one machine have in common: of its name, as Horovod does."""
    local_size = os.environ.get(VARIABLE)
    if local_size:
        if not local_size.isdecimal() or int(local_size) == 0:
            raise ValueError(f"{VARIABLE} is {local_size!r}, but must be an integer of at least 1.")
        return rank // int(local_size)
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
