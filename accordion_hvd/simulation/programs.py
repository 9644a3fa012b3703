"""What the ranks do in each step of a simulated job: waits, requests and work, without times."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.collectives import Traffic, size_of
from accordion_hvd.comm.recording import Operation, RecordingCommunicator, Rounds, record
from accordion_hvd.core.base import ExchangeGenerator, Hosts, Info, Neighbours, Request
from accordion_hvd.core.running import Running
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import Batch, BucketState, TensorInfo
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.random import normal
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.evidence import Evidence, Reading
from accordion_hvd.simulation.compute_times import Throughput
from accordion_hvd.simulation.links import Everyone, Members, members_of, members_of_requests


@dataclass(frozen=True)
class Collective:
    """An operation of all ranks (as rank 0 sees it), in groups or among all."""

    operation: Operation
    members: Members


Round = tuple[Collective, ...]


R = TypeVar("R")


@dataclass(frozen=True)
class FusionGroup(Generic[R]):
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
    rounds: tuple[R, ...]
    decode: tuple[float, ...]


@dataclass(frozen=True)
class Program:
    """One step of all ranks.

    Attributes:
        decisions: operations before the step, which decisions of the policy need.
        groups: fusion groups, in the order in which they are launched.
        encode: seconds of encoding.
        batches: number of small batches whose gradients the step averages.
        traffic: bytes of rank 0, counted as `stats()` counts them.
        levels: the compressor that serves each bucket, by bucket name.
        together: the ranks whose models are in step after the step.
    """

    decisions: tuple[Collective, ...]
    groups: tuple[FusionGroup[Round], ...]
    encode: float
    batches: int
    traffic: Traffic
    levels: dict[str, str]
    together: Members = Everyone()

    def collectives(self) -> Iterable[Collective]:
        yield from self.decisions
        for group in self.groups:
            for round_ in group.rounds:
                yield from round_


# ---------------------------------------------------------------------------------- averaged models
SAMPLE = 4096
"""Elements of the sample model."""


class AveragingPrograms:
    """The programs of a job that averages models, step by step.

    The generators of all ranks run on a small sample model; its bytes are scaled up to `size`. Each
    group waits for all of its members.
    """

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
        rounds: list[Round] = []
        traffic, seconds = Traffic(), []
        factor = self._size / size_of(self._model)
        while not all(exchange.done for exchange in running):
            asked = {rank: x.requests for rank, x in enumerate(running) if not x.done}
            rounds.append(self._round(asked, traffic))
            answers = 0.0
            for rank, requests in asked.items():
                running[rank].answer([self._recorder.answer(request) for request in requests])
                answers = max(answers, sum(map(self._recorder.received, requests)))
            seconds.append(self._seconds(factor * answers))
        encode = self._seconds(0.0) if rounds else 0.0
        group = FusionGroup(1.0, encode, tuple(rounds), tuple(seconds))
        members = rounds[-1][-1].members if rounds and rounds[-1] else Everyone()
        levels = {"model": repr(self._method)}
        return Program((), (group,) if rounds else (), encode, 1, traffic, levels, members)

    def _round(self, asked: dict[int, tuple[Request, ...]], traffic: Traffic) -> Round:
        """Return the operations of one round, and add the bytes of rank 0 to `traffic`."""
        factor, found = self._size / size_of(self._model), []
        for number in range(max(map(len, asked.values()))):
            requests = {rank: own[number] for rank, own in asked.items() if number < len(own)}
            members = members_of_requests(requests, len(self._infos))
            first = next(iter(requests.values()))
            for operation in self._recorder.operations([first]):
                scaled = replace(operation, size=operation.size * factor)
                found.append(Collective(scaled, members))
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

Series = Callable[[str, int], float]
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


def falling_norms(steps: int) -> Series:
    """Return a series that falls from 10 to 1 in the first half of `steps`, then stays."""
    return lambda name, step: 1 + 9 * math.exp(-10 * step / steps)


class Given(Evidence):
    """Evidence whose numbers come from a series instead of tensors."""

    def __init__(self, evidence: Evidence, series: Series) -> None:
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
    if policy.target != "gradient" or policy.output not in ("gradient", "update"):
        check.refuse("simulate_job", "compression", policy, "one whose target is the gradient")
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
        series: Series,
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
        self._members: dict[Any, Members] = {}

    def __iter__(self) -> Iterator[Program]:
        while True:
            yield self._step()

    def _step(self) -> Program:
        """Run one step of the exchange, and return what it has launched."""
        exchange, launched = self._exchange, self._recorder.launched
        exchange.decide(self._lr(exchange.steps))
        decisions = [operation for _, operations in launched for operation in operations]
        launched.clear()
        step = exchange.open(self._lr(exchange.steps))
        rounds = [self._rounds(index) for index in range(len(exchange.layout.batches))]
        for index, requests in enumerate(rounds):
            step.start(index, np.zeros(1, np.float32), functools.partial(replay, requests))
        levels, groups = exchange.levels(), exchange.layout.groups
        batches = exchange.policy.observers.accumulated
        work = [self._work(index, requests) for index, requests in enumerate(rounds)]
        ready = [self._ready(index) for index in range(len(rounds))]
        exchange.finish()
        operations = dict(launched)
        launched.clear()
        return Program(
            self._collectives(decisions),
            tuple(
                self._group(n, members, operations, work, ready) for n, members in enumerate(groups)
            ),
            sum(seconds[0] for seconds in work),
            batches,
            step.traffic,
            levels,
        )

    def _ready(self, index: int) -> float:
        """Return the part of the backward pass after which a bucket batch is complete."""
        batch = self._exchange.layout.batches[index]
        return max((self._gradients.ready[member] for member in batch.members), default=0.0)

    def _group(
        self,
        number: int,
        members: Sequence[int],
        operations: Mapping[str, tuple[Operation, ...]],
        work: Sequence[Sequence[float]],
        ready: Sequence[float],
    ) -> FusionGroup[Round]:
        """Return a fusion group with its rounds.

        `members` are the positions of its bucket batches, and `operations` those of each launch, by
        its name. `work`, the seconds of each call of the generators, and `ready` are by bucket
        batch.
        """
        mark = f".g{number}.r"  # see `engine.step`
        found = {int(n.rpartition(mark)[2]): x for n, x in operations.items() if mark in n}
        rounds = [self._collectives(found[r]) for r in sorted(found)]
        share = max(ready[i] for i in members)
        before = sum(work[i][0] for i, part in enumerate(ready) if part <= share)
        longest = max(len(work[i]) for i in members)
        decode = [sum(work[i][r] for i in members if r < len(work[i])) for r in range(1, longest)]
        return FusionGroup(share, before, tuple(rounds), tuple(decode))

    def _collectives(self, operations: Sequence[Operation]) -> Round:
        return tuple(Collective(x, self._members_of(x.group)) for x in operations)

    def _members_of(self, group: tuple[int, ...] | None) -> Members:
        if group not in self._members:
            recorder = self._recorder
            self._members[group] = members_of(group, recorder.size, recorder.hosts)
        return self._members[group]

    def _work(self, index: int, rounds: Rounds) -> list[float]:
        """Return the seconds of each call of a bucket batch's generator."""
        batch = self._exchange.layout.batches[index]
        compressor = batch.entries[0].compressor
        dense = sum(entry.bucket.dense_bytes for entry in batch.entries)
        answers = [0.0, *[sum(map(self._recorder.received, requests)) for requests in rounds]]
        return [self._encoding.seconds(compressor, dense, size) for size in answers]

    def _rounds(self, index: int) -> Rounds:
        """Return the requests of a bucket batch's generator, recorded once."""
        batch = self._exchange.layout.batches[index]
        first, phase = batch.entries[0], self._exchange.phase(batch.entries[0])
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
        tensors = [gradient_like(entry) for entry in fresh]
        grad = batch.combine(tensors)
        if first.compressor.needs_weights:
            info = replace(info, parameter=grad)
        return first.compressor.exchange(xp.copy(grad), batch.state, info)

    with np.errstate(all="ignore"):
        hosts = communicator.hosts if first.compressor.topology_aware else ()
        return record(make, xp, communicator.size, hosts)


def gradient_like(entry: BucketState) -> np.ndarray:
    """Return a gradient of a bucket with normally distributed values."""
    shape = entry.bucket.shape
    values = xp.cast(xp.asarray(normal(shape, entry.name)), entry.bucket.dtype)
    return xp.reshape(values, (1, *shape)) if entry.compressor.per_sample else values


def replay(rounds: Rounds, grad: Any = None) -> Generator[Any, Any, Any]:
    """Repeat recorded requests; an exchange generator without a result."""
    for requests in rounds:  # noqa: UP028, since answers cannot be sent to a tuple
        yield requests
    return None, None
