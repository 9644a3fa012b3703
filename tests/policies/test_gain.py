"""Tests of the gain of optimizers: the change of weights that follows a gradient's change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accordion_hvd.engine import gain
from accordion_hvd.torch.gain import gain_of as torch_gain

LR, STEPS, AT, SIZE, BETA = 1e-3, 400, 200, 64, 0.99
SCALES = 0.1, 10.0
"""Standard deviations of the gradients of two tensors."""

KINDS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "heavy rmsprop", "adagrad")


def gradient(step: int, scale: float) -> np.ndarray:
    draw = np.random.default_rng(step)
    return (scale * draw.standard_normal(SIZE)).astype(np.float32)


def with_torch(kind: str, scale: float, change: float) -> tuple[np.ndarray, float]:
    """Train; return the weights, and the gain before step `AT`, whose gradient is changed."""
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD([parameter], LR),
        "momentum": lambda: torch.optim.SGD([parameter], LR, momentum=0.9),
        "adam": lambda: torch.optim.Adam([parameter], LR, (0.9, BETA)),
        "adamw": lambda: torch.optim.AdamW([parameter], LR, (0.9, BETA), weight_decay=0.0),
        "rmsprop": lambda: torch.optim.RMSprop([parameter], LR, BETA),
        "heavy rmsprop": lambda: torch.optim.RMSprop([parameter], LR, BETA, momentum=0.8),
        "adagrad": lambda: torch.optim.Adagrad([parameter], LR),
    }[kind]()
    found = 0.0
    for step in range(STEPS):
        if step == AT:
            found = torch_gain(optimizer.param_groups[0], optimizer.state.get(parameter, {}))
        grad = gradient(step, scale) + (change * scale if step == AT else 0.0)
        parameter.grad = torch.from_numpy(grad.astype(np.float32))
        optimizer.step()
    return parameter.detach().numpy().astype(np.float64), found


def with_keras(kind: str, scale: float, change: float) -> tuple[np.ndarray, float]:
    """Train in Keras; return the weights, and the gain before step `AT`."""
    keras = pytest.importorskip("keras")
    from accordion_hvd.tensorflow.keras.gain import gain_of

    variable = keras.Variable(np.zeros(SIZE, np.float32))
    optimizer: Any = {
        "sgd": lambda: keras.optimizers.SGD(LR),
        "momentum": lambda: keras.optimizers.SGD(LR, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(LR, beta_2=BETA),
        "adamw": lambda: keras.optimizers.AdamW(LR, beta_2=BETA, weight_decay=0.0),
        "rmsprop": lambda: keras.optimizers.RMSprop(LR, BETA),
        "heavy rmsprop": lambda: keras.optimizers.RMSprop(LR, BETA, momentum=0.8),
        "adagrad": lambda: keras.optimizers.Adagrad(LR),
    }[kind]()
    optimizer.build([variable])
    found = 0.0
    for step in range(STEPS):
        if step == AT:
            found = gain_of(optimizer, variable)
        grad = gradient(step, scale) + (change * scale if step == AT else 0.0)
        optimizer.apply([grad.astype(np.float32)])
    return np.asarray(variable).astype(np.float64), found


@pytest.mark.parametrize("train", [with_torch, with_keras])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_gradient_changes_the_weights_by_its_gain(
    kind: str, scale: float, train: Any
) -> None:
    changed, predicted = train(kind, scale, 1.0)
    moved = np.mean(train(kind, scale, 0.0)[0] - changed)
    assert moved / (LR * scale) == pytest.approx(predicted, rel=0.1)


def test_optimizers_of_other_packages() -> None:
    moments = torch.full((3,), 4.0)
    for group, state in (
        ({}, {"exp_avg_sq": moments}),
        ({"betas": (0.9, 0.99)}, {"exp_avg_sq": moments}),
        ({}, {"exp_avg_sq": moments, "step": 3}),
    ):
        assert torch_gain(group, state) == pytest.approx(0.5)
    assert torch_gain({}, {}) == gain.USUAL


def test_a_scaled_loss() -> None:
    keras = pytest.importorskip("keras")
    from accordion_hvd.tensorflow.keras.gain import gain_of

    variable = keras.Variable(np.zeros(SIZE, np.float32))
    plain, scaled = keras.optimizers.Adam(), keras.optimizers.Adam()
    wrapper = keras.optimizers.LossScaleOptimizer(scaled, initial_scale=8.0)
    plain.build([variable])
    wrapper.build([variable])
    plain.apply([np.ones(SIZE, np.float32)])
    wrapper.apply([np.full(SIZE, 8.0, np.float32)])
    assert gain_of(wrapper, variable) == pytest.approx(gain_of(plain, variable))


def test_unusual_momenta() -> None:
    assert gain.of_sgd(1.0) == gain.of_sgd(2.0) == 1000.0
    assert gain.of_adam(4.0, 0.5, 100) == pytest.approx(0.5)
    assert gain.of_adam(2.0, 0.5, 1) == pytest.approx(0.5)  # half of the moments' bias is left
    assert gain.of_adam(0.0, 0.9, 0) == gain.USUAL
    assert gain.of_adam(0.0, 0.9, 5) == 1 / gain.EPSILON
