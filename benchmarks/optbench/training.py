"""One training, on real ranks under Horovod or on ranks simulated in one process (for tuning)."""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from accordion_hvd import simulate
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.resolve import staged
from benchmarks.optbench.methods import METHODS
from benchmarks.optbench.tasks import TASKS, Batch, Problem
from examples.results import Row

RANKS = 4

COUNTS = ("sent", "between", "dense_sent")

LESS = 0.9
"""Fraction of the bytes of an uncompressed step below which a step counts as compressed."""


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
    """Team of ranks that are simulated in this process.

    The ranks share one network, unless the rule returns weights, which may differ between ranks.
    For an optimizer with an exchange within hosts, there are two hosts.
    """

    def __init__(self, task: str, method: str, lr: float, seed: int) -> None:
        self.net, self._name = _network(task, seed), task
        chosen, length = METHODS[method], TASKS[task].steps
        rule = chosen.rule(task, length)
        self._reads = rule.needs_weights
        local_size = RANKS // 2 if "within" in chosen.settings else 1
        policy = staged(rule, chosen.policy(task, length))
        self._world = simulate(policy, RANKS, local_size=local_size)
        self._batches = [batches(task, seed, rank) for rank in range(RANKS)]
        self._nets = [self.net] * RANKS
        if rule.returns_weights:
            self._nets = [self.net, *(copy.deepcopy(self.net) for _ in range(1, RANKS))]

    @property
    def exchange(self) -> Exchange:
        """Return the exchange of the first rank."""
        return self._world.exchanges[0]

    def step(self, lr: float) -> None:
        """Compute the gradients of all ranks and take the step."""
        gradients = []
        for net, rank_batches in zip(self._nets, self._batches, strict=True):
            net.zero_grad()
            problem(self._name).loss(net, next(rank_batches)).backward()
            gradients.append({name: x.grad.clone() for name, x in net.named_parameters()})
        weights = [{name: x.detach() for name, x in net.named_parameters()} for net in self._nets]
        results = self._world.step(gradients, lr, weights if self._reads else None)
        for net, result in zip(dict.fromkeys(self._nets), results, strict=False):
            if result is not None:  # else a gradient is not finite, and no rank takes the step
                self._apply(net, result, lr)

    @torch.no_grad()
    def _apply(self, net: Any, result: Mapping[str, torch.Tensor], lr: float) -> None:
        parameters = dict(net.named_parameters())
        for number, tensor in enumerate(self.exchange.tensors):
            x, new = parameters[tensor.name], result[tensor.name]
            if getattr(self.exchange.entry_of[number].compressor, "returns_weights", False):
                x.copy_(new)
            else:
                x -= lr * new

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
        rank, those sent `between` hosts, and the bytes `dense` of an uncompressed exchange. At the
        end: `begins`, the number of steps before the first step that sends fewer bytes than an
        uncompressed exchange (None if there is none); `accuracy` (None if the task has none), bytes
        of `state`, `parameters`, a digest of the `weights`, `seconds`, and `wire`, the bytes that
        the interfaces of this host's network have sent.
    """
    plan, start, already = TASKS[task], time.monotonic(), wire()
    row: Row = {key: [] for key in ("steps", "loss", "sent", "between", "dense")}
    begins, counts = None, dict.fromkeys(COUNTS, 0.0)
    for step in range(plan.steps + 1):
        before, counts = counts, traffic(team.exchange) if step else counts
        fresh = {key: counts[key] - before[key] for key in COUNTS}
        if begins is None and fresh["sent"] < LESS * fresh["dense_sent"]:
            begins = step - 1
        if step % plan.every == 0 or step == plan.steps:
            row["steps"].append(step)
            row["loss"].append(evaluate(team, task))
            row["sent"].append(counts["sent"])
            row["between"].append(counts["between"])
            row["dense"].append(counts["dense_sent"])
        if step < plan.steps:
            team.step(plan.lr_at(lr, step, plan.steps))
    return row | {
        "begins": begins,
        "accuracy": accuracy(team, task),
        "state": state_bytes(team.exchange),
        "parameters": sum(x.numel() for x in team.net.parameters()),
        "weights": digest(team.net),
        "seconds": time.monotonic() - start,
        "wire": wire() - already,
    }


def wire() -> int:
    """Return the bytes that all network interfaces but the loopback have sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    return sum(int(values[8]) for name, values in counts.items() if name != "lo")


def traffic(exchange: Exchange) -> dict[str, float]:
    """Return the bytes of `exchange.stats()`, without its more expensive entries."""
    return exchange.accounts.stats(exchange.communicator.size)


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
