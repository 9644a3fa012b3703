"""A model of the time that operations take on the links between ranks and hosts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.recording import Launch, Operation
from accordion_hvd.core.base import Hosts, Neighbours, Request, consecutive
from accordion_hvd.ops.numpy import Array


@dataclass(frozen=True)
class Link:
    """The link of each host to all others; each rank has a host of its own by default.

    An operation of n ranks with B bytes each takes rounds x latency + bytes / bandwidth. The bytes
    that leave and enter a host are those of `comm.collectives`: 2 (n - 1) / n B for an allreduce,
    (n - 1) B for an allgather, (n - 1) / n B for a broadcast, and that of each rank for an
    alltoall. The number of rounds depends on the algorithm:

    - "tree" (recursive halving and doubling): 2 ceil(log2 n) for an allreduce, half of it for an
      allgather or a broadcast, and 1 for an alltoall. On hosts of several ranks, n is the number of
      hosts, and the rounds within hosts are added.
    - "ring": 2 (n - 1) for an allreduce, n - 1 for the others.

    All members of an operation wait for the slowest host. Operations of several groups at the same
    time share the links of their hosts.

    Args:
        latency: seconds per message, in addition to the time of its bytes; a number, or one per
            host.
        bandwidth: bytes per second, in each direction; a number, or one per host.
        algorithm: "tree" or "ring".
        local_size: number of consecutive ranks on each host, which share its link.
        inside: the link of each rank to the ranks of its host; None if it takes no time.
    """

    latency: float | Sequence[float] = 20e-6
    bandwidth: float | Sequence[float] = 1.25e9
    algorithm: str = "tree"
    local_size: int = 1
    inside: Link | None = None

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            value: Any = getattr(self, name)
            many = isinstance(value, (Sequence, np.ndarray))
            numbers = tuple(map(float, value)) if many else (value,)
            for number in numbers:
                check.at_least(self, name, number, least=0)
            if name == "bandwidth" and 0 in numbers:
                check.refuse(self, name, value, "above 0")
            check.settle(self, name, numbers if many else value)
        if self.inside is not None and self.inside._varies:
            check.refuse(self, "inside", self.inside, "a Link with one number for all hosts")
        check.one_of(self, "algorithm", self.algorithm, ("tree", "ring"))
        check.integer(self, "local_size", self.local_size, least=1)

    def of_hosts(self, hosts: Sequence[int]) -> Link:
        """Return the link of some of the hosts."""
        chosen = {
            name: tuple(value[host] for host in hosts) if isinstance(value, tuple) else value
            for name, value in (("latency", self.latency), ("bandwidth", self.bandwidth))
        }
        return replace(self, **chosen)  # type: ignore[arg-type]

    @property
    def _varies(self) -> bool:
        return isinstance(self.latency, tuple) or isinstance(self.bandwidth, tuple)

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts; ValueError unless each has one latency and bandwidth."""
        hosts = -(-ranks // self.local_size)
        for name, value in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if isinstance(value, tuple) and len(value) != hosts:
                allowed = f"{hosts}, one per host"
                check.refuse(self, f"number of values of {name}", len(value), allowed)
        return hosts


def moved_bytes(kind: str, size: float, ranks: Any) -> Any:
    """Return the bytes of each rank of a ring; see `comm.collectives`."""
    if kind == "allgather":
        return (ranks - 1) * size
    return (2 if kind == "allreduce" else 1) * (ranks - 1) / ranks * size


class Network(Protocol):
    """The time that operations take between ranks, and the bytes that hosts send."""

    def run(self, launches: Sequence[tuple[Array, Launch]]) -> list[Array]:
        """Return when each rank has the results of each launch.

        Args:
            launches: the time at which each rank launches operations, and the operations; in the
                order in which all ranks launch them.
        """

    def sent(self, operation: Operation) -> float:
        """Return the bytes that a host sends to other hosts, on average over the hosts."""


class HostLinks:
    """The links of all ranks, each of which carries one operation after the other."""

    def __init__(self, link: Link, ranks: int) -> None:
        self._link, self._host = link, np.arange(ranks) // link.local_size
        self._latency, self._bandwidth = (
            np.broadcast_to(np.asarray(x, float), link.hosts(ranks))
            for x in (link.latency, link.bandwidth)
        )
        hosts = consecutive(ranks, link.local_size)
        self._members = functools.cache(functools.partial(members_of, hosts=hosts))
        self._price = functools.cache(self._seconds_and_bytes)
        self.restart()

    def restart(self) -> None:
        """Forget operations that have not ended."""
        self._free = np.zeros(len(self._host))  # when the link of each rank is free

    def run(self, launches: Sequence[tuple[Array, Launch]]) -> list[Array]:
        done = []
        for begin, chains in launches:
            for operation in itertools.chain(*chains):
                members = self._members(operation.group)
                start = members.latest(np.maximum(begin, self._free))
                self._free = np.broadcast_to(start + self.seconds(operation), begin.shape)
            done.append(self._free if any(chains) else begin)
        return done

    def seconds(self, operation: Operation) -> Array:
        """Return the seconds of an operation for each rank; a single number if all are equal."""
        return self._price(operation)[0]

    def sent(self, operation: Operation) -> float:
        return self._price(operation)[1]

    def _seconds_and_bytes(self, operation: Operation) -> tuple[Array, float]:
        members = self._members(operation.group)
        price = self._messages if isinstance(members, Neighbourhood) else self._collective
        seconds, sent = price(operation, members)
        return seconds, float(sent.mean())

    def _collective(self, operation: Operation, members: Any) -> tuple[Array, Array]:
        """Return the seconds for each rank, and the bytes that each host sends to other hosts."""
        places, inside = _Places(members, self._host), self._link.inside
        load = np.bincount(places.host, places.moved(operation), len(self._latency))
        outside, within = self._rounds(operation.kind, places)
        slowest = self._latency[places.host] * outside + (load / self._bandwidth)[places.host]
        times = np.zeros(len(places.size))
        np.maximum.at(times, places.group, np.where(places.spans[places.group], slowest, 0.0))
        if inside is not None:
            shared = places.most > 1
            own = moved_bytes(operation.kind, operation.size, places.size) * shared
            times = np.maximum(times, own / inside.bandwidth) + within * inside.latency * shared
        return times[0] if isinstance(members, Everyone) else times[members.labels], load

    def _rounds(self, kind: str, places: _Places) -> tuple[Array, Array]:
        """Return the rounds between hosts, for each place, and within hosts, for each group."""
        factor = 2 if kind == "allreduce" else 1
        if self._link.algorithm == "ring":
            rounds = factor * (places.size - 1)
            return rounds[places.group], np.where(places.spans, 0, rounds)
        if kind == "alltoall":
            return np.ones(len(places.host)), np.where(places.spans, 0, 1)
        outside = factor * np.ceil(np.log2(places.hosts))
        return outside[places.group], factor * np.ceil(np.log2(places.most))

    def _messages(self, operation: Operation, members: Any) -> tuple[Array, Array]:
        """Return the seconds in which each rank has sent and received its messages, and bytes."""
        sent, received = (self._between(operation.size, x) for x in (members.to, members.of))
        load = np.maximum(sent, received)
        times = np.where(load == 0, 0.0, self._latency + load / self._bandwidth)
        return members.latest(times[self._host]), sent

    def _between(self, size: float, peers: Sequence[Sequence[int]]) -> Array:
        """Return the bytes of each host's messages to `peers` on other hosts."""
        host = self._host
        counts = [np.count_nonzero(host[list(x)] != host[rank]) for rank, x in enumerate(peers)]
        return np.bincount(host, size * np.array(counts, float), len(self._latency))


class _Places:
    """The hosts of each group; a place is a pair of a group and one of its hosts.

    Attributes:
        group: number of the group, for each place.
        host: number of the host, for each place.
        size: number of ranks of each group.
        hosts: number of hosts of each group.
        most: largest number of ranks on a host, for each group.
        spans: whether a group has several hosts.
    """

    def __init__(self, members: MemberTimes, host: Array) -> None:
        labels = members.labels if isinstance(members, DisjointGroups) else np.zeros_like(host)
        width = host[-1] + 1
        found, self._count = np.unique(labels * width + host, return_counts=True)
        self.group, self.host = found // width, found % width
        self.size = np.bincount(labels)
        self.hosts = np.bincount(self.group)
        self.most = np.zeros(len(self.size), np.int64)
        np.maximum.at(self.most, self.group, self._count)
        self.spans = self.hosts > 1

    def moved(self, operation: Operation) -> Array:
        """Return the bytes that leave each place, whose ranks share the links of a ring."""
        size, there = self.size[self.group], self._count
        if operation.kind == "alltoall":
            moved = there * (size - there) / size * operation.size
        else:
            moved = moved_bytes(operation.kind, operation.size, size)
        return moved * self.spans[self.group]


# ----------------------------------------------- the ranks that wait for each other in an operation
class MemberTimes(Protocol):
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


class DisjointGroups:
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


def members_of_requests(requests: Mapping[int, Request], ranks: int) -> MemberTimes:
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
    return DisjointGroups([*named, *((rank,) for rank in sorted(others))])


def members_of(group: Any, hosts: Hosts) -> MemberTimes:
    """Return the groups of all ranks, given these, that of rank 0, or None for all ranks.

    Raises:
        ValueError: if the group of rank 0 is neither a host nor the first ranks of all hosts.
    """
    if isinstance(group, (Everyone, DisjointGroups, Neighbourhood)):
        return group
    if group is None or len(group) == sum(map(len, hosts)):
        return Everyone()
    for groups in (hosts, list(zip(*hosts, strict=False))):
        if group == groups[0]:
            return DisjointGroups(groups)
    allowed = "all ranks, a host, or one rank per host"
    check.refuse("simulate_job", "group of rank 0", group, allowed)
