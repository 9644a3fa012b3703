"""Simulation of a training on up to thousands of ranks in one process, in virtual time.

```python
outcome = train(WAGMA(32), ranks=1024, steps=100, compute=Stragglers(0.1), wait_avoiding=True)
outcome.rate, outcome.distance
```
The algorithms are those of a real job: the exchange generators of the averaging methods, and the
protocol of wait-avoiding averaging (`engine.group_protocol`). Only time is modelled: the compute
time of each step, and the time of the messages. Models are small, and their bytes are scaled up to
those of large models.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.groups import Groups
from accordion_hvd.averaging.wagma import WAGMA
from accordion_hvd.comm import local
from accordion_hvd.core.base import Info, Request
from accordion_hvd.core.running import Running
from accordion_hvd.engine.group_protocol import (
    Activation,
    GroupProtocol,
    GroupRound,
    combine,
    factors,
)
from accordion_hvd.simulation.clocks import Clocks
from accordion_hvd.simulation.compute_times import Stragglers, Throughput
from accordion_hvd.simulation.links import HostLinks, Link
from accordion_hvd.simulation.programs import AveragingPrograms

Array = np.ndarray
Update = Callable[[int, int, Array], Array]
"""(rank, step, model) -> the change that the rank's own optimizer adds to its model."""


@dataclass
class Outcome:
    """Result of a simulated training.

    Attributes:
        seconds: virtual time until the last rank has finished its last step.
        rate: steps per second.
        waited: mean seconds per step and rank that are not compute time.
        distance: for each step, the root mean square distance of the ranks' models from their mean,
            each model as it was after its rank's step of that number.
        mean: the mean model after the last step.
        late: fraction of the contributions to group averages that were not the rank's newest model.
        lag: largest age of a contribution, in versions.
        models: the models after each step, (steps, ranks, size), if `keep` was set; else None.
    """

    seconds: float = 0.0
    rate: float = 0.0
    waited: float = 0.0
    distance: list[float] = field(default_factory=list)
    mean: Array = field(default_factory=lambda: np.zeros(0))
    late: float = 0.0
    lag: int = 0
    models: Array | None = None


class Noisy:
    """SGD on 0.5 ||x||^2, with Gaussian gradient noise of standard deviation 1."""

    def __init__(self, ranks: int, lr: float = 0.1, seed: int = 0) -> None:
        self.lr = lr
        self._draw = [np.random.default_rng([seed, rank]) for rank in range(ranks)]

    def __call__(self, rank: int, step: int, model: Array) -> Array:
        """Return the change of a rank's model in one step; draws the noise of the gradient."""
        return -self.lr * (model + self._draw[rank].standard_normal(model.shape))


def train(
    method: Averaging,
    ranks: int,
    steps: int,
    compute: Any = None,
    link: Link | None = None,
    *,
    wait_avoiding: bool = False,
    size: float = 4e6,
    first: Array | None = None,
    update: Update | None = None,
    lr: float = 0.1,
    seed: int = 0,
    keep: bool = False,
) -> Outcome:
    """Simulate a training of `steps` steps on `ranks` ranks.

    Args:
        method: the method that averages models.
        ranks: number of ranks.
        steps: number of steps of each rank.
        compute: the compute times, from `simulation.compute_times` or any object with the same
            method `draw`; by default `Stragglers()`.
        link: latency and bandwidth of the messages; by default `Link()`.
        wait_avoiding: whether groups average without waiting for late ranks; for `WAGMA` only.
        size: bytes of the model for the time of its messages.
        first: the initial model of all ranks; by default a vector of 16 ones.
        update: the change of a model in a step; by default `Noisy`.
        lr: learning rate, which methods get as `Info.lr` and `Noisy` uses.
        seed: seed of all random numbers.
        keep: whether to return the models after each step.

    Raises:
        ValueError: if an argument is not allowed.
    """
    check.integer("train", "ranks", ranks, least=1)
    check.integer("train", "steps", steps, least=1)
    check.at_least("train", "size", size, least=0)
    if wait_avoiding and not isinstance(method, WAGMA):
        check.refuse("train", "method", method, "a WAGMA(...) with wait_avoiding=True")
    model = np.ones(16) if first is None else np.array(first, np.float64)
    times = (compute or Stragglers()).draw(ranks, steps, seed)
    update = update or Noisy(ranks, lr, seed)
    history = History(ranks, steps, model.size, keep)
    factor = size / model.nbytes
    kind: Any = WaitAvoidingJob if wait_avoiding else SynchronousJob
    run = kind(_Job(method, times, link or Link(), factor, model, update, lr, history))
    run.run()
    outcome = history.outcome(times)
    if wait_avoiding:
        counted = sum(run.labels.values())
        outcome.late = 1 - run.labels[0] / counted if counted else 0.0
        outcome.lag = max([lag for lag, count in run.labels.items() if count], default=0)
    return outcome


class History:
    """Statistics of the models and clocks of all ranks, step by step."""

    def __init__(self, ranks: int, steps: int, size: int, keep: bool) -> None:
        # the first model of each step, subtracted from all to avoid cancellation in the variance
        self._origins: list[Array | None] = [None] * steps
        self._sums = np.zeros((steps, size))
        self._squares = np.zeros(steps)
        self._ranks, self._clock = ranks, np.zeros(ranks)
        self._models = np.zeros((steps, ranks, size)) if keep else None

    def add(self, rank: int, step: int, model: Array, now: float) -> None:
        """Record that a rank has finished a step."""
        origin = self._origins[step]
        if origin is None:
            origin = self._origins[step] = model.copy()
        self._sums[step] += model - origin
        self._squares[step] += (model - origin) @ (model - origin)
        self._clock[rank] = now
        if self._models is not None:
            self._models[step, rank] = model

    def outcome(self, times: Array) -> Outcome:
        """Return the result of a training with these compute times."""
        steps, means = len(times), self._sums / self._ranks
        variance = self._squares / self._ranks - (means**2).sum(1)
        seconds = float(self._clock.max())
        return Outcome(
            seconds=seconds,
            rate=steps / seconds if seconds else math.inf,
            waited=float((self._clock - times.sum(0)).mean() / steps),
            distance=np.sqrt(np.maximum(variance, 0)).tolist(),
            mean=means[-1] + self._origins[-1],
            models=self._models,
        )


@dataclass(frozen=True)
class _Job:
    """The settings of a run.

    Attributes:
        times: compute times in seconds, (steps, ranks).
        factor: factor of the model's bytes in the time of messages.
    """

    method: Any
    times: Array
    link: Link
    factor: float
    first: Array
    update: Update
    lr: float
    history: History

    @property
    def ranks(self) -> int:
        return self.times.shape[1]

    def models(self) -> list[Array]:
        return [self.first.copy() for _ in range(self.ranks)]


class SynchronousJob:
    """A training in which all ranks of a collective wait for each other, as in `simulate_job`."""

    def __init__(self, job: _Job) -> None:
        self._method, self._ranks, self._times = job.method, job.ranks, job.times
        self._update, self._history = job.update, job.history
        ranks, size = job.ranks, job.first.nbytes * job.factor
        free, rate = Throughput(), lambda step: job.lr
        self._programs = AveragingPrograms(job.method, size, ranks, free, rate)
        self._clocks = Clocks(HostLinks(job.link, ranks), np.ones(ranks), backward=0, overlap=False)
        self._info = [Info(rank=r, size=ranks, name="model", lr=job.lr) for r in range(ranks)]
        self._models = job.models()
        self._states = [job.method.start(job.first, info) for info in self._info]

    def run(self) -> None:
        """Run all steps."""
        for step, (times, program) in enumerate(zip(self._times, self._programs, strict=False)):
            self._clocks.advance(program, times)
            exchanges = []
            for rank, info in enumerate(self._info):
                model = self._models[rank] + self._update(rank, step, self._models[rank])
                step_info = replace(info, step=step)
                exchanges.append(self._method.exchange(model, self._states[rank], step_info))
            self._run_exchanges(exchanges)
            for rank, model in enumerate(self._models):
                self._history.add(rank, step, model, self._clocks.now[rank])

    def _run_exchanges(self, exchanges: Sequence[Any]) -> None:
        running = {rank: Running(exchange) for rank, exchange in enumerate(exchanges)}
        while running:
            for rank in [rank for rank, exchange in running.items() if exchange.done]:
                self._models[rank], self._states[rank] = running.pop(rank).result
            answers = self._answers({rank: e.requests for rank, e in running.items()})
            for rank, exchange in running.items():
                exchange.answer(answers[rank])

    def _answers(self, requests: dict[int, tuple[Request, ...]]) -> dict[int, list[Any]]:
        answers: dict[int, list[Any]] = {rank: [] for rank in requests}
        for number in range(max(map(len, requests.values()), default=0)):
            batches: dict[Any, dict[int, Request]] = {}
            for rank, own in requests.items():
                request = own[number]
                batches.setdefault((type(request), request.group), {})[rank] = request
            for (kind, group), batch in batches.items():
                if tuple(batch) != (tuple(range(self._ranks)) if group is None else group):
                    raise RuntimeError(f"virtual ranks wait for each other in {kind.__name__}.")
                for rank, result in local.results(batch).items():
                    answers[rank].append(result)
        return answers


class _Messages:
    """Seconds of messages between ranks."""

    def __init__(self, link: Link, ranks: int) -> None:
        hosts, count = np.arange(ranks) // link.local_size, link.hosts(ranks)
        self._latency, self._bandwidth = (
            np.broadcast_to(np.asarray(x, float), count)[hosts].tolist()
            for x in (link.latency, link.bandwidth)
        )

    def seconds(self, ranks: Sequence[int], rounds: int = 1, size: float = 0.0) -> float:
        """Return the seconds of rounds in which `ranks` each send `size` bytes in all."""
        return max([rounds * self._latency[r] + size / self._bandwidth[r] for r in ranks])


class WaitAvoidingJob:
    """A training with the protocol of wait-avoiding averaging, event by event."""

    def __init__(self, job: _Job) -> None:
        self._times, self._messages = job.times, _Messages(job.link, job.ranks)
        self._update, self._history = job.update, job.history
        self._period, self._bytes = job.method.period, job.first.nbytes * job.factor
        ranks, first = job.ranks, job.first
        self._groups: Groups = job.method.schedule(ranks)
        self._agents = [
            GroupProtocol(rank, ranks, self._groups, first.copy()) for rank in range(ranks)
        ]
        self._models = job.models()
        self._waiting: list[int | None] = [None] * ranks  # the step of a waiting rank
        self._rounds: list[GroupRound | None] = [None] * ranks  # the current round of each rank
        self._ready: dict[tuple[int, tuple[int, ...]], int] = {}
        self._results: list[dict[int, tuple[int, Array]]] = [{} for _ in range(ranks)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        # lag -> number of contributions to group averages
        self.labels: dict[int, int] = {lag: 0 for lag in range(self._period + 1)}

    def run(self) -> None:
        """Run all events in the order of virtual time."""
        for rank in range(len(self._agents)):
            self._schedule(float(self._times[0, rank]), self._arrive, rank, 0)
        while self._events:
            now, _, handler, arguments = heapq.heappop(self._events)
            handler(now, *arguments)

    def _schedule(self, when: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._number += 1  # events of the same moment run in the order in which they were scheduled
        heapq.heappush(self._events, (when, self._number, handler, arguments))

    def _arrive(self, now: float, rank: int, step: int) -> None:
        """Handle the event that a rank's training thread has finished a step."""
        agent, model = self._agents[rank], self._models[rank]
        model = self._models[rank] = model + self._update(rank, step, model)
        if (step + 1) % self._period == 0:
            self._waiting[rank] = step
            agent.ask(self._version(step), model)
        elif self._groups.group_size == 1:
            self._finish_step(now, rank, step)
            return
        else:
            self._waiting[rank] = step
            self._post(now, rank, agent.activate(step))
            agent.publish(step, model)
        self._start_round(now, rank)
        self._collect(now, rank)

    def _version(self, step: int) -> int:
        return step if self._groups.group_size > 1 else (step + 1) // self._period - 1

    def _post(self, now: float, rank: int, sends: Sequence[Activation]) -> None:
        for send in sends:
            wait = self._messages.seconds((rank, send.to))
            self._schedule(now + wait, self._hear, send)

    def _hear(self, now: float, message: Activation) -> None:
        self._post(now, message.to, self._agents[message.to].hear(message.version, message.span))
        self._start_round(now, message.to)

    def _start_round(self, now: float, rank: int) -> None:
        round_ = self._agents[rank].next_round()
        if self._rounds[rank] is not None or round_ is None:
            return
        self._rounds[rank] = round_
        key = round_.version, round_.members
        self._ready[key] = self._ready.get(key, 0) + 1
        if self._ready[key] == len(round_.members):
            del self._ready[key]
            wait = self._messages.seconds(round_.members) if len(round_.members) > 1 else 0.0
            self._schedule(now + wait, self._seed, round_)

    def _seed(self, now: float, round_: GroupRound) -> None:
        """Sum the models of a round, once all members know that all are ready."""
        contributions = [self._agents[rank].seed(round_) for rank in round_.members]
        total = _total([model for _, model in contributions])
        size = len(round_.members)
        moved = 2 * (size - 1) / size * self._bytes
        cost = self._messages.seconds(round_.members, 2 * len(factors(size)), moved)
        for rank, (label, _) in zip(round_.members, contributions, strict=True):
            if not round_.all_ranks:
                self.labels[round_.version - label] += 1
            self._schedule(now + cost, self._finish_round, rank, round_, label, total)

    def _finish_round(
        self, now: float, rank: int, round_: GroupRound, label: int, total: Array
    ) -> None:
        average = total / len(round_.members) if round_.all_ranks else None
        self._agents[rank].done(round_, average)
        self._rounds[rank] = None
        self._results[rank][round_.version] = label, total
        self._collect(now, rank)
        self._start_round(now, rank)

    def _collect(self, now: float, rank: int) -> None:
        """Let a rank's training thread continue if the result that it waits for has arrived."""
        step = self._waiting[rank]
        if step is None or self._version(step) not in self._results[rank]:
            return
        version = self._version(step)
        label, total = self._results[rank].pop(version)
        if (step + 1) % self._period == 0:
            self._models[rank] = self._agents[rank].published.copy()
        else:
            mine = self._models[rank].copy()
            combine(total.copy(), mine, len(self._groups.of(rank, version)), label == version)
            self._models[rank] = mine
        self._waiting[rank] = None
        self._finish_step(now, rank, step)

    def _finish_step(self, now: float, rank: int, step: int) -> None:
        self._history.add(rank, step, self._models[rank], now)
        if step + 1 < len(self._times):
            self._schedule(now + float(self._times[step + 1, rank]), self._arrive, rank, step + 1)


def _total(models: list[Array]) -> Array:
    """Return the sum of the models with the same bits as `group_protocol.total` computes."""
    for radix in factors(len(models)):  # neighbours differ in the lowest digit
        groups = [models[i : i + radix] for i in range(0, len(models), radix)]
        models = [functools.reduce(np.add, group) for group in groups]
    return models[0].copy()
