"""PowerSGD against its paper, in plain matrices."""

from __future__ import annotations

import laws
import numpy as np
import pytest
from cases import matrix
from frameworks import Ranks, normals

from accordion_hvd import PowerSGD
from accordion_hvd.compressors.powersgd import matrix_shape


@pytest.mark.parametrize(
    "shape", [(4,), (6, 8), (64, 3, 7, 7), (7, 7, 3, 64), (2, 2, 2, 2), (1, 9)]
)
def test_matrix_shape(shape: tuple[int, ...]) -> None:
    assert matrix_shape(shape) == matrix(shape)
    assert np.prod(matrix_shape(shape)) == np.prod(shape)


def test_matrix_shape_of_known_layers() -> None:
    assert matrix_shape((64, 3, 7, 7)) == (64, 147)  # PyTorch: (output, the rest)
    assert matrix_shape((7, 7, 3, 64)) == (147, 64)  # Keras: (the rest, output)


def test_powersgd_follows_the_paper() -> None:
    """Algorithm 1 and 2 with plain matrices (n, r), for two ranks."""
    rank, ranks, (n, m) = 2, 2, laws.SHAPE
    world = Ranks(PowerSGD(rank), ranks)
    world.states = world.init(np.zeros(laws.SHAPE, np.float32))
    q = world.states[0]["q"].T.astype(np.float64)  # (m, r)
    errors = [np.zeros((n, m)) for _ in range(ranks)]
    for gradients in normals(laws.SHAPE, ranks, steps=6):
        totals = [g + e for g, e in zip(gradients, errors, strict=True)]
        p = np.mean([total @ q for total in totals], 0)
        for j in range(rank):  # Gram-Schmidt
            for i in range(j):
                p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
            p[:, j] /= np.linalg.norm(p[:, j])
        q = np.mean([total.T @ p for total in totals], 0)
        np.testing.assert_allclose(world.step(gradients)[1], p @ q.T, atol=1e-4)
        errors = [total - p @ q.T for total in totals]


def test_powersgd_finds_a_low_rank_gradient() -> None:
    """A gradient of rank 2 is exact after a few steps: the power iteration is warm-started."""
    rng = np.random.default_rng(0)
    low = (rng.standard_normal((24, 2)) @ rng.standard_normal((2, 50))).astype(np.float32)
    world = Ranks(PowerSGD(2), 2)
    for _ in range(4):
        mean = world.step([low, low])[0]
    np.testing.assert_allclose(mean, low, atol=1e-4)
