"""Common part of the elastic trainings: stages, and the sum of all residuals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd.engine import rank_changes
from accordion_hvd.engine.model_averager import ModelAverager

FEW, MANY = "localhost:2\n", "localhost:2\n127.0.0.1:1\n"
"""Hosts with two and three ranks; Horovod never uses a host again on which a rank has died."""

STEPS = 6
"""Steps before each stage, and after the last one."""

PATIENCE = 60.0
"""Seconds to wait for other ranks."""

BEGIN: dict[str, Any] = {"step": 0, "entered": 0, "sizes": [], "changes": [], "total": None}
"""Attributes of the elastic state before the training."""


class Stages:
    """Changes of the ranks, one after the other.

    Args:
        names: "join" (a third rank comes), "leave" (it goes in order), "kill" (it dies).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.waited = names, 0.0

    def enter(self, state: Any, size: int, total: np.ndarray) -> None:
        """Note the number of ranks, and how much the sum of the residuals has changed."""
        if state.total is not None:
            norm = float(np.linalg.norm(state.total))
            drift = float(np.linalg.norm(total - state.total)) / (norm or 1.0)
            state.changes = [*state.changes, (norm, drift)]
        state.sizes, state.entered = [*state.sizes, size], state.step

    def over(self, state: Any) -> bool:
        """Return whether all stages and some more steps are done."""
        finished = len(state.sizes) > len(self.names) and state.step >= state.entered + STEPS
        return finished or self.waited > PATIENCE

    def act(self, state: Any, rank: int) -> None:
        """Begin the next stage if it is due, and wait for it; called after each step."""
        number = len(state.sizes) - 1
        if number >= len(self.names) or state.step < state.entered + STEPS:
            return
        name = self.names[number]
        if name == "kill" and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        if name != "kill" and rank == 0:
            Path(os.environ["ELASTIC_HOSTS"]).write_text(MANY if name == "join" else FEW)
        time.sleep(0.1)
        self.waited += 0.1


def total(
    optimizer: Any, weights: Sequence[np.ndarray], size: int, add: Callable[[np.ndarray], Any]
) -> np.ndarray:
    """Return what a change of the ranks conserves, as one vector; collective.

    This is the sum over ranks of all residuals, or the average of the models.

    Args:
        optimizer: a distributed optimizer.
        weights: the model's weights.
        size: number of ranks.
        add: function that returns the sum over ranks of a vector.
    """
    if isinstance(getattr(optimizer, "averaging", None), ModelAverager):
        return add(np.concatenate([np.ravel(weight) for weight in weights])) / size
    exchange, rows = optimizer.exchange, []
    for entry, saved in zip(
        exchange.bucket_states, rank_changes.part(exchange, False).buckets, strict=True
    ):
        row = np.zeros(int(np.prod(entry.bucket.shape)), "f")
        for value in saved.residuals():
            row += np.ravel(value)
        rows.append(row)
    return add(np.concatenate(rows))
