"""Tests of private training in Keras on real ranks: the noise and the budget."""

from __future__ import annotations

import math
from typing import Any

import harness
import keras
import numpy as np
import tensorflow as tf

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import BudgetSpent, PrivacyBudget, TopAgg
from accordion_hvd.privacy.tensorflow import gradients
from accordion_hvd.tensorflow import DistributedGradientTape, allgather

INIT = hvd.init
DELTA = 1e-5


def make_model(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(20, "relu"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((12,)), *layers])


def data(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank())
    x = rng.standard_normal((count, 12)).astype(np.float32)
    return x, x[:, :4].argmax(1)


def compiled(method: TopAgg, seed: int = 0, **options: Any) -> keras.Model:
    model = make_model(seed)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=method, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    return model


def fit(model: keras.Model, epochs: int = 1) -> Any:
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    x, y = data()
    return model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)


def weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([w.reshape(-1) for w in model.get_weights()])


def assert_same(model: keras.Model) -> None:
    rows = allgather(tf.constant(weights(model)[None]), name="check.everywhere").numpy()
    assert np.isfinite(rows).all() and (rows == rows[0]).all(), "ranks hold different weights"


def check_noise_is_secret_and_new_in_fit() -> None:
    """Trainings with the same seed get different noise, as do the steps of one graph."""
    found = []
    for _ in range(2):
        model = compiled(TopAgg(5, None, 30.0), seed=3)
        before = weights(model)
        fit(model)
        assert_same(model)
        assert model.optimizer.exchange.steps == 4
        found.append(weights(model) - before)
    assert (found[0] != found[1]).mean() > 0.9
    moved = np.std(found[0]) / (0.05 * 30 / hvd.size())  # 2 for four steps with independent noise
    assert 1.6 < moved < 2.5, f"{moved}: 4 would be the same noise four times"


def check_fit_stops_before_the_budget_is_exceeded() -> None:
    method = TopAgg(5, None, 60.0, budget=PrivacyBudget(1.0, DELTA))
    model = compiled(method)
    room = method.budget.left(method.mechanism)
    fit(model, epochs=100)
    spent = model.optimizer.exchange.stats()["privacy"]
    assert spent["releases"] == room == model.optimizer.exchange.steps
    assert 0.8 < spent["epsilon"] <= 1
    assert_same(model)
    before = weights(model)
    try:  # a script that goes on regardless
        grads = [tf.zeros(v.shape) for v in model.trainable_variables]
        model.optimizer.apply(grads, model.trainable_variables)
    except BudgetSpent as error:
        assert "would exceed it" in str(error)
    else:
        raise AssertionError("the budget was exceeded")
    assert (weights(model) == before).all()


def check_examples_vote() -> None:
    """A model learns from the votes of examples, eagerly and in a graph, with one empty lot."""
    options = {"contributors": 32 * hvd.size(), "budget": PrivacyBudget(math.inf, DELTA)}
    method = TopAgg(60, None, 4.0, unit="example", rate=0.5, **options)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02), compression=method)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    x, y = data(256)
    optimizer.build(model.trainable_variables)

    @tf.function
    def traced(x: tf.Tensor, y: tf.Tensor) -> None:
        optimizer.apply(gradients(model, loss, x, y), model.trainable_variables)

    for number in range(30):
        lot = slice(32 * number % 256, 32 * number % 256 + (0 if number + hvd.rank() == 0 else 32))
        if number:
            traced(tf.constant(x[lot]), tf.constant(y[lot]))
        else:
            optimizer.apply(gradients(model, loss, x[lot], y[lot]), model.trainable_variables)
    assert_same(model)
    assert (np.argmax(model(x), 1) == y).mean() > 0.4  # chance: 0.25
    assert optimizer.exchange.stats()["privacy"]["releases"] == 30
    try:
        optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables])
    except ValueError as error:
        assert "single contributors" in str(error)
    else:
        raise AssertionError("gradients of the whole batch were taken for those of examples")


def check_a_tape_adds_noise_too() -> None:
    variable = tf.Variable(tf.zeros(400))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable) * float("nan" if hvd.rank() == 0 else 0.0)
    method = TopAgg(1, None, 50.0)
    grad = DistributedGradientTape(tape, compression=method).gradient(loss, [variable])[0]
    noise = grad.numpy() * hvd.size()
    assert abs(noise.std() / 50 - 1) < 0.2 and (np.abs(noise - noise.round()) < 1e-3).all()


def check_refusals() -> None:
    model = compiled(TopAgg(5, None, 30.0))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.register_local_var(model.trainable_variables[0])
    for call, told in [
        (lambda: model.optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables]),
         "local variable(s)"),
        (lambda: fit(compiled(TopAgg(5, None, 30.0), skip=["*bias"])), "unprotected"),
        (lambda: compiled(TopAgg(5, None, 30.0, unit="example", contributors=9),
                          backward_passes_per_step=2), "must be 1"),
    ]:  # fmt: skip
        try:
            call()
        except ValueError as error:
            assert told in str(error), error
        else:
            raise AssertionError(f"not refused: {told}")


if __name__ == "__main__":
    harness.main(globals())
