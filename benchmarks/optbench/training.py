"""One training, on real ranks under Horovod or on ranks simulated in one process (for tuning)."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.resolve import staged
from accordion_hvd.simulation.one_process import simulate
from benchmarks.optbench.methods import METHODS
from benchmarks.optbench.tasks import TASKS, Batch, Problem
from examples.results import Row

RANKS = 4


@functools.cache
def problem(name: str) -> Problem:
    """Return the problem of a task, created once."""
    return TASKS[name].problem()


class Team(Protocol):
    """Ranks that train one network."""

    net: Any
    exchange: Exchange

    def step(self, lr: float) -> None:
        """Take one step on all ranks."""

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean of each number over ranks."""

    def share(self) -> tuple[int, int]:
        """Return this process' part of the evaluation batches, and the number of parts."""


def batches(name: str, seed: int, rank: int) -> Iterator[Batch]:
    """Yield a rank's batches, which depend on the seed and the rank but not on the method."""
    generator = np.random.default_rng([seed, rank])
    while True:
        yield problem(name).draw(generator, TASKS[name].batch)


class Real:
    """Team whose ranks are processes, of which this process is one."""

    def __init__(self, task: str, method: str, lr: float, seed: int) -> None:
        import horovod.torch as hvd

        import accordion_hvd.torch as ours

        self._hvd, self._name = hvd, task
        self.net = _network(task, seed)
        chosen = METHODS[method]
        optimizer = getattr(ours, chosen.optimizer)
        length = TASKS[task].steps
        arguments = chosen.arguments(task, length) | {"policy": chosen.policy(task, length)}
        self.optimizer = optimizer(self.net.named_parameters(), lr=lr, **arguments)
        self._batches = batches(task, seed, hvd.rank())

    @property
    def exchange(self) -> Exchange:
        """Return the exchange, which counts bytes."""
        return self.optimizer.exchange

    def step(self, lr: float) -> None:
        """Take this rank's part of a step."""
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        problem(self._name).loss(self.net, next(self._batches)).backward()
        self.optimizer.step()

    def mean(self, values: Sequence[float]) -> list[float]:
        """Average with an allreduce of Horovod, whose bytes are not counted."""
        numbers = torch.tensor(values, dtype=torch.float64)
        return self._hvd.allreduce(numbers, name="optbench.mean").tolist()

    def share(self) -> tuple[int, int]:
        """Return the rank and the number of ranks."""
        return self._hvd.rank(), self._hvd.size()


class Simulated:
    """Team of ranks that are simulated in this process."""

    def __init__(self, task: str, method: str, lr: float, seed: int) -> None:
        self.net, self._name = _network(task, seed), task
        chosen, length = METHODS[method], TASKS[task].steps
        policy = staged(chosen.rule(task, length), chosen.policy(task, length))
        self._world = simulate(policy, RANKS)
        self._batches = [batches(task, seed, rank) for rank in range(RANKS)]

    @property
    def exchange(self) -> Exchange:
        """Return the exchange of the first rank."""
        return self._world.exchanges[0]

    def step(self, lr: float) -> None:
        """Compute the gradients of all ranks and take the step."""
        parameters, gradients = dict(self.net.named_parameters()), []
        for rank_batches in self._batches:
            self.net.zero_grad()
            problem(self._name).loss(self.net, next(rank_batches)).backward()
            gradients.append({name: x.grad.clone() for name, x in parameters.items()})
        directions = self._world.step(gradients, lr)[0]
        assert directions is not None, "a gradient is not finite"
        with torch.no_grad():
            for name, x in parameters.items():
                x -= lr * directions[name]

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the numbers, which already cover all ranks."""
        return list(values)

    def share(self) -> tuple[int, int]:
        """Return all batches as one part."""
        return 0, 1


def _network(task: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return problem(task).make()


def train(team: Team, task: str, lr: float) -> Row:
    """Train to the end.

    Returns:
        At each evaluation (the first before any step): `steps`, `loss`, bytes `sent` so far by this
        rank, and the bytes `dense` of an uncompressed exchange. At the end: `accuracy` (None if the
        task has none), bytes of `state`, `parameters`, a digest of the `weights`, and `seconds`.
    """
    plan, began = TASKS[task], time.monotonic()
    row: Row = {"steps": [], "loss": [], "sent": [], "dense": []}
    for step in range(plan.steps + 1):
        if step % plan.every == 0 or step == plan.steps:
            stats = team.exchange.stats() if step else {"sent": 0.0, "dense_sent": 0.0}
            row["steps"].append(step)
            row["loss"].append(evaluate(team, task))
            row["sent"].append(stats["sent"])
            row["dense"].append(stats["dense_sent"])
        if step < plan.steps:
            team.step(plan.lr_at(lr, step, plan.steps))
    return row | {
        "accuracy": accuracy(team, task),
        "state": state_bytes(team.exchange),
        "parameters": sum(x.numel() for x in team.net.parameters()),
        "weights": digest(team.net),
        "seconds": time.monotonic() - began,
    }


def evaluate(team: Team, task: str) -> float:
    """Return the reported loss; each process evaluates a part of the examples."""
    task_problem, total, count = problem(task), 0.0, 0
    part, parts = team.share()
    with torch.no_grad():
        for inputs, answers in task_problem.judged:
            batch = inputs[part::parts], answers[part::parts]
            total += task_problem.loss(team.net, batch).item() * len(batch[0])
            count += len(batch[0])
    total, mean_count = team.mean([total, float(count)])
    return total / mean_count


def accuracy(team: Team, task: str) -> float | None:
    """Return the accuracy on test examples; None if the task has none."""
    tests = problem(task).right
    if not tests:
        return None
    with torch.no_grad():
        correct = sum(int((team.net(x).argmax(1) == y).sum()) for x, y in tests)
    return correct / sum(len(y) for _, y in tests)


def state_bytes(exchange: Exchange) -> int:
    """Return the bytes of state between steps, including the inactive state of all stages."""
    total = 0
    for entry in exchange.bucket_states:
        for state in (entry.state or {}, *entry.inactive.values()):
            total += sum(x.nbytes for x in state.values())
    return total


def digest(net: Any) -> str:
    """Return a hash that is equal on two ranks if their weights are bitwise equal."""
    result = hashlib.sha256()
    for parameter in net.parameters():
        result.update(parameter.detach().numpy().tobytes())
    return result.hexdigest()
