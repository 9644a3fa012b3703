"""Learning rates as functions of the step (or the epoch), counted from 0."""

from __future__ import annotations

import math
from collections.abc import Sequence


def drops(peak: float, step: int, at: Sequence[int], factor: float) -> float:
    """Multiply the rate by `factor` at each of the steps `at`."""
    return peak * factor ** sum(step >= when for when in at)


def linear(peak: float, step: int, steps: int, warmup: int = 0) -> float:
    """Fall linearly to 0 at `steps`; multiply by a linear warm-up in the first `warmup` steps."""
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return peak * rise * (1 - step / steps)


def cosine(peak: float, step: int, steps: int, warmup: int = 0) -> float:
    """Rise linearly for `warmup` steps, then fall along a cosine to 0 at `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
