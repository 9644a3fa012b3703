"""Agreement of all ranks on their settings, and discovery of hosts and launchers."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import json
import os
import socket
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Broadcast,
    ExchangeGenerator,
    Tensor,
    groups,
    require_equal,
)

_HEAD, _LENGTH = 4096, 8  # bytes of the first message of `share`, and of the length in it


class RanksDisagree(RuntimeError):
    """Raised if ranks were set up differently."""

    __init__ = Exception.__init__


def gather(communicator: Communicator, values: Tensor) -> ExchangeGenerator:
    """Return all ranks' `values` as NumPy arrays, in rank order."""
    parts = yield Allgather(values)
    return [communicator.xp.to_numpy(part) for part in parts]  # type: ignore[return-value]


def largest(numbers: Tensor) -> ExchangeGenerator:
    """Return the largest number of all ranks, for each of `numbers`."""
    return (yield Allreduce(numbers, op="max"))  # type: ignore[return-value]


def share(communicator: Communicator, value: Any, device: Any = None) -> Generator[Any, Any, Any]:
    """Return rank 0's `value`, which JSON must support, on every rank.

    A first message contains the length of the text and its beginning. Only a long text needs a
    second one.
    """
    xp, words = communicator.xp, json.dumps(value).encode()
    head = np.zeros(_HEAD, np.uint8)  # of one size on all ranks: only rank 0 knows the length
    begin = np.frombuffer(len(words).to_bytes(_LENGTH, "little") + words[: _HEAD - _LENGTH], "u1")
    head[: begin.size] = begin
    sent = yield Broadcast(xp.asarray(head, device))
    told = xp.to_numpy(sent).tobytes()
    left = int.from_bytes(told[:_LENGTH], "little") + _LENGTH - _HEAD
    if left > 0:
        own = np.frombuffer(words[_HEAD - _LENGTH :], "u1") if communicator.rank == 0 else None
        rest = np.zeros(left, np.uint8) if own is None else own
        told += xp.to_numpy((yield Broadcast(xp.asarray(rest, device)))).tobytes()
    return json.loads(told[_LENGTH : left + _HEAD])


def require_agreement(communicator: Communicator, description: str, device: Any = None) -> None:
    """Check that all ranks pass the same `description`, one setting per line; collective.

    Raises:
        RanksDisagree: on every rank; the message names the ranks and the first differing line.
    """
    # Texts may be long: they travel only if their digests differ.
    digest = hashlib.blake2b(description.encode(), digest_size=8).digest()
    values = communicator.xp.asarray(np.frombuffer(digest, np.int64), device)
    digests = communicator.run("accordion.agree", gather(communicator, values))
    if all((digest == digests[0]).all() for digest in digests):
        return
    texts = communicator.run("accordion.explain", gather_texts(communicator, description, device))
    raise RanksDisagree(explain_disagreement(texts))


def gather_texts(communicator: Communicator, text: str, device: Any = None) -> ExchangeGenerator:
    """Return all ranks' texts, in rank order; a text must not be empty."""
    xp = communicator.xp
    local = xp.asarray(np.frombuffer(text.encode(), np.uint8), device)
    parts = yield Allgather(local, uneven=True)
    return [xp.to_numpy(part).tobytes().decode() for part in parts]  # type: ignore[return-value]


def explain_disagreement(texts: Sequence[str]) -> str:
    for rank, text in enumerate(texts):
        for first, other in itertools.zip_longest(texts[0].splitlines(), text.splitlines()):
            if first != other:
                odd = [r for r, description in enumerate(texts) if description != texts[0]]
                return (
                    f"ranks {odd} were set up differently from rank 0, but all ranks need the same "
                    f"settings: rank 0 has {first or 'nothing'!r} where rank {rank} has "
                    f"{other or 'nothing'!r}."
                )
    return "ranks were set up differently."


# ---------------------------------------------------------------------- the ranks that share a host
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
    # Equal on all ranks, so that `register` refuses on all of them or on none.
    communicator.extensible = all(bool(row[1]) for row in table)
    communicator.register(groups(hosts))
    communicator.hosts = hosts


def _key(rank: int) -> int:
    local_size = os.environ.get(VARIABLE)
    if local_size:
        if not local_size.isdecimal() or int(local_size) == 0:
            raise ValueError(f"{VARIABLE} is {local_size!r}, but must be an integer of at least 1.")
        return rank // int(local_size)
    # The launcher knows which ranks share a host, whatever the machine is called.
    name = os.environ.get("HOROVOD_HOSTNAME") or host_name()
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)  # it travels as int64


def host_name() -> str:
    """Return this host's name, with torchrun's number of the host if there is one."""
    group = os.environ.get("GROUP_RANK")
    return f"{socket.gethostname()}.{group}" if group else socket.gethostname()


# --------------------------------------------------------------------- the launcher of this process
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK")
"""Environment variables that MPI launchers set."""


def started_by_mpi() -> bool:
    return any(name in os.environ for name in _OF_MPI)


def started_by_horovod() -> bool:
    return "HOROVOD_RANK" in os.environ or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ


@functools.cache
def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None
