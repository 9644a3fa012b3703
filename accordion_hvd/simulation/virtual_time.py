"""Training on a thousand ranks in one process, in virtual time.

```python
outcome = train(WAGMA(32), ranks=1024, steps=100, compute=Stragglers(0.1), wait_avoiding=True)
outcome.rate, outcome.distance
```
The algorithms are the real ones: conversations of averaging methods, and the protocol that the
engine of wait-avoiding averages runs (`engine.agent`). What is modelled is time: how long a
step computes, and how long messages take. Models are small and count as large ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.groups import Groups
from accordion_hvd.averaging.wagma import WAGMA
from accordion_hvd.comm import reference
from accordion_hvd.comm.traffic import traffic_of
from accordion_hvd.core.base import Allreduce, Alltoall, Info, Neighbours, Request
from accordion_hvd.core.running import Running
from accordion_hvd.engine.group_protocol import Activation, GroupProtocol, GroupRound, combine
from accordion_hvd.engine.reduce_scatter import factors, oracle

Array = np.ndarray
Update = Callable[[int, int, Array], Array]
"""(rank, step, model) to what the rank's own optimizer adds to its model."""


# ----------------------------------------------------------------------------- what takes time
@dataclass(frozen=True)
class Constant:
    """Every step of every rank computes for `seconds`."""

    seconds: float = 0.1

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Seconds (steps, ranks)."""
        return np.full((steps, ranks), self.seconds)


@dataclass(frozen=True)
class LogNormal:
    """Steps compute for `seconds` in the median, their logarithms having deviation `sigma`."""

    seconds: float = 0.1
    sigma: float = 0.3

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Seconds (steps, ranks)."""
        normal = np.random.default_rng(seed).standard_normal((steps, ranks))
        return self.seconds * np.exp(self.sigma * normal)


@dataclass(frozen=True)
class Stragglers:
    """At each step, `count` ranks drawn at random (which may coincide) take `delay` longer.

    The defaults are those of WAGMA's paper.
    """

    seconds: float = 0.1
    delay: float = 0.32
    count: int = 2

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Seconds (steps, ranks)."""
        found = np.full((steps, ranks), self.seconds)
        late = np.random.default_rng(seed).integers(0, ranks, (steps, self.count))
        for step, who in enumerate(late):
            found[step, np.unique(who)] += self.delay
        return found


@dataclass(frozen=True)
class Traced:
    """Seconds from a text file: a line a step, a column a measured rank.

    More ranks or steps than were measured take those of others, which are drawn at random.
    """

    path: str | Path

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Seconds (steps, ranks).

        Raises:
            ValueError: the file holds no table of numbers above 0.
        """
        table = np.loadtxt(self.path, ndmin=2)
        if not table.size or not np.isfinite(table).all() or table.min() < 0:
            check.refuse(self, "path", str(self.path), "a table of seconds, at least 0")
        rng = np.random.default_rng(seed)
        whose = rng.permutation(np.arange(ranks) % table.shape[1])
        when = (np.arange(steps)[:, None] + rng.integers(0, len(table), ranks)) % len(table)
        return table[when, whose]


@dataclass(frozen=True)
class Link:
    """Every rank's link to all others.

    Args:
        latency: seconds a message takes besides its bytes.
        bandwidth: bytes a second, in each direction.
    """

    latency: float = 20e-6
    bandwidth: float = 1.25e9

    def seconds(self, rounds: int, size: float) -> float:
        """Return the time of rounds of messages in which a rank sends these bytes."""
        return rounds * self.latency + size / self.bandwidth

    def collective(self, request: Request, ranks: int, factor: float) -> float:
        """Return the duration of a request; tensors count `factor` times."""
        cost = traffic_of(request, ranks)
        size = max(cost.sent, cost.received) * factor
        if ranks == 1 or isinstance(request, Neighbours):
            return self.seconds(bool(request.to) if isinstance(request, Neighbours) else 0, size)
        rounds = 1 if isinstance(request, Alltoall) else math.ceil(math.log2(ranks))
        return self.seconds(2 * rounds if isinstance(request, Allreduce) else rounds, size)


# --------------------------------------------------------------------------------- what is run
@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        seconds: from the beginning to the end of the last rank's last step.
        rate: steps a second.
        waited: seconds that a rank has waited a step, in the mean.
        distance: after each step, the root of the mean square distance of ranks' models from
            their mean, all as they were after that step of theirs.
        mean: the mean model after the last step.
        late: the part of group averages in which a rank's newest model was missing.
        lag: how many versions old the models in them were at most.
        models: the models after each step, (steps, ranks, size), if they were to be kept.
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
    """SGD on 0.5 ||x||^2 with gradients that have Gaussian noise of deviation 1."""

    def __init__(self, ranks: int, lr: float = 0.1, seed: int = 0) -> None:
        self.lr = lr
        self._draw = [np.random.default_rng([seed, rank]) for rank in range(ranks)]

    def __call__(self, rank: int, step: int, model: Array) -> Array:
        """Take one step of a rank, and draw the noise of its next one."""
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
    """Let `ranks` ranks take `steps` steps.

    Args:
        method: how their models are averaged.
        ranks: how many there are.
        steps: of each.
        compute: how long steps compute: `Constant`, `LogNormal`, `Stragglers`, `Traced`, or
            anything with such a `draw`.
        link: what messages take.
        wait_avoiding: for `WAGMA`: groups do not wait for late ranks.
        size: bytes that a model counts for.
        first: the model that all start from; by default 16 ones.
        update: what a step adds to a model; by default `Noisy`.
        lr: the learning rate that methods are told.
        seed: of all that is drawn.
        keep: whether the outcome has all models.

    Raises:
        ValueError: an argument is not what it may be.
    """
    check.integer("train", "ranks", ranks, least=1)
    check.integer("train", "steps", steps, least=1)
    check.at_least("train", "size", size, least=0)
    if wait_avoiding and not isinstance(method, WAGMA):
        check.refuse("train", "method", method, "a WAGMA(...) where groups do not wait")
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
    """Ranks' models and clocks, step by step."""

    def __init__(self, ranks: int, steps: int, size: int, keep: bool) -> None:
        self._near: list[Array | None] = [None] * steps  # the first rank's, to subtract like ones
        self._sums = np.zeros((steps, size))
        self._squares = np.zeros(steps)
        self._ranks, self._clock = ranks, np.zeros(ranks)
        self._kept = np.zeros((steps, ranks, size)) if keep else None

    def add(self, rank: int, step: int, model: Array, now: float) -> None:
        """Record that a rank has finished a step."""
        near = self._near[step]
        if near is None:
            near = self._near[step] = model.copy()
        self._sums[step] += model - near
        self._squares[step] += (model - near) @ (model - near)
        self._clock[rank] = now
        if self._kept is not None:
            self._kept[step, rank] = model

    def outcome(self, times: Array) -> Outcome:
        """Return the result of the run."""
        steps, means = len(times), self._sums / self._ranks
        apart = self._squares / self._ranks - (means**2).sum(1)
        seconds = float(self._clock.max())
        return Outcome(
            seconds=seconds,
            rate=steps / seconds if seconds else math.inf,
            waited=float((self._clock - times.sum(0)).mean() / steps),
            distance=np.sqrt(np.maximum(apart, 0)).tolist(),
            mean=means[-1] + self._near[-1],
            models=self._kept,
        )


@dataclass(frozen=True)
class _Job:
    """The settings of a run.

    Attributes:
        method: how models are averaged.
        times: seconds of steps, (steps, ranks).
        link: what messages take.
        factor: how often bytes of a model count.
        first: the model that all start from.
        update: what a step adds to a model.
        lr: the learning rate that methods are told.
        history: takes down what comes of it.
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
    """Exchanges in which all ranks that a request names wait for each other."""

    def __init__(self, job: _Job) -> None:
        self._method, self._ranks, self._times = job.method, job.ranks, job.times
        self._link, self._factor = job.link, job.factor
        self._update, self._history = job.update, job.history
        ranks = job.ranks
        job.method.groups(ranks)
        self._info = [Info(rank=r, size=ranks, name="model", lr=job.lr) for r in range(ranks)]
        self._models = job.models()
        self._states = [job.method.start(job.first, info) for info in self._info]
        self._now = np.zeros(ranks)

    def run(self) -> None:
        """Run all steps."""
        for step, times in enumerate(self._times):
            self._now += times
            exchanges = []
            for rank, info in enumerate(self._info):
                model = self._models[rank] + self._update(rank, step, self._models[rank])
                told = replace(info, step=step)
                exchanges.append(self._method.exchange(model, self._states[rank], told))
            self._hold(exchanges)
            for rank, model in enumerate(self._models):
                self._history.add(rank, step, model, self._now[rank])

    def _hold(self, exchanges: Sequence[Any]) -> None:
        running = {rank: Running(exchange) for rank, exchange in enumerate(exchanges)}
        while running:
            for rank in [rank for rank, one in running.items() if one.done]:
                self._models[rank], self._states[rank] = running.pop(rank).result
            answers = self._answers({rank: one.requests for rank, one in running.items()})
            for rank, one in running.items():
                one.answer(answers[rank])

    def _answers(self, several: dict[int, tuple[Request, ...]]) -> dict[int, list[Any]]:
        """Answer each rank's request and move the clocks on."""
        found: dict[int, list[Any]] = {rank: [] for rank in several}
        before = self._now.copy()  # requests of one rank leave together
        for number in range(max(map(len, several.values()), default=0)):
            batches: dict[Any, dict[int, Request]] = {}
            for rank, requests in several.items():
                request = requests[number]
                batches.setdefault((type(request), request.group), {})[rank] = request
            for (kind, group), batch in batches.items():
                if tuple(batch) != (tuple(range(self._ranks)) if group is None else group):
                    raise RuntimeError(f"virtual ranks wait for each other in {kind.__name__}.")
                for rank, result in reference.results(batch).items():
                    found[rank].append(result)
                self._pass(batch, before)
        return found

    def _pass(self, batch: dict[int, Request], before: Array) -> None:
        """Let time pass for those who share a collective."""
        cost = self._link.collective(next(iter(batch.values())), len(batch), self._factor)
        for rank, request in batch.items():
            near = [rank, *request.of] if isinstance(request, Neighbours) else list(batch)
            self._now[rank] = max(self._now[rank], before[near].max() + cost)
            if not isinstance(request, Neighbours):
                self._now[near] = np.maximum(self._now[near], self._now[rank])
                return


class WaitAvoidingJob:
    """The protocol of the wait-avoiding engine, event by event."""

    def __init__(self, job: _Job) -> None:
        self._times, self._link = job.times, job.link
        self._update, self._history = job.update, job.history
        self._period, self._bytes = job.method.period, job.first.nbytes * job.factor
        ranks, first = job.ranks, job.first
        self._groups: Groups = job.method.schedule(ranks)
        self._agents = [
            GroupProtocol(rank, ranks, self._groups, first.copy()) for rank in range(ranks)
        ]
        self._models = job.models()
        self._waiting: list[int | None] = [None] * ranks  # for which version
        self._rounds: list[GroupRound | None] = [None] * ranks  # that a rank is ready for or taking
        self._ready: dict[tuple[int, tuple[int, ...]], int] = {}
        self._found: list[dict[int, tuple[int, Array]]] = [{} for _ in range(ranks)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.labels: dict[int, int] = {lag: 0 for lag in range(self._period + 1)}  # by their lag

    def run(self) -> None:
        """Run all events in their order."""
        for rank in range(len(self._agents)):
            self._after(float(self._times[0, rank]), self._arrive, rank, 0)
        while self._events:
            now, _, what, arguments = heapq.heappop(self._events)
            what(now, *arguments)

    def _after(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._number += 1  # events of the same moment in the order in which they were caused
        heapq.heappush(self._events, (when, self._number, what, arguments))

    def _arrive(self, now: float, rank: int, step: int) -> None:
        """Handle a training thread that has taken a step."""
        agent, model = self._agents[rank], self._models[rank]
        model = self._models[rank] = model + self._update(rank, step, model)
        if (step + 1) % self._period == 0:
            self._waiting[rank] = step
            agent.ask(self._version(step), model)
        elif self._groups.group_size == 1:
            self._go_on(now, rank, step)
            return
        else:
            self._waiting[rank] = step
            self._post(now, agent.activate(step))
            agent.publish(step, model)
        self._look(now, rank)
        self._collect(now, rank)

    def _version(self, step: int) -> int:
        return step if self._groups.group_size > 1 else (step + 1) // self._period - 1

    def _post(self, now: float, sends: Sequence[Activation]) -> None:
        for send in sends:
            self._after(now + self._link.latency, self._hear, send)

    def _hear(self, now: float, message: Activation) -> None:
        self._post(now, self._agents[message.to].hear(message.version, message.span))
        self._look(now, message.to)

    def _look(self, now: float, rank: int) -> None:
        round_ = self._agents[rank].next_round()
        if self._rounds[rank] is not None or round_ is None:
            return
        self._rounds[rank] = round_
        key = round_.version, round_.members
        self._ready[key] = self._ready.get(key, 0) + 1
        if self._ready[key] == len(round_.members):
            del self._ready[key]
            wait = self._link.latency if len(round_.members) > 1 else 0.0
            self._after(now + wait, self._seed, round_)

    def _seed(self, now: float, round_: GroupRound) -> None:
        """Take and add up the models, once all members know that all are ready."""
        given = [self._agents[rank].seed(round_) for rank in round_.members]
        total = oracle([model for _, model in given])
        many = len(round_.members)
        cost = self._link.seconds(2 * len(factors(many)), 2 * (many - 1) / many * self._bytes)
        for rank, (label, _) in zip(round_.members, given, strict=True):
            if not round_.all_ranks:
                self.labels[round_.version - label] += 1
            self._after(now + cost, self._finish, rank, round_, label, total)

    def _finish(self, now: float, rank: int, round_: GroupRound, label: int, total: Array) -> None:
        average = total / len(round_.members) if round_.all_ranks else None
        self._agents[rank].done(round_, average)
        self._rounds[rank] = None
        self._found[rank][round_.version] = label, total
        self._collect(now, rank)
        self._look(now, rank)

    def _collect(self, now: float, rank: int) -> None:
        """Let a training thread go on whose version is there."""
        step = self._waiting[rank]
        if step is None or self._version(step) not in self._found[rank]:
            return
        version = self._version(step)
        label, total = self._found[rank].pop(version)
        if (step + 1) % self._period == 0:
            self._models[rank] = self._agents[rank].published.copy()
        else:
            mine = self._models[rank].copy()
            combine(total, mine, len(self._groups.of(rank, version)), label == version)
            self._models[rank] = mine
        self._waiting[rank] = None
        self._go_on(now, rank, step)

    def _go_on(self, now: float, rank: int, step: int) -> None:
        self._history.add(rank, step, self._models[rank], now)
        if step + 1 < len(self._times):
            self._after(now + float(self._times[step + 1, rank]), self._arrive, rank, step + 1)
