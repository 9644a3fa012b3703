"""Tests of the gain of optimizers: the change of weights that follows a gradient's change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accordion_hvd.policies.displacement import USUAL_GAIN, gain_of_adam, gain_of_sgd
from accordion_hvd.torch.reducer import gain_of as torch_gain

LR, STEPS, AT, SIZE, BETA = 1e-3, 400, 200, 64, 0.99
SCALES = 0.1, 10.0
"""Standard deviations of the gradients of two tensors."""

KINDS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "heavy rmsprop", "adagrad")


def gradients(step: int, scale: float) -> list[np.ndarray]:
    """Return a gradient, and the same plus `scale` at step `AT`."""
    plain = scale * np.random.default_rng(step).standard_normal(SIZE)
    changed = plain + scale * (step == AT)
    return [plain.astype(np.float32), changed.astype(np.float32)]


def with_torch(kind: str, scale: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Train two tensors, for one of which the gradient of step `AT` is changed by `scale`.

    Return both tensors' weights, and the gain before that step.
    """
    pair = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in "ab"]
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(pair, LR),
        "momentum": lambda: torch.optim.SGD(pair, LR, momentum=0.9),
        "adam": lambda: torch.optim.Adam(pair, LR, (0.9, BETA)),
        "adamw": lambda: torch.optim.AdamW(pair, LR, (0.9, BETA), weight_decay=0.0),
        "rmsprop": lambda: torch.optim.RMSprop(pair, LR, BETA),
        "heavy rmsprop": lambda: torch.optim.RMSprop(pair, LR, BETA, momentum=0.8),
        "adagrad": lambda: torch.optim.Adagrad(pair, LR),
    }[kind]()
    found = 0.0
    for step in range(STEPS):
        if step == AT:
            found = torch_gain(optimizer.param_groups[0], optimizer.state.get(pair[1], {}))
        for parameter, grad in zip(pair, gradients(step, scale), strict=True):
            parameter.grad = torch.from_numpy(grad)
        optimizer.step()
    plain, changed = (parameter.detach().numpy().astype(np.float64) for parameter in pair)
    return plain, changed, found


def with_keras(kind: str, scale: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Train as `with_torch` does, in Keras."""
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    from accordion_hvd.tensorflow.keras.optimizer import gain_of

    pair = [keras.Variable(np.zeros(SIZE, np.float32)) for _ in "ab"]
    optimizer: Any = {
        "sgd": lambda: keras.optimizers.SGD(LR),
        "momentum": lambda: keras.optimizers.SGD(LR, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(LR, beta_2=BETA),
        "adamw": lambda: keras.optimizers.AdamW(LR, beta_2=BETA, weight_decay=0.0),
        "rmsprop": lambda: keras.optimizers.RMSprop(LR, BETA),
        "heavy rmsprop": lambda: keras.optimizers.RMSprop(LR, BETA, momentum=0.8),
        "adagrad": lambda: keras.optimizers.Adagrad(LR),
    }[kind]()
    optimizer.build(pair)
    apply, found = tf.function(lambda *grads: optimizer.apply(list(grads))), 0.0
    for step in range(STEPS):
        if step == AT:
            found = gain_of(optimizer, pair[1])
        apply(*map(tf.constant, gradients(step, scale)))
    plain, changed = (np.asarray(variable).astype(np.float64) for variable in pair)
    return plain, changed, found


def test_dampening() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, dampening=0.8)
    assert torch_gain(optimizer.param_groups[0], {}) == pytest.approx(0.2 / (1 - 0.9))


@pytest.mark.parametrize("train", [with_torch, with_keras])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_gradient_changes_the_weights_by_its_gain(
    kind: str, scale: float, train: Any
) -> None:
    plain, changed, predicted = train(kind, scale)
    assert np.mean(plain - changed) / (LR * scale) == pytest.approx(predicted, rel=0.1)


def test_optimizers_of_other_packages() -> None:
    moments = torch.full((3,), 4.0)
    for group, state in (
        ({}, {"exp_avg_sq": moments}),
        ({"betas": (0.9, 0.99)}, {"exp_avg_sq": moments}),
        ({}, {"exp_avg_sq": moments, "step": 3}),
    ):
        assert torch_gain(group, state) == pytest.approx(0.5)
    assert torch_gain({}, {}) == USUAL_GAIN


def test_a_scaled_loss() -> None:
    keras = pytest.importorskip("keras")
    from accordion_hvd.tensorflow.keras.optimizer import gain_of

    variable = keras.Variable(np.zeros(SIZE, np.float32))
    plain, scaled = keras.optimizers.Adam(), keras.optimizers.Adam()
    wrapper = keras.optimizers.LossScaleOptimizer(scaled, initial_scale=8.0)
    plain.build([variable])
    wrapper.build([variable])
    plain.apply([np.ones(SIZE, np.float32)])
    wrapper.apply([np.full(SIZE, 8.0, np.float32)])
    assert gain_of(wrapper, variable) == pytest.approx(gain_of(plain, variable))


def test_unusual_momenta() -> None:
    assert gain_of_sgd(1.0) == gain_of_sgd(2.0) == 1000.0
    assert gain_of_adam(4.0, 0.5, 100) == pytest.approx(0.5)
    assert gain_of_adam(2.0, 0.5, 1) == pytest.approx(0.5)  # half of the moments' bias is left
    assert gain_of_adam(0.0, 0.9, 0) == USUAL_GAIN
    assert gain_of_adam(0.0, 0.9, 5) == 1 / 1e-8
