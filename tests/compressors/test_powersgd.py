"""PowerSGD against its paper, in plain matrices."""

from __future__ import annotations

import math

import laws
import numpy as np
import pytest
from frameworks import Ranks, normals

from accordion_hvd import PowerSGD, StepSchedule
from accordion_hvd.compressors.powersgd import matrix_shape
from accordion_hvd.simulation.one_process import simulate

Q = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)


# Layers as PyTorch has them: kernels of convolutions are (outputs, inputs, ...).
CHANNELS_FIRST = {
    "dense": (1000, 512),
    "ResNet's stem": (64, 3, 7, 7),
    "AlexNet's stem": (64, 3, 11, 11),
    "ViT's patches": (768, 3, 16, 16),
    "DQN's first layer": (32, 4, 8, 8),
    "3 x 3": (512, 256, 3, 3),
    "1 x 1": (2048, 512, 1, 1),
    "one group per channel": (96, 1, 7, 7),
    "three dimensions": (64, 3, 7, 7, 7),
    "one dimension": (384, 80, 3),
}


@pytest.mark.parametrize("shape", CHANNELS_FIRST.values(), ids=CHANNELS_FIRST)
def test_matrices_are_those_of_the_paper(shape: tuple[int, ...]) -> None:
    """Section 3 of the paper: one row for each output channel; Keras' kernels are transposed."""
    outputs, inputs, *kernel = shape
    rest = math.prod([inputs, *kernel])
    assert matrix_shape(shape) == (outputs, rest)
    if len(shape) > 2 and inputs > 1:
        assert matrix_shape((*kernel, inputs, outputs)) == (rest, outputs)


def test_matrices_of_other_tensors() -> None:
    assert matrix_shape((4,)) == (4, 1) and matrix_shape((1, 9)) == (1, 9)
    assert matrix_shape((768, 12, 64)) == (768, 768)  # queries of Keras' attention: one cut is free
    assert matrix_shape((12, 64, 768)) == (768, 768)
    assert matrix_shape((1, 64, 3, 3)) == (192, 3)  # one output: the paper's row sends it all


def test_states_of_other_matrices_go_on() -> None:
    """A checkpoint of an older version has a (32, 4, 8, 8) kernel as (128, 64), not (32, 256)."""
    shape, rng = (32, 4, 8, 8), np.random.default_rng(0)
    policy = StepSchedule({0: PowerSGD(2), 4: PowerSGD(4), 6: PowerSGD(2)})
    world, sent, given = simulate(policy, 2), np.zeros(shape), np.zeros(shape)
    for number in range(8):
        grads = [{"w": rng.normal(size=shape).astype("f")} for _ in range(2)]
        if number == 2:
            for exchange in world.exchanges:
                entry = exchange.bucket_states[0]
                assert entry.state is not None
                error = PowerSGD(2).residual(entry.state).reshape(128, 64)
                entry.state = {"error": error, "p": np.zeros((2, 128), "f"), "q": Q.copy()}
        means = world.step(grads)
        assert means[0] is not None
        sent, given = sent + means[0]["w"], given + (grads[0]["w"] + grads[1]["w"]) / 2
    residuals = [
        exchange.bucket_states[0].residual(exchange.info(exchange.bucket_states[0]))
        for exchange in world.exchanges
    ]
    waiting = (residuals[0] + residuals[1]).reshape(shape) / 2
    np.testing.assert_allclose(sent + waiting, given, atol=1e-4)


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
