"""Discovery of the ranks that share a host."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any

import numpy as np

from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.placement import groups, require_equal

VARIABLE = "ACCORDION_HVD_LOCAL_SIZE"
"""Environment variable with the number of consecutive ranks that count as one host."""


def discover_hosts(communicator: Communicator, wanted: bool, device: Any = None) -> None:
    """Set `communicator.hosts` to the ranks of each host; collective, and done once.

    All groups that requests will name are registered, too. Each rank registers all groups in the
    same order, including groups that it is not a member of.

    Args:
        wanted: whether the hosts are needed (`Policy.topology_aware`).

    Raises:
        ValueError: on every rank, if hosts have different numbers of ranks, or if the engine does
            not know the groups and cannot register them.
    """
    if not wanted or communicator.hosts or communicator.size == 1:
        return
    row = np.array([_key(communicator.rank), communicator.extensible], np.int64)
    values = communicator.xp.asarray(row, device)
    table = communicator.run("accordion.hosts", gather(communicator, values))
    members: dict[int, list[int]] = {}
    for rank, row in enumerate(table):
        members.setdefault(int(row[0]), []).append(rank)
    hosts = tuple(tuple(ranks) for ranks in members.values())
    require_equal(hosts)
    communicator.extensible = all(bool(row[1]) for row in table)
    communicator.register(groups(hosts))
    communicator.hosts = hosts


def _key(rank: int) -> int:
    """Return a number that identifies the host, derived from its name as the launcher knows it."""
    local_size = os.environ.get(VARIABLE)
    if local_size:
        if not local_size.isdecimal() or int(local_size) == 0:
            raise ValueError(f"{VARIABLE} is {local_size!r}, but must be an integer of at least 1.")
        return rank // int(local_size)
    name = os.environ.get("HOROVOD_HOSTNAME") or host_name()
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def host_name() -> str:
    """Return this host's name, with torchrun's number of the host if there is one."""
    group = os.environ.get("GROUP_RANK")
    return f"{socket.gethostname()}.{group}" if group else socket.gethostname()
