"""Tests of Accordion's growing batches between real ranks in Keras; see `levers_checks.py`."""

from __future__ import annotations

import functools
from typing import Any

import harness
import keras
import numpy as np
import tensorflow as tf
from harness import raises, some

import accordion_hvd.tensorflow as hvdtf
import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import Accordion, Dense, LocalSGD, TopK
from accordion_hvd.policies.accordion import BATCH

INIT = hvd.init
LR, SMALL, RATIO, EPOCHS, STEPS = 0.01, 8, 4, 4, 8


def examples() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((STEPS * SMALL, 32), np.float32)
    return x, x.sum(1, keepdims=True)


def mine() -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's share of each small batch."""
    every = np.arange(STEPS * SMALL).reshape(STEPS, hvd.size(), -1)
    chosen = every[:, hvd.rank()].ravel()
    return tuple(array[chosen] for array in examples())


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(33), keras.layers.Dense(1)])


def growing(**options: Any) -> Accordion:
    chosen = {"batch_size": (SMALL, RATIO * SMALL), "interval": 1, "threshold": 99.0}
    return Accordion(**chosen | {"window": STEPS} | options)


def weights(model: Any) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


@functools.cache
def reference(grown: int = 2 * STEPS) -> np.ndarray:
    """Return the weights of one process that trains with all ranks' examples.

    Batches are large after `grown` small batches.
    """
    model, (x, y), done = network(), examples(), 0
    optimizer = keras.optimizers.SGD(LR, momentum=0.5)
    while done < EPOCHS * STEPS:
        more = 1 if done < grown else RATIO
        first = done % STEPS * SMALL
        part = slice(first, first + more * SMALL)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[part]) - y[part]) ** 2)
        optimizer.learning_rate = LR * more
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        done += more
    return weights(model)


def compiled(policy: Accordion, **options: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(LR, momentum=0.5), compression=policy)
    model.compile(optimizer, loss="mse", **options)
    return model, optimizer


def judge(model: Any, optimizer: Any, what: str) -> None:
    np.testing.assert_allclose(weights(model), reference(), atol=2e-6, err_msg=what)
    stats = optimizer.exchange.stats()
    assert stats["steps"] == 2 * STEPS + 2 * STEPS // RATIO and stats["batch_size"] == 32, what
    assert int(optimizer.iterations) == EPOCHS * STEPS, what
    assert np.isclose(float(optimizer.learning_rate), LR), what
    rows = [row for row in optimizer.exchange.policy.history if row["name"] == BATCH]
    assert [(row["step"], row["level"]) for row in rows] == [(8, 0), (16, 1)], what


def fit(model: Any, *data: Any, **options: Any) -> None:
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(*data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks, **options)


def check_accumulated_batches_are_large_ones() -> None:
    """Accumulation equals training with large batches in `fit`, eagerly, and in a custom loop."""
    share = SMALL // hvd.size()
    for what in some(("graph", "eager"), ("graph",)):
        policy = growing(window=None if what == "graph" else STEPS)
        model, optimizer = compiled(policy, run_eagerly=what == "eager")
        fit(model, *mine(), batch_size=share)
        judge(model, optimizer, what)
    model, optimizer = compiled(growing())

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    x, y = mine()
    for number in range(EPOCHS * STEPS):
        first = number % STEPS * share
        step(tf.constant(x[first : first + share]), tf.constant(y[first : first + share]))
    judge(model, optimizer, "own loop")


def check_loaders_that_resize() -> None:
    model, optimizer = compiled(growing(window=None))
    data = hvd.AccordionDataset(mine(), optimizer, shuffle=False)
    assert data.num_batches == STEPS
    fit(model, data)
    judge(model, optimizer, "loader")
    assert data.num_batches == STEPS // RATIO
    shuffled = hvd.AccordionDataset(mine(), optimizer)
    shuffled.on_epoch_begin()
    rows = np.concatenate([shuffled[i][0] for i in range(len(shuffled))])
    assert (rows != mine()[0]).any() and np.isclose(np.sort(rows, 0), np.sort(mine()[0], 0)).all()


def check_levers_together() -> None:
    """Ranks stay equal if levels and batches change.

    A budget makes batches large from the first step on and is kept.
    """
    share = SMALL // hvd.size()
    for budget in some((None, 0.0005), (0.0005,)):
        policy = growing(low=Dense(), high=TopK(0.05), budget=budget, window=None)
        model, optimizer = compiled(policy)
        fit(model, *mine(), batch_size=share)
        rows = hvd.allgather(weights(model)[None]).numpy()
        assert (rows == rows[0]).all()
        exchange = optimizer.exchange
        assert exchange.policy.large
        if budget:
            assert exchange.steps == EPOCHS * STEPS // RATIO
            least = 1e6 * budget * EPOCHS * STEPS + 16 * exchange.steps
            assert exchange.stats()["sent"] <= least


def check_refusals() -> None:
    apart = Accordion(low=Dense(), high=LocalSGD(4))
    models = hvdtf.DistributedGradientTape(tf.GradientTape(), compression=apart)
    tape = hvdtf.DistributedGradientTape(tf.GradientTape(), compression=growing())
    with tape, models:
        variable = tf.Variable(1.0)
        loss = variable * 2
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(LR))
    summed = keras.optimizers.SGD(LR, gradient_accumulation_steps=2)
    wrap = hvd.DistributedOptimizer
    odd = Accordion(batch_size=(hvd.size() + 1, 2 * hvd.size() + 2))
    for action, words in (
        (lambda: models.gradient(loss, [variable]), "works with accordion_hvd.tensorflow.keras"),
        (lambda: tape.gradient(loss, [variable]), "a tape takes no steps"),
        (lambda: wrap(scaled, compression=growing()), "mixed_bfloat16"),
        (lambda: wrap(summed, compression=growing()), "gradient_accumulation_steps"),
        (lambda: wrap(keras.optimizers.SGD(LR), compression=odd), "multiples of"),
        (lambda: hvd.AccordionDataset(mine(), keras.optimizers.SGD(LR)), "batch_size=(small"),
    ):
        raises(ValueError, words, action)


if __name__ == "__main__":
    harness.main(globals())
