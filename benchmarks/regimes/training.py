"""One training of a study, on ranks that are simulated in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accordion_hvd import simulate
from accordion_hvd.policies.accordion import LOW
from accordion_hvd.simulation.one_process import World
from accordion_hvd.torch.reducer import gain_of
from benchmarks.regimes.methods import BATCHES, METHODS, Plan
from benchmarks.regimes.studies import STUDIES, Batch, Source, Study
from examples.results import Row

RANKS = 4
Gradients = dict[str, Any]
"""Tensors by the names of parameters."""


@dataclass(frozen=True)
class Outcome:
    """Result of a training.

    Attributes:
        study: name of the study.
        method: name of the method.
        seed: seed of weights and batches.
        epochs: epochs of the training.
        score: test accuracy in %, or test loss.
        megabytes: MB (10^6 bytes) that a rank sent in the whole training.
        dense: MB that a rank would have sent without compression.
        low: fraction of layers and epochs at a policy's first level; NaN without layers.
        changes: number of changes of a layer's level.
        steps: number of exchanges.
        seconds: duration on this machine.
    """

    study: str
    method: str
    seed: int
    epochs: int
    score: float
    megabytes: float
    dense: float
    low: float
    changes: int
    steps: int
    seconds: float


class Training:
    """A network that four simulated ranks train.

    Args:
        name: name of the study.
        method: name of the method.
        seed: seed of weights and batches.
        epochs: epochs of the training; None for those of the study.
        share: see `Plan`.
        device: device of the network.
    """

    def __init__(
        self,
        name: str,
        method: str,
        seed: int,
        epochs: int | None = None,
        share: float = 0.0,
        device: Any = "cpu",
    ) -> None:
        self.name, self.method, self.seed = name, method, seed
        study = STUDIES[name]
        self.study: Study = replace(study, epochs=epochs or study.epochs)
        torch.manual_seed(seed)
        self.model = self.study.network().to(device)
        self.source: Source = self.study.source(seed, RANKS, self.study.batch, device)
        plan = Plan(self.study, self.source.steps, share, seed)
        chosen = (METHODS | BATCHES)[method]
        self.batches = chosen.batches
        self.world: World = simulate(chosen.policy(plan), RANKS, gain=self._gain)
        self.optimizer = _optimizer(self.study, self.model)
        self.levels: list[dict[str, int]] = []  # of each epoch

    def run(self) -> Outcome:
        """Train, and return the result."""
        began, step = time.perf_counter(), 0
        self.model.train()
        while step < self.source.steps * self.study.epochs:
            step += self._step(step)
            if step > len(self.levels) * self.source.steps:
                self.levels.append(dict(self.world.exchanges[0].policy.current))
        stats = self.world.exchanges[0].stats()
        return Outcome(
            self.name, self.method, self.seed, self.study.epochs, self.source.score(self.model),
            stats["sent"] / 1e6, stats["dense_sent"] / 1e6, low_share(self.levels),
            changes(self.levels), stats["steps"], time.perf_counter() - began,
        )  # fmt: skip

    def _step(self, first: int) -> int:
        """Take an optimizer step from small batch `first`; return its number of small batches."""
        lr = self.study.lr_at(first / self.source.steps)
        count = self.batches * self.world.micro_batches(lr)
        last = min(first + count, self.source.steps * self.study.epochs)
        each = [self._gradients(step) for step in range(first, last)]
        gradients = [_means(same) for same in zip(*each, strict=True)]
        weights = {name: x.detach() for name, x in self.model.named_parameters()}
        mean = self.world.step(gradients, lr, [weights] * RANKS)[0]
        if mean is not None:
            for name, parameter in self.model.named_parameters():
                parameter.grad = mean[name].to(parameter.dtype)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * count
            self.optimizer.step()
        return count

    def _gain(self, name: str) -> float:
        """Return the optimizer's gain for a parameter."""
        state = self.optimizer.state.get(self.model.get_parameter(name), {})
        return gain_of(self.optimizer.param_groups[0], state)

    def _gradients(self, step: int) -> list[Gradients]:
        """Return each rank's gradients of a small batch."""
        return [self._gradient(batch) for batch in self.source.batches(step)]

    def _gradient(self, batch: Batch) -> Gradients:
        self.model.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(batch[0]), batch[1]).backward()
        return {name: x.grad for name, x in self.model.named_parameters() if x.grad is not None}


def outcome_of(study: str, method: str, seed: int, epochs: int, found: Row) -> Outcome:
    """Return the outcome of a training of the examples, given the content of `result.json`."""
    stats, rows = found["stats"], found["epochs"]
    levels = [row["levels"] for row in rows]
    return Outcome(
        study, method, seed, epochs, 100 * rows[-1]["accuracy"], stats["sent"] / 1e6,
        stats["dense_sent"] / 1e6, low_share(levels), changes(levels), stats["steps"],
        found["seconds"],
    )  # fmt: skip


def low_share(levels: Sequence[Mapping[str, int]]) -> float:
    """Return the fraction of layers and epochs with low compression; NaN without layers."""
    chosen = [level == LOW for epoch in levels for level in epoch.values()]
    return sum(chosen) / len(chosen) if chosen else math.nan


def changes(levels: Sequence[Mapping[str, int]]) -> int:
    """Return the number of changes of a layer's level between epochs."""
    pairs = zip(levels, levels[1:], strict=False)
    return sum(new[name] != old[name] for old, new in pairs for name in old)


def _means(parts: Sequence[Gradients]) -> Gradients:
    """Return the means over small batches."""
    if len(parts) == 1:
        return parts[0]
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def _optimizer(study: Study, model: nn.Module) -> torch.optim.Optimizer:
    if study.adam:
        return torch.optim.Adam(model.parameters(), study.lr, weight_decay=study.weight_decay)
    return torch.optim.SGD(
        model.parameters(), study.lr, momentum=0.9, weight_decay=study.weight_decay, nesterov=True
    )
