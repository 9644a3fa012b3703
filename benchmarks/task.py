"""What a benchmark trains, alike for all that it compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from examples import schedule


@dataclass(frozen=True, kw_only=True)
class Task:
    """What tasks of all benchmarks have in common.

    Attributes:
        title: in words.
        batch: examples of each rank in a step.
        warmup: the fraction of all steps in which the learning rate rises.
        decay: how it then falls to 0.
    """

    title: str
    batch: int
    warmup: float = 0.1
    decay: Literal["linear", "cosine"] = "linear"

    def lr_at(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate of a step.

        Args:
            peak: the highest rate, which is not quite reached if the fall begins at once.
            step: from 0.
            steps: of the training.
        """
        fall = schedule.cosine if self.decay == "cosine" else schedule.linear
        return fall(peak, step, steps, int(self.warmup * steps))
