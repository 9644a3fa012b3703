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
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.comm.recording import Operation, RehearsalCommunicator
from accordion_hvd.core.base import Hosts, Info, Tensor
from accordion_hvd.core.placement import consecutive
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import BucketState
from accordion_hvd.engine.ledger import as_ledger
from accordion_hvd.policies import Fixed
from accordion_hvd.simulation.links import moved_bytes
from accordion_hvd.simulation.programs import FusionGroup, Gradients

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
class Engine:
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


ENGINES = {
    "horovod": Engine(1.2e-2, 5.5e-5, 7e-10, negotiates=True, cycle=1e-5, window=1.3e6),
    "torch": Engine(6e-3, 7e-4, 1e-9, window=1.6e6),
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
    steps: Sequence[RehearsedStep],
    compute: float,
    cluster: Cluster,
    engine: Engine,
    backward: float = 2 / 3,
    overlap: bool = True,
) -> Prediction:
    """Predict the mean step of a period, given its `Rehearsal.steps`.

    `compute` is the seconds of forward and backward pass on a core of its own, and `backward` the
    backward pass's part. With `overlap`, gradients are sent during the backward pass.
    """
    link = GlooLink(cluster, engine)
    rank = _Rank(compute, link, backward, overlap)
    for period in range(PERIODS):
        if period == SKIPPED:
            begin = rank.now
        for step in steps:
            rank.take(step)
    count = (PERIODS - SKIPPED) * len(steps)
    return Prediction(
        (rank.now - begin) / count,
        compute * cluster.slowness,
        sum(map(rank.work, steps)) / len(steps),
        sum(sum(map(link.sent, step.operations)) for step in steps) / len(steps),
    )


class _Rank:
    """The training thread of a rank, like that of all others; `now` is the end of its last step."""

    def __init__(self, compute: float, link: GlooLink, backward: float, overlap: bool) -> None:
        self._link, self._overlap, self._slowness = link, overlap, link.cluster.slowness
        self._compute, self._backward = compute * self._slowness, backward
        self.now = 0.0

    def work(self, step: RehearsedStep) -> float:
        return self._slowness * (step.encode + sum(sum(group.decode) for group in step.groups))

    def take(self, step: RehearsedStep) -> None:
        """Take a step, which is not shorter than its work on shared cores."""
        busy = sum(map(self._link.cpu, step.operations)) * self._slowness
        busy += self._compute + self.work(step)
        least = self.now + busy / (1 - self._link.idle_share())
        self.now = max(self._end(step), least)

    def _end(self, step: RehearsedStep) -> float:
        """Return the end of a step if its operations take no time of the training thread.

        The second requests follow when the first ones of all groups have been answered.
        """
        now = self.now + self._compute + step.encode * self._slowness
        waiting = sorted(step.groups, key=lambda group: group.encode)
        launches = [(self._ready(x) if self._overlap else now, x.rounds[0]) for x in waiting]
        number = 0
        while waiting:
            done = self._link.run(launches)
            if number == 0:
                now = max([now, *done])
            arrived = sorted(zip(done, waiting, strict=True), key=lambda pair: pair[0])
            launches, waiting = [], []
            for moment, group in arrived:
                now = max(now, moment) + group.decode[number] * self._slowness
                if number + 1 < len(group.rounds):
                    launches.append((now, group.rounds[number + 1]))
                    waiting.append(group)
            number += 1
        return now

    def _ready(self, group: FusionGroup[Launch]) -> float:
        """Return the time at which a group's first requests are launched."""
        forward = (1 - self._backward) * self._compute
        share = group.ready * self._backward * self._compute
        return self.now + forward + share + group.encode * self._slowness


class GlooLink:
    """The time of Gloo's operations, and the bytes that hosts send."""

    def __init__(self, cluster: Cluster, engine: Engine) -> None:
        self.cluster, self._engine = cluster, engine
        self._cycle = 0.0  # begin of Horovod's next negotiation

    def run(self, launches: Sequence[tuple[float, Launch]]) -> list[float]:
        """Return when each launch is complete, given all of them and their times, in order."""
        return self._negotiated(launches) if self._engine.negotiates else self._queued(launches)

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


# ------------------------------------------------------------------------------------ the rehearsal
SECONDS, LEAST, MOST = 0.5, 3, 12
"""Duration of the measured steps of a configuration, and bounds on their number."""

PLACE = re.compile(r"\.g(\d+)\.r(\d+)\.(\d+)")
"""Numbers of fusion group, round and chain, in the name of an operation."""

Launch = tuple[tuple[Operation, ...], ...]
"""Chains of operations that start together; the operations of a chain follow one another."""


@dataclass(frozen=True)
class RehearsedStep:
    """Fusion groups of a step, in the order of their launch, and the seconds of encoding."""

    groups: tuple[FusionGroup[Launch], ...]
    encode: float

    @property
    def operations(self) -> list[Operation]:
        launches = [launch for group in self.groups for launch in group.rounds]
        return [operation for launch in launches for chain in launch for operation in chain]


@dataclass(frozen=True)
class _Measured:
    """Seconds and operations of one step.

    Attributes:
        encode: seconds until each bucket batch has started.
        rest: seconds from then on.
        shares: the fusion groups' parts of `rest`.
        operations: name -> operation.
    """

    encode: list[float]
    rest: float
    shares: list[float]
    operations: dict[str, Operation]


class _LeadingExchange(Exchange):
    """An exchange whose rank 0 leads in each step, if leaders rotate."""

    def info(self, entry: BucketState, step: Any = None) -> Info:
        info, ranks = super().info(entry, step), self.communicator.size
        return replace(info, step=-(-info.step // ranks) * ranks)


class Rehearsal:
    """An exchange on one rank, as if all ranks had equal gradients.

    Args:
        policy: the policy of one compressor.
        values: gradients with values, in the same order.
        native_fp16: whether the engine adds fp16.
        synchronize: waits until the device of the gradients has finished.

    Raises:
        ValueError: if the policy may change the compressor.
    """

    def __init__(
        self,
        policy: Any,
        gradients: Gradients,
        values: Sequence[Tensor],
        xp: ModuleType,
        ranks: int,
        local_size: int = 1,
        native_fp16: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        if not isinstance(policy, Fixed) or policy.gate is not None:
            check.refuse("rehearsal", "configuration", policy, "one compressor, such as powersgd:4")
        self._gradients, self._values, self._synchronize = gradients, list(values), synchronize
        self._hosts: Hosts = consecutive(ranks, local_size)
        self._communicator = RehearsalCommunicator(xp, ranks, self._hosts, native_fp16)
        self._exchange = _LeadingExchange(
            self._communicator, policy, gradients.tensors, skip=gradients.skip,
            ledger=as_ledger(False),
        )  # fmt: skip

    def steps(self, seconds: float = SECONDS) -> list[RehearsedStep]:
        """Return each step of the compressor's period, with its median time over `seconds`."""
        exchange = self._exchange
        startup = max((x.compressor.startup_steps for x in exchange.bucket_states), default=0)
        for _ in range(startup + 2):
            self._step()
        period = max(1, exchange.layout.period)
        while exchange.counted % period:
            self._step()
        steps: list[_Measured] = []
        began = time.perf_counter()
        while len(steps) < LEAST * period or (
            time.perf_counter() - began < seconds and len(steps) < MOST * period
        ):
            steps.append(self._step())
        return [self._rehearsed(steps[turn::period]) for turn in range(period)]

    def _step(self) -> _Measured:
        exchange, communicator = self._exchange, self._communicator
        communicator.operations = {}
        exchange.begin()
        encode = []
        for index, batch in enumerate(exchange.layout.batches):
            with _Clock(communicator, self._synchronize) as clock:
                grad = batch.pack([self._values[member] for member in batch.members], True)
                weights = grad if batch.first.compressor.needs_weights else None
                exchange.start(index, grad, weights)
            encode.append(clock.seconds)
        step = exchange.running
        assert step is not None
        with _Clock(communicator, self._synchronize) as clock:
            exchange.finish()
            exchange.means()
        decode = [cost.decode for cost in step.costs]
        shares = [x / (sum(decode) or 1.0) for x in decode]
        return _Measured(encode, clock.seconds, shares, communicator.operations)

    def _rehearsed(self, steps: Sequence[_Measured]) -> RehearsedStep:
        """Return a step, given measurements of steps with the same operations."""
        layout, ready = self._exchange.layout, self._gradients.ready
        encode = [statistics.median(x) for x in zip(*(step.encode for step in steps), strict=True)]
        rest = statistics.median(step.rest for step in steps)
        shares = [statistics.mean(x) for x in zip(*(step.shares for step in steps), strict=True)]
        rounds = _rounds(steps[-1].operations)
        groups, done = [], 0.0
        for number, members in enumerate(layout.groups):
            done += sum(encode[index] for index in members)
            share = max(ready[m] for index in members for m in layout.batches[index].members)
            own = rounds.get(number, [()])
            decode = (rest * shares[number] / len(own),) * len(own)
            groups.append(FusionGroup(share, done, tuple(own), decode))
        return RehearsedStep(tuple(groups), sum(encode))


def _rounds(operations: dict[str, Operation]) -> dict[int, list[Launch]]:
    found: dict[int, dict[int, dict[int, list[Operation]]]] = {}
    for name, operation in operations.items():
        if match := PLACE.search(name):
            group, round_, chain = map(int, match.groups())
            found.setdefault(group, {}).setdefault(round_, {}).setdefault(chain, [])
            found[group][round_][chain].append(operation)
    return {
        group: [tuple(map(tuple, rounds[r].values())) for r in sorted(rounds)]
        for group, rounds in found.items()
    }


class _Clock:
    """Seconds of a block, without what the engine would do."""

    def __init__(self, communicator: RehearsalCommunicator, synchronize: Callable[[], None]):
        self._communicator, self._synchronize = communicator, synchronize

    def __enter__(self) -> _Clock:
        self._synchronize()
        self._engine = self._communicator.seconds
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        engine = self._communicator.seconds - self._engine
        self.seconds = max(0.0, time.perf_counter() - self._began - engine)
