"""Prediction of the time of a training step on a cluster, from measurements on one machine.

The operations are those of Gloo, which Horovod and torch.distributed use on CPUs. Before Gloo sends
a message, the receiver tells the sender that it is ready, so a message takes a round trip. Gloo's
allreduce sends two or more segments of at most 1 MB per rank around a ring of all ranks, two at a
time. Horovod's ranks negotiate again and again: they reduce a few bytes around the ring to find the
operations that all of them have requested. A request waits until the present negotiation, or the
operations that followed it, have ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.recording import Launch, Operation
from accordion_hvd.simulation.clocks import Clocks
from accordion_hvd.simulation.links import moved_bytes
from accordion_hvd.simulation.programs import Program

SEGMENT = 1 << 20
"""Largest segment of Gloo's allreduce in bytes."""

GOODPUT = 0.955
"""Part of a link's rate that remains for data, after the headers of Ethernet, IP and TCP."""

CYCLE = 1e-3
"""Least seconds from one negotiation of Horovod to the next."""

JOINED = ("allreduce", "allgather")
"""Operations that Horovod joins if they are requested together."""

SKIPPED, PERIODS = 3, 9
"""Periods of steps until negotiations and steps are in step, and simulated periods in all."""


@dataclass(frozen=True)
class EngineCosts:
    """Costs of an engine's operations.

    Args:
        overhead: seconds per operation.
        hop: seconds per message between two ranks, besides the link's delay.
        byte: seconds per byte that a rank sends or receives.
        negotiates: whether ranks negotiate before operations (Horovod).
        cycle: CPU seconds of a rank per message of a negotiation.
        window: bytes in flight between two ranks at most.
    """

    overhead: float
    hop: float
    byte: float
    negotiates: bool = False
    cycle: float = 0.0
    window: float = 4e6


COSTS = {
    "horovod": EngineCosts(1.2e-2, 5.5e-5, 7e-10, negotiates=True, cycle=1e-5, window=1.3e6),
    "torch": EngineCosts(6e-3, 7e-4, 1e-9, window=1.6e6),
}
"""Engines by name; `scripts/bench_plan.py fit` finds the numbers."""


@dataclass(frozen=True)
class Cluster:
    """Hosts and the links between them.

    Args:
        bandwidth: bytes per second of data on each host's link, in each direction.
        rtt: round-trip time of two hosts in seconds.
        cores: cores of each host that the ranks share.
        inside: bytes per second between two ranks of a host.
    """

    hosts: int
    per_host: int = 1
    bandwidth: float = math.inf
    rtt: float = 0.0
    cores: float = 1.0
    inside: float = 2e9

    def __post_init__(self) -> None:
        check.integer(self, "hosts", self.hosts, least=1)
        check.integer(self, "per_host", self.per_host, least=1)
        for name in ("bandwidth", "cores", "inside"):
            value = getattr(self, name)
            check.at_least(self, name, value, least=0)
            if value == 0:
                check.refuse(self, name, value, "above 0")
        check.at_least(self, "rtt", self.rtt, least=0)

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def slowness(self) -> float:
        """Return the factor by which computation takes longer because ranks share cores."""
        return max(1.0, self.per_host / self.cores)


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        seconds: duration of a step.
        compute: seconds of computation.
        work: seconds of encoding and decoding.
        sent: bytes that each host sends to other hosts.
    """

    seconds: float
    compute: float
    work: float
    sent: float

    @property
    def exposed(self) -> float:
        """Return the seconds in which the training thread does nothing but wait."""
        return max(0.0, self.seconds - self.compute - self.work)


def predict(
    steps: Sequence[Program],
    compute: float,
    cluster: Cluster,
    engine: EngineCosts,
    backward: float = 2 / 3,
    overlap: bool = True,
) -> Prediction:
    """Predict the mean step of a period, given its `Rehearsal.steps`.

    `compute` is the seconds of forward and backward pass on a core of its own, and `backward` the
    backward pass's part. With `overlap`, gradients are sent during the backward pass.
    """
    link, slowness = GlooLink(cluster, engine), cluster.slowness
    clocks = Clocks(link, np.full(1, slowness), backward, overlap)
    for period in range(PERIODS):
        if period == SKIPPED:
            begin = clocks.latest
        for step in steps:
            busy = sum(map(link.cpu, step.operations)) * slowness
            busy += slowness * compute + slowness * step.work
            least = clocks.latest + busy / (1 - link.idle_share())
            clocks.advance(step, np.full(1, compute))
            clocks.wait(least)  # no step is shorter than its work on shared cores
    count = (PERIODS - SKIPPED) * len(steps)
    return Prediction(
        (clocks.latest - begin) / count,
        slowness * compute,
        sum(slowness * step.work for step in steps) / len(steps),
        sum(sum(map(link.sent, step.operations)) for step in steps) / len(steps),
    )


class GlooLink:
    """The time of Gloo's operations, and the bytes that hosts send."""

    def __init__(self, cluster: Cluster, engine: EngineCosts) -> None:
        self.cluster, self._engine = cluster, engine
        self._cycle = 0.0  # begin of Horovod's next negotiation

    def run(self, launches: Sequence[tuple[Any, Launch]]) -> list[Any]:
        """Return when each launch is complete; an operation begins when all ranks are there."""
        latest = [(float(np.max(begin)), chains) for begin, chains in launches]
        return self._negotiated(latest) if self._engine.negotiates else self._queued(latest)

    def _queued(self, launches: Sequence[tuple[float, Launch]]) -> list[float]:
        """Run operations in order, two at a time, on one link."""
        threads, free, done = [0.0, 0.0], 0.0, []
        for moment, chains in launches:
            latest = moment
            for chain in chains:
                now = moment
                for operation in chain:
                    chosen = threads.index(min(threads))
                    start = max(now, threads[chosen])
                    seconds, wire = self._times(operation)
                    free = max(free, start) + wire
                    now = threads[chosen] = max(start + seconds, free)
                latest = max(latest, now)
            done.append(latest)
        return done

    def _negotiated(self, launches: Sequence[tuple[float, Launch]]) -> list[float]:
        """Negotiate all operations that are requested, run them one after the other, and repeat."""
        negotiation = self.negotiation()
        done = [moment for moment, _ in launches]
        waiting = [(m, i, chain) for i, (m, chains) in enumerate(launches) for chain in chains]
        while waiting:
            wanted = min(moment for moment, _, _ in waiting)
            empty = max(0, math.ceil((wanted - self._cycle) / max(CYCLE, negotiation)))
            begin = self._cycle + empty * max(CYCLE, negotiation)
            chosen = [x for x in waiting if x[0] <= begin]
            waiting = [x for x in waiting if x[0] > begin]
            now = begin + negotiation + self._together([chain[0] for _, _, chain in chosen])
            for _, i, chain in chosen:
                done[i] = max(done[i], now)
                if chain[1:]:
                    waiting.append((now, i, chain[1:]))
            self._cycle = max(now, begin + CYCLE)
        return done

    def _together(self, operations: Sequence[Operation]) -> float:
        """Return the seconds of operations; Horovod joins allreduces, and allgathers."""
        sizes: dict[tuple[str, Any], list[float]] = {}
        for x in operations:
            sizes.setdefault((x.kind, x.group), []).append(x.size)
        return sum(
            self._times(Operation(kind, size, group))[0]
            for (kind, group), found in sizes.items()
            for size in ([sum(found)] if kind in JOINED else found)
        )

    def negotiation(self) -> float:
        """Return the seconds of a negotiation."""
        return (self.cluster.ranks - 1) * self._hop(self.cluster.hosts == 1)

    def idle_share(self) -> float:
        """Return the part of a core that negotiations take while a rank computes."""
        if not self._engine.negotiates or self.cluster.slowness == 1:
            return 0.0
        own = (self.cluster.ranks - 1) * self._engine.cycle * self.cluster.slowness
        return min(0.8, own / max(CYCLE, self.negotiation()))

    def sent(self, operation: Operation) -> float:
        """Return the bytes that a host sends to other hosts."""
        if self._inside(operation):
            return 0.0
        if operation.kind == "alltoall" and operation.group is None:
            away = (self.cluster.hosts - 1) / self.cluster.hosts
            return self.cluster.per_host * away * operation.size
        return moved_bytes(operation.kind, operation.size, self._ranks(operation))

    def cpu(self, operation: Operation) -> float:
        """Return the CPU seconds of a rank's part of an operation."""
        moved = moved_bytes(operation.kind, operation.size, self._ranks(operation))
        return self._engine.overhead + 2 * self._engine.byte * moved

    def _ranks(self, operation: Operation) -> int:
        return self.cluster.ranks if operation.group is None else len(operation.group)

    def _inside(self, operation: Operation) -> bool:
        group, local = operation.group, self.cluster.per_host
        if group is None:
            return self.cluster.hosts == 1
        return len({rank // local for rank in group}) == 1

    def _hop(self, inside: bool) -> float:
        return (0.0 if inside else self.cluster.rtt) + self._engine.hop * self.cluster.slowness

    def _times(self, operation: Operation) -> tuple[float, float]:
        ranks, inside = self._ranks(operation), self._inside(operation)
        if ranks == 1:
            return 0.0, 0.0
        moved, hop = moved_bytes(operation.kind, operation.size, ranks), self._hop(inside)
        if operation.kind == "alltoall":
            moved *= self.cluster.per_host
        wire = moved * self._byte(inside)
        own = self._engine.overhead * self.cluster.slowness
        if operation.kind == "allreduce":
            pieces = max(2, math.ceil(operation.size / ranks / SEGMENT))
            # Two segments are in flight at a time, even if the link could carry more.
            return own + max((ranks - 1) * pieces * hop + wire / 2, wire + hop), wire
        if operation.kind == "allgather":
            return own + (ranks - 1) * hop + wire, wire
        if operation.kind == "broadcast":
            hops = math.ceil(math.log2(ranks))
            return own + hops * (hop + wire), hops * wire
        return own + hop + wire, wire

    def _byte(self, inside: bool) -> float:
        copying = 2 * self._engine.byte * self.cluster.slowness
        between = 0.0
        if not inside:
            between = max(1 / self.cluster.bandwidth, self.cluster.rtt / self._engine.window)
        within = 1 / self.cluster.inside if inside or self.cluster.per_host > 1 else 0.0
        return max(between + copying, within)


def wire_seconds(seconds: float, ranks: int, rtt: float) -> float:
    """Return the time in which an allreduce fills the link; the inverse of `GlooLink`.

    `seconds` is the duration of the allreduce, of two segments or fewer per rank, less that of one
    element.
    """
    trips = (ranks - 1) * rtt
    return max(min(2 * (seconds - trips), seconds + trips - rtt), seconds / 20)
