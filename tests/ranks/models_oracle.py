"""Reference for `Accordion(low=Dense(), high=WAGMA(2, 4))`: all ranks, step by step, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from accordion_hvd import WAGMA, Accordion, Dense
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.groups import Groups

SIZE, LR, MOMENTUM, WINDOW, PERIOD = 1200, 0.1, 0.5, 6, 4
SYNCHRONOUS = WAGMA(2, PERIOD, wait_avoiding=False)


def centre(rank: int, step: int) -> np.ndarray:
    """Return the point to which gradients pull a rank's model at a step."""
    pull = np.random.default_rng([3, rank]).normal(size=SIZE)
    return pull + np.random.default_rng([rank, step]).normal(size=SIZE)


def rate(step: int) -> float:
    """Return the learning rate, which falls once: training is critical until the next check."""
    return LR if step < 30 else LR / 4


def policy(high: Averaging = SYNCHRONOUS, **options: Any) -> Accordion:
    chosen = {"low": Dense(), "window": WINDOW, "interval": 1, "threshold": 99.0} | options
    return Accordion(high=high, **chosen)


class Oracle:
    """All ranks in NumPy, with rank 0's decisions.

    Args:
        ranks: number of ranks.
        in_velocity: whether the velocity contains the learning rate, as in Keras.
    """

    def __init__(self, ranks: int, in_velocity: bool = False) -> None:
        self.ranks, self.period, self.in_velocity = ranks, PERIOD, in_velocity
        self.groups = Groups(self.ranks, 2)
        self.models, self.slots = np.zeros((2, self.ranks, SIZE))
        self.averaging_models, self.settled, self.own = False, True, 0
        self.sum, self.count, self.before = np.zeros(SIZE), 0, None
        self.lr = rate(0)
        self.decisions: list[tuple[int, bool]] = []

    def came_back(self) -> bool:
        """Return whether gradients were averaged again after models had been averaged."""
        kinds = [apart for _, apart in self.decisions]
        first = kinds.index(True) if any(kinds) else len(kinds)
        return not all(kinds[first:])

    def take(self, step: int) -> np.ndarray:
        if self.count >= WINDOW and self.settled:
            self.decide(step)
        pulls = np.array([centre(rank, step) for rank in range(self.ranks)])
        grads = self.models - pulls
        self.sum, self.count = self.sum + grads[0], self.count + 1
        if not self.averaging_models:
            grads = np.broadcast_to(grads.mean(0), grads.shape)
        if self.in_velocity:
            self.slots = MOMENTUM * self.slots - rate(step) * grads
            self.models = self.models + self.slots
        else:
            self.slots = MOMENTUM * self.slots + grads
            self.models = self.models - rate(step) * self.slots
        if self.averaging_models:
            self.average()
        return self.models

    def average(self) -> None:
        self.settled = (self.own + 1) % self.period == 0
        everybody = [tuple(range(self.ranks))] * self.ranks
        of = [self.groups.of(rank, self.own) for rank in range(self.ranks)]
        groups = everybody if self.settled else of
        self.models = np.array([self.models[list(group)].mean(0) for group in groups])
        self.own += 1

    def decide(self, step: int) -> None:
        norm, was = np.linalg.norm(self.sum), self.averaging_models
        critical = self.before is None or abs(norm - self.before) / self.before >= 99
        self.averaging_models = not critical and not rate(step) <= 0.5 * self.lr
        self.before, self.lr = norm, rate(step)
        self.sum, self.count = np.zeros(SIZE), self.count - WINDOW
        if was and not self.averaging_models:
            self.slots = np.broadcast_to(self.slots.mean(0), self.slots.shape)
        if self.averaging_models and not was:
            self.own = 0
        self.decisions.append((step, self.averaging_models))
