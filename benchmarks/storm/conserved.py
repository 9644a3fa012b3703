"""The vector that orderly changes of the ranks of an elastic job conserve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accordion_hvd.engine import membership
from accordion_hvd.engine.model_averager import ModelAverager


def averages_models(optimizer: Any) -> bool:
    """Return whether a distributed optimizer averages models instead of gradients."""
    return isinstance(getattr(optimizer, "averaging", None), ModelAverager)


def conserved(
    optimizer: Any, weights: Sequence[np.ndarray], size: int, add: Callable[[np.ndarray], Any]
) -> np.ndarray:
    """Return what an orderly change of the ranks conserves, as one vector; collective.

    This is the mean over ranks of all residuals, or of the models.

    Args:
        optimizer: a distributed optimizer.
        weights: the model's weights.
        size: number of ranks.
        add: function that returns the sum over ranks of a vector.
    """
    if averages_models(optimizer):
        return add(np.concatenate([np.ravel(weight) for weight in weights])) / size
    exchange, rows = optimizer.exchange, []
    for entry, saved in zip(
        exchange.bucket_states, membership.part(exchange, False).buckets, strict=True
    ):
        row = np.zeros(int(np.prod(entry.bucket.shape)), "f")
        for value in saved.residuals():
            row += np.ravel(value)
        rows.append(row)
    return add(np.concatenate(rows)) / size
