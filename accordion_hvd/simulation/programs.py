"""The operations of the ranks in each step, and the work before and after them.

Exchange generators and exchanges are those of real jobs. Their requests are recorded on one rank,
without values, for simulated jobs; or an exchange is rehearsed on one rank, with measured seconds.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.collectives import Traffic, size_of
from accordion_hvd.comm.recording import (
    Launch,
    Operation,
    RecordingCommunicator,
    RehearsalCommunicator,
    Rounds,
    record,
)
from accordion_hvd.core.base import (
    ExchangeGenerator,
    Hosts,
    Info,
    Neighbours,
    Request,
    Tensor,
    consecutive,
)
from accordion_hvd.core.running import Running
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import Batch, BucketState, Layout, TensorInfo
from accordion_hvd.engine.ledger import as_ledger
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.random import normal
from accordion_hvd.policies import Fixed
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.policies.base import Decision, Policy
from accordion_hvd.policies.evidence import Evidence, Reading
from accordion_hvd.simulation.compute_times import Throughput
from accordion_hvd.simulation.links import Everyone, MemberTimes, members_of_requests


@dataclass(frozen=True)
class FusionGroup:
    """The requests of a fusion group.

    Attributes:
        ready: part of the backward pass after which the last gradient of the group is ready.
        encode: seconds of encoding until the group's requests are launched, those of earlier groups
            included.
        rounds: the operations of each round.
        decode: seconds of decoding after each round.
    """

    ready: float
    encode: float
    rounds: tuple[Launch, ...]
    decode: tuple[float, ...]


@dataclass(frozen=True)
class Program:
    """One step of all ranks.

    Attributes:
        groups: fusion groups, in the order in which they are launched.
        encode: seconds of encoding.
        decisions: operations before the step, which decisions of the policy need.
        batches: number of small batches whose gradients the step averages.
        traffic: bytes of rank 0, counted as `stats()` counts them.
        levels: the compressor that serves each bucket, by bucket name.
        together: the ranks whose models are in step after the step.
    """

    groups: tuple[FusionGroup, ...]
    encode: float
    decisions: Launch = ()
    batches: int = 1
    traffic: Traffic = field(default_factory=Traffic)
    levels: dict[str, str] = field(default_factory=dict)
    together: MemberTimes = Everyone()

    @property
    def work(self) -> float:
        """Return the seconds of encoding and decoding."""
        return self.encode + sum(sum(group.decode) for group in self.groups)

    @property
    def operations(self) -> list[Operation]:
        launches = [self.decisions, *(launch for group in self.groups for launch in group.rounds)]
        return [operation for launch in launches for chain in launch for operation in chain]


PLACE = re.compile(r"\.g(\d+)\.r(\d+)$")
"""Numbers of fusion group and round, in the name of a launch; see `engine.step`."""


# ---------------------------------------------------------------------------------- averaged models
SAMPLE = 4096
"""Elements of the sample model."""


class AveragingPrograms:
    """The programs of a job that averages models, step by step.

    The generators of all ranks run on a small sample model; its bytes are scaled up to `size`. Each
    group waits for all of its members.
    """

    decisions: Sequence[Decision] = ()

    def __init__(
        self,
        method: Averaging,
        size: float,
        ranks: int,
        encoding: Throughput,
        lr: Callable[[int], float],
    ) -> None:
        method.groups(ranks)  # refuses numbers of ranks that the method does not support
        self._method, self._size, self._encoding, self._lr = method, size, encoding, lr
        self._recorder = RecordingCommunicator(xp, ranks)
        self._model = xp.asarray(normal((SAMPLE,), "model"))
        self._infos = [Info(rank=rank, size=ranks, name="model") for rank in range(ranks)]
        self._states = [method.start(self._model, info) for info in self._infos]
        self._known: dict[Any, Program] = {}

    def __iter__(self) -> Iterator[Program]:
        ranks = range(1 if self._method.neighbours_only else len(self._infos))
        for step in itertools.count():
            running = [self._start(rank, step) for rank in ranks]
            first = tuple(map(size_of, (x.tensor for x in running[0].requests)))
            key = first, tuple(tuple(map(_description, x.requests)) for x in running)
            if key not in self._known:
                others = range(len(running), len(self._infos))
                running += [self._start(rank, step) for rank in others]
                self._known[key] = self._program(running)
            for exchange in running:
                exchange.close()
            yield self._known[key]

    def _start(self, rank: int, step: int) -> Running:
        """Return the generator of a rank in a step, at its first request."""
        info = replace(self._infos[rank], step=step, lr=self._lr(step))
        model = xp.copy(self._model)
        return Running(self._method.exchange(model, self._states[rank], info))

    def _program(self, running: list[Running]) -> Program:
        """Run the generators of all ranks to their ends, and return their requests."""
        rounds: list[Launch] = []
        traffic, seconds = Traffic(), []
        factor = self._size / size_of(self._model)
        while not all(exchange.done for exchange in running):
            asked = {rank: x.requests for rank, x in enumerate(running) if not x.done}
            rounds.append(self._launch(asked, traffic))
            answers = 0.0
            for rank, requests in asked.items():
                running[rank].answer([self._recorder.answer(request) for request in requests])
                answers = max(answers, sum(map(self._recorder.received, requests)))
            seconds.append(self._seconds(factor * answers))
        encode = self._seconds(0.0) if rounds else 0.0
        group = FusionGroup(1.0, encode, tuple(rounds), tuple(seconds))
        groups, levels = (group,) if rounds else (), {"model": repr(self._method)}
        last = list(itertools.chain(*rounds[-1])) if rounds else []
        together = last[-1].group if last else Everyone()
        return Program(groups, encode, (), 1, traffic, levels, together)

    def _launch(self, asked: dict[int, tuple[Request, ...]], traffic: Traffic) -> Launch:
        """Return the operations of one round, and add the bytes of rank 0 to `traffic`."""
        factor, found = self._size / size_of(self._model), []
        for number in range(max(map(len, asked.values()))):
            requests = {rank: own[number] for rank, own in asked.items() if number < len(own)}
            members = members_of_requests(requests, len(self._infos))
            for chain in self._recorder.chains([next(iter(requests.values()))]):
                found.append(tuple(replace(x, size=x.size * factor, group=members) for x in chain))
        counted = self._recorder.traffic(asked.get(0, ()))
        traffic.add(Traffic(*(factor * x for x in vars(counted).values())))
        return tuple(found)

    def _seconds(self, answers: float) -> float:
        compressor = getattr(self._method, "compressor", None)
        if compressor is None:
            return 0.0
        return self._encoding.seconds(compressor, self._size, answers)


def _description(request: Request) -> tuple[Any, ...]:
    own = (request.to, request.of) if isinstance(request, Neighbours) else ()
    return type(request), request.group, *own


# ------------------------------------------------------------------------------- averaged gradients
# The exchange, its plan, its policy and its observers are those of a real job. Only the exchange
# generators are replaced: each runs once for each shape, level and phase, and its requests are then
# repeated without values.

NormSeries = Callable[[str, int], float]
"""(bucket name, step) -> evidence, such as the norm of the sum of a window's gradients."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of a model.

    Attributes:
        tensors: the tensors in the order in which their gradients become ready.
        ready: part of the backward pass after which each gradient is ready.
        skip: patterns of the names of tensors to send uncompressed.
    """

    tensors: tuple[TensorInfo, ...]
    ready: tuple[float, ...]
    skip: tuple[str, ...] = ()


def fusion_groups(
    layout: Layout,
    gradients: Gradients,
    launched: Sequence[tuple[str, Launch]],
    encode: Sequence[float],
    decode: Callable[[int, int], tuple[float, ...]],
) -> tuple[FusionGroup, ...]:
    """Return the fusion groups of a step of an exchange.

    Args:
        launched: (name, operations) of the step's launches.
        encode: seconds of encoding of each bucket batch; they encode in the order of readiness.
        decode: function that returns the seconds of decoding after each round, given the number of
            a group and that of its rounds.
    """
    rounds: dict[int, dict[int, Launch]] = {number: {} for number in range(len(layout.groups))}
    for name, chains in launched:
        if place := PLACE.search(name):
            rounds[int(place[1])][int(place[2])] = chains
    ready = [max((gradients.ready[m] for m in x.members), default=0.0) for x in layout.batches]
    groups = []
    for number, members in enumerate(layout.groups):
        part = max(ready[i] for i in members)
        before = sum(x for x, own in zip(encode, ready, strict=True) if own <= part)
        own = [chains for _, chains in sorted(rounds[number].items())] or [()]
        groups.append(FusionGroup(part, before, tuple(own), decode(number, len(own))))
    return tuple(groups)


def falling_norms(steps: int) -> NormSeries:
    """Return a series that falls from 10 to 1 in the first half of `steps`, then stays."""
    return lambda name, step: 1 + 9 * math.exp(-10 * step / steps)


class Given(Evidence):
    """Evidence whose numbers come from a series instead of tensors."""

    def __init__(self, evidence: Evidence, series: NormSeries) -> None:
        self.key, self.everywhere = evidence.key, evidence.everywhere
        self._follows, self._series = evidence.follows, series

    @property
    def follows(self) -> bool:
        return self._follows

    def suits(self, compressor: Any) -> bool:
        """Return False: no tensors are collected."""
        return False

    def read(self, exchange: Any) -> Reading:
        """Return the numbers of the series for the exchange's next step."""
        yield from ()
        buckets = [entry.bucket for entry in exchange.bucket_states]
        chosen = [bucket.name for bucket in buckets if bucket.compress or self.everywhere]
        return {name: self._series(name, exchange.steps) for name in chosen}


def check_policy(policy: Policy) -> None:
    """Raise ValueError unless the steps of a policy can be simulated."""
    if policy.output == "model":
        check.refuse("simulate_job", "compression", policy, "one that averages gradients")
    if policy.gate is not None:
        check.refuse("simulate_job", "gate", policy.gate, "None, since a gate measures real time")
    if policy.observers.find(Alternation) is not None:
        allowed = "a policy between compressors, or an averaging method by itself"
        check.refuse("simulate_job", "compression", policy, allowed)


class GradientPrograms:
    """The programs of a job that averages gradients, step by step.

    `policy` is a copy of the given policy, with its decisions so far; `series` is the evidence for
    these.
    """

    def __init__(
        self,
        policy: Policy,
        gradients: Gradients,
        ranks: int,
        hosts: Hosts,
        encoding: Throughput,
        series: NormSeries,
        lr: Callable[[int], float],
    ) -> None:
        self.policy = copy.deepcopy(policy)
        self.policy.evidence = tuple(Given(x, series) for x in self.policy.evidence)
        self._gradients, self._encoding, self._lr = gradients, encoding, lr
        self._recorder = RecordingCommunicator(xp, ranks, hosts)
        self._exchange = Exchange(
            self._recorder, self.policy, gradients.tensors, skip=gradients.skip
        )
        self._recorded: dict[Any, Rounds] = {}

    @property
    def decisions(self) -> list[Decision]:
        """Return the decisions of the policy so far."""
        return list(self.policy.history)

    def __iter__(self) -> Iterator[Program]:
        while True:
            yield self._step()

    def _step(self) -> Program:
        """Run one step of the exchange, and return what it has launched."""
        exchange, launched = self._exchange, self._recorder.launched
        exchange.decide(self._lr(exchange.steps))
        decisions = tuple(chain for _, launch in launched for chain in launch)
        launched.clear()
        step = exchange.open(self._lr(exchange.steps))
        layout, levels = exchange.layout, exchange.levels()
        batches = exchange.policy.observers.accumulated
        work = []
        for index, batch in enumerate(layout.batches):
            rounds = self._rounds(batch)
            step.start(index, np.zeros(1, np.float32), functools.partial(replay, rounds))
            work.append(self._work(batch, rounds))
        exchange.finish()

        def decode(number: int, rounds: int) -> tuple[float, ...]:
            own = [work[i][1:] for i in layout.groups[number]]
            return tuple(map(sum, itertools.zip_longest(*own, fillvalue=0.0)))

        encode = [seconds for seconds, *_ in work]
        groups = fusion_groups(layout, self._gradients, launched, encode, decode)
        launched.clear()
        return Program(groups, sum(encode), decisions, batches, step.traffic, levels)

    def _work(self, batch: Batch, rounds: Rounds) -> list[float]:
        """Return the seconds of each call of a bucket batch's generator."""
        dense = sum(entry.bucket.dense_bytes for entry in batch.entries)
        answers = [0.0, *[sum(map(self._recorder.received, requests)) for requests in rounds]]
        return [self._encoding.seconds(batch.first.compressor, dense, x) for x in answers]

    def _rounds(self, batch: Batch) -> Rounds:
        """Return the requests of a bucket batch's generator, recorded once."""
        first, phase = batch.first, self._exchange.phase(batch.first)
        shapes = tuple(entry.bucket.shape for entry in batch.entries)
        sizes = first.bucket.sizes
        key = repr(first.compressor), phase, shapes, sizes, first.bucket.dtype, batch.stacked
        if key not in self._recorded:
            self._recorded[key] = record_batch(self._exchange, batch.entries, batch.stacked)
        return self._recorded[key]


def record_batch(exchange: Exchange, entries: Sequence[BucketState], stacked: str) -> Rounds:
    """Return the requests of a bucket batch's generator in its present phase.

    The gradient has normally distributed values, and rank 0 leads if leaders rotate.
    """
    first, communicator = entries[0], exchange.communicator
    known = exchange.info(first)

    def make(ranks: int, hosts: Hosts) -> ExchangeGenerator:
        step = -(-known.step // ranks) * ranks
        info = replace(known, step=step, size=ranks, hosts=hosts, parameter=None)
        fresh = [BucketState(x.bucket, x.levels, x.spec, x.level) for x in entries]
        batch = Batch(fresh, stacked, xp, ())
        batch.open(info, ())
        grad = batch.combine([gradient_like(entry) for entry in fresh])
        if first.needs_weights:
            info = replace(info, parameter=grad)
        return first.compressor.exchange(xp.copy(grad), batch.state, info)

    with np.errstate(all="ignore"):
        hosts = communicator.hosts if first.compressor.topology_aware else ()
        return record(make, xp, communicator.size, hosts)


def gradient_like(entry: BucketState) -> np.ndarray:
    """Return a gradient of a bucket with normally distributed values."""
    shape = entry.bucket.shape
    values = xp.cast(xp.asarray(normal(shape, entry.name)), entry.bucket.dtype)
    return xp.reshape(values, (1, *shape)) if entry.compressor.scope == "samples" else values


def replay(rounds: Rounds, grad: Any = None) -> Generator[Any, Any, Any]:
    """Repeat recorded requests; an exchange generator without a result."""
    for requests in rounds:  # noqa: UP028, since answers cannot be sent to a tuple
        yield requests
    return None, None


# ------------------------------------------------------------------------------------ the rehearsal
SECONDS, LEAST, MOST = 0.5, 3, 12
"""Duration of the measured steps of a configuration, and bounds on their number."""


@dataclass(frozen=True)
class _Measured:
    """Seconds and operations of one step.

    Attributes:
        encode: seconds until each bucket batch has started.
        rest: seconds from then on.
        shares: the fusion groups' parts of `rest`.
        launched: (name, operations) of all launches.
    """

    encode: list[float]
    rest: float
    shares: list[float]
    launched: list[tuple[str, Launch]]


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
        hosts = consecutive(ranks, local_size)
        self._communicator = RehearsalCommunicator(xp, ranks, hosts, native_fp16)
        self._exchange = _LeadingExchange(
            self._communicator, policy, gradients.tensors, skip=gradients.skip,
            ledger=as_ledger(False),
        )  # fmt: skip

    def steps(self, seconds: float = SECONDS) -> list[Program]:
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
        return [self._program(steps[turn::period]) for turn in range(period)]

    def _step(self) -> _Measured:
        exchange, communicator = self._exchange, self._communicator
        communicator.launches.clear()
        exchange.begin()
        times = [self._now()]
        for index, batch in enumerate(exchange.layout.batches):
            grad = batch.pack([self._values[member] for member in batch.members], True)
            weights = grad if batch.first.needs_weights else None
            exchange.start(index, grad, weights)
            times.append(self._now())
        step = exchange.running
        assert step is not None
        exchange.finish()
        exchange.means()
        times.append(self._now())
        *encode, rest = [max(0.0, b - a) for a, b in itertools.pairwise(times)]
        decode = [cost.decode for cost in step.costs]
        shares = [x / (sum(decode) or 1.0) for x in decode]
        return _Measured(encode, rest, shares, communicator.launched)

    def _now(self) -> float:
        """Return the time, without what the engine would have done so far."""
        self._synchronize()
        return time.perf_counter() - self._communicator.seconds

    def _program(self, steps: Sequence[_Measured]) -> Program:
        """Return a step, given measurements of steps with the same operations."""
        encode = [statistics.median(x) for x in zip(*(step.encode for step in steps), strict=True)]
        rest = statistics.median(step.rest for step in steps)
        shares = [statistics.mean(x) for x in zip(*(step.shares for step in steps), strict=True)]

        def decode(number: int, rounds: int) -> tuple[float, ...]:
            return (rest * shares[number] / rounds,) * rounds

        layout, launched = self._exchange.layout, steps[-1].launched
        groups = fusion_groups(layout, self._gradients, launched, encode, decode)
        return Program(groups, sum(encode))
