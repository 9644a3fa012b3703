"""Tests of TopK and STC against a sort by magnitude."""

from __future__ import annotations

import laws
import numpy as np
from frameworks import Ranks, normals

from accordion_hvd import STC, TopK, simulate


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


def test_stc_sends_signs_times_the_mean_magnitude() -> None:
    """Tensors of one shape, which share a call, have magnitudes of their own."""
    world, names = simulate(STC(0.1), 1), ("small", "large")
    error = dict.fromkeys(names, np.zeros(1200))
    for (gradient,) in normals(laws.SHAPE, 1, steps=3):
        given = {"small": gradient, "large": np.float32(1e3) * gradient[::-1]}
        (found,) = world.step([{name: x.copy() for name, x in given.items()}], lr=0.1)
        for name in names:
            total = error[name] + given[name].reshape(-1)
            largest = np.argsort(-np.abs(total))[:120]
            wanted = np.zeros(1200)
            wanted[largest] = np.sign(total[largest]) * np.abs(total[largest]).mean()
            np.testing.assert_allclose(found[name].reshape(-1), wanted, rtol=1e-5)
            error[name] = total - wanted
    assert len(world.exchanges[0].layout.batches) == 1
