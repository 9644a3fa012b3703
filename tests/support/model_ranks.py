"""Simulated ranks that average their models with an averaging method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from frameworks import NUMPY, Framework

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.core.base import Info
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep

Update = Callable[[int, int, np.ndarray], np.ndarray]
"""(rank, step, model) to what the rank's own optimizer adds."""


class Ranks:
    """Simulated ranks that take local steps and average their models."""

    def __init__(
        self, method: Averaging, ranks: int, first: np.ndarray, framework: Framework = NUMPY
    ) -> None:
        self.method, self.framework, self.step = method, framework, 0
        self.links = [SimulatedCommunicator(Hub(ranks), r, framework.xp) for r in range(ranks)]
        for link in self.links:
            link.hub = self.links[0].hub
        method.groups(ranks)
        self.models = [framework.tensor(first) for _ in range(ranks)]
        self.states = [method.start(m, self.info(r)) for r, m in enumerate(self.models)]
        self.traffic = Traffic()

    def info(self, rank: int, lr: float = 0.0) -> Info:
        return Info(step=self.step, rank=rank, size=len(self.links), name="model", lr=lr)

    def take(self, update: Update, lr: float = 0.1) -> np.ndarray:
        """Take a local step on all ranks, then average; return the ranks' models as rows."""
        for rank, model in enumerate(self.models):
            added = update(rank, self.step, self.framework.array(model))
            self.models[rank] = model + self.framework.tensor(added, self.framework.xp.dtype(model))
        generators = [
            self.method.exchange(model, state, self.info(rank, lr))
            for rank, (model, state) in enumerate(zip(self.models, self.states, strict=True))
        ]
        return self._hold(generators)

    def synchronize(self) -> np.ndarray:
        generators = [
            self.method.synchronize(model, state, self.info(rank))
            for rank, (model, state) in enumerate(zip(self.models, self.states, strict=True))
        ]
        return self._hold(generators)

    def _hold(self, generators: Sequence[Any]) -> np.ndarray:
        self.models, self.states = map(list, zip(*lockstep(self.links, generators), strict=True))
        self.step += 1
        return np.stack([self.framework.array(model) for model in self.models])
