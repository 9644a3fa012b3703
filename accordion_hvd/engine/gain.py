"""The gain of an optimizer: the change of a weight, in learning rates, per unit of gradient.

A gradient also takes part in later steps; the gain is the sum of its effects.
"""

from __future__ import annotations

import math

SHORTEST = 1e-3
"""Smallest 1 - m, for momenta m of 1 and above."""

EPSILON = 1e-8


def of_sgd(momentum: float) -> float:
    return 1 / max(1 - momentum, SHORTEST)


def of_adam(mean: float, beta: float, steps: float) -> float:
    """Return the mean gain of Adam for a tensor: one over the root mean square of its gradients.

    Args:
        mean: mean of Adam's second moments, without correction of their bias.
        beta: decay of the second moments per step.
    """
    bias = 1 - beta**steps
    return 1 / (math.sqrt(mean / bias) + EPSILON) if bias > 0 else USUAL


USUAL = of_sgd(0.9)
"""The gain that is assumed if the optimizer is unknown."""
