"""The training task that all methods of a benchmark share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from examples import schedule


@dataclass(frozen=True, kw_only=True)
class Task:
    """Common settings of the tasks of all benchmarks.

    Attributes:
        title: name of the task on pages.
        batch: number of examples per rank and step.
        warmup: fraction of all steps in which the learning rate rises.
        decay: schedule by which the learning rate then falls to 0.
    """

    title: str
    batch: int
    warmup: float = 0.1
    decay: Literal["linear", "cosine"] = "linear"

    def lr_at(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate of a step.

        Args:
            peak: highest rate, which is not quite reached if the decay begins at once.
            step: number of the step, from 0.
            steps: number of steps of the training.
        """
        fall = schedule.cosine if self.decay == "cosine" else schedule.linear
        return fall(peak, step, steps, int(self.warmup * steps))
