"""Tests of TopK against a sort by magnitude."""

from __future__ import annotations

import laws
import numpy as np
from frameworks import Ranks, normals

from accordion_hvd import TopK


def test_at_least_one_is_kept() -> None:
    assert [TopK(0.01).kept(size) for size in (1, 99, 100, 250)] == [1, 1, 1, 2]


def test_topk_sends_the_largest() -> None:
    """On one rank, the mean is the largest magnitudes of gradient + residual, found by sorting."""
    world, error = Ranks(TopK(0.1), 1), np.zeros(1200)
    for (gradient,) in normals(laws.SHAPE, 1, steps=5):
        total = error + gradient.reshape(-1)
        largest = np.argsort(-np.abs(total))[:120]
        wanted = np.zeros(1200)
        wanted[largest] = total[largest]
        np.testing.assert_allclose(world.step([gradient])[0].reshape(-1), wanted, atol=1e-6)
        error = total - wanted
