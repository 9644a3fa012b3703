"""Tests of Accordion with `high=WAGMA(...)` in Keras; see `levers_models_checks.py`."""

from __future__ import annotations

import tempfile
from typing import Any

import harness
import keras
import numpy as np
import tensorflow as tf
from harness import raises, some
from models_oracle import LR, MOMENTUM, PERIOD, SIZE, Oracle, centre, policy, rate

import accordion_hvd.tensorflow as hvdtf
import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import DPSGD, WAGMA, Accordion, Dense, DiLoCo, LocalSGD, TopK
from accordion_hvd.policies.accordion import MODEL

INIT = hvd.init
STEPS = 60


@keras.saving.register_keras_serializable()
class Pull(keras.layers.Layer):
    """A layer that returns its input minus its weights, with statistics that differ by rank."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(name="w", shape=(SIZE,), initializer="zeros")
        self.seen = self.add_weight(name="seen", shape=(1,), trainable=False)
        self.seen.assign([float(hvd.rank())])

    def call(self, x: Any) -> Any:
        return x - self.w


def half_squares(_: Any, distance: Any) -> Any:
    return 0.5 * tf.reduce_sum(distance**2, -1)


def network() -> keras.Model:
    return keras.Sequential([keras.Input((SIZE,)), Pull(name="pull")], name="pulled")


def wrapped(chosen: Accordion) -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(LR, MOMENTUM), compression=chosen)


def pulls(steps: int = STEPS) -> np.ndarray:
    return np.array([centre(hvd.rank(), step) for step in range(steps)], np.float32)


def rows_of(x: Any) -> np.ndarray:
    """Return all ranks' tensors as rows."""
    return hvd.allgather(tf.reshape(tf.convert_to_tensor(x), (1, -1)), name="check.rows").numpy()


def stepper(model: Any, optimizer: Any, graph: bool) -> Any:
    """Return a function that takes a step, eagerly or in a graph."""
    weights = model.trainable_variables

    def take(pull: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(half_squares(None, model(pull[None])))
        optimizer.apply(tape.gradient(loss, weights), weights)

    return tf.function(take) if graph else take


def check_real_ranks_do_what_the_oracle_does() -> None:
    """The oracle predicts all models and all decisions, eagerly and in graphs."""
    for graph in some((False, True), (True,)):
        model, oracle = network(), Oracle(hvd.size(), in_velocity=True)
        optimizer = wrapped(policy())
        take = stepper(model, optimizer, graph)
        optimizer.build(model.trainable_variables)
        for step, pull in enumerate(pulls()):
            optimizer.learning_rate.assign(rate(step))
            take(tf.constant(pull))
            due = oracle.take(step)[hvd.rank()]
            found = model.layers[0].w.numpy()
            np.testing.assert_allclose(found, due, atol=3e-5, err_msg=f"{graph} {step}")
            rows = rows_of(found)
            assert (rows == rows[0]).all() == (not oracle.averaging_models or oracle.settled), (
                graph,
                step,
            )
            if not optimizer.averaging_models:
                rows = rows_of(optimizer.variables[-1])
                assert (rows == rows[0]).all(), (graph, step, "velocities")
        judge(optimizer, oracle)


def judge(optimizer: Any, oracle: Oracle) -> None:
    history = [row for row in optimizer.exchange.policy.history if row["name"] == MODEL]
    kinds = [apart for _, apart in oracle.decisions]
    taken = [bool(row["level"]) for row in history]
    assert taken[: len(kinds)] == kinds and len(taken) <= len(kinds) + 1, "one when fit ends"
    assert oracle.came_back()
    assert optimizer.averaging.stats()["sent"] > 0


def check_fit_does_what_the_oracle_does() -> None:
    """`fit` gives the oracle's models and decisions if the callback averages nothing."""
    model, oracle = network(), Oracle(hvd.size(), in_velocity=True)
    optimizer = wrapped(policy())
    model.compile(optimizer, loss=half_squares)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: rate(30 * epoch))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, average="nothing")
    x = pulls()
    for epoch in range(2):
        part = x[30 * epoch : 30 * epoch + 30]
        model.fit(
            part, np.zeros((30, 1)), batch_size=1, epochs=epoch + 1, initial_epoch=epoch,
            shuffle=False, callbacks=[start, schedule], verbose=0,
        )  # fmt: skip
    for step in range(STEPS):
        due = oracle.take(step)[hvd.rank()]
    np.testing.assert_allclose(model.layers[0].w.numpy(), due, atol=3e-5)
    judge(optimizer, oracle)


def check_epochs_end_with_equal_models() -> None:
    """Models are equal at the end of each epoch, while gradients or models are averaged.

    If models are averaged, the callback also averages statistics. Windows are epochs.
    """
    model = network()
    optimizer = wrapped(policy(LocalSGD(PERIOD), window=None))
    model.compile(optimizer, loss=half_squares)
    apart = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            everything = tf.concat([v.value for v in self.model.weights], 0)
            rows = rows_of(everything if optimizer.averaging_models else everything[:SIZE])
            assert (rows == rows[0]).all(), epoch
            apart.append(optimizer.averaging_models)

    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Look()]
    model.fit(pulls(30), np.zeros((30, 1)), batch_size=5, epochs=6, callbacks=calls, verbose=0)
    assert any(apart) and not apart[0], apart


def check_other_methods_and_levels() -> None:
    """Models are equal at each decision, even with a method that never makes them equal itself."""
    methods = ((DPSGD("ring"), True), (DiLoCo(PERIOD), False), (WAGMA(2, PERIOD), True))
    for high, graph in some(methods, methods[:2]):
        model = network()
        optimizer = wrapped(policy(high, low=TopK(0.1)))
        take = stepper(model, optimizer, graph)
        for step, pull in enumerate(pulls(45)):
            optimizer.learning_rate = rate(step)
            take(tf.constant(pull))
            now = optimizer.exchange.policy
            rows = rows_of(model.layers[0].w)
            equal = bool((rows == rows[0]).all())
            assert equal == (not now.alternation.averaging_models or now.alternation.equal), (
                high,
                step,
            )
        levels = [row["level"] for row in now.history if row["name"] == MODEL]
        assert levels[:2] == [0, 1] and 0 in levels[2:], (high, levels)
        optimizer.averaging.close()


def check_batches_grow_beside() -> None:
    """Weights do not change within a large batch; `average_now` averages statistics too."""
    model = network()
    sizes = (2 * hvd.size(), 4 * hvd.size())
    optimizer = wrapped(policy(batch_size=sizes, low=TopK(0.1)))
    take = stepper(model, optimizer, graph=True)
    for pull in pulls(40):
        take(tf.constant(pull))
    now = optimizer.exchange.policy
    assert (
        now.large and optimizer.averaging_models and np.isclose(float(optimizer.learning_rate), LR)
    )
    before, steps = model.layers[0].w.numpy(), optimizer.averaging.steps
    take(tf.constant(pulls(1)[0]))
    assert (model.layers[0].w.numpy() == before).all() and optimizer.averaging.steps == steps
    take(tf.constant(pulls(1)[0]))
    assert (model.layers[0].w.numpy() != before).all() and optimizer.averaging.steps == steps + 1
    optimizer.average_now(model)
    rows = rows_of(tf.concat([v.value for v in model.weights], 0))
    assert (rows == rows[0]).all() and np.isclose(rows[0, -1], (hvd.size() - 1) / 2)


def check_a_budget_for_models_only() -> None:
    """With a budget too small for gradients, models are averaged from the first step on."""
    model = network()
    optimizer = wrapped(policy(LocalSGD(PERIOD), budget=0.003, threshold=0.0))
    take = stepper(model, optimizer, graph=True)
    for step, pull in enumerate(pulls(3 * PERIOD)):
        take(tf.constant(pull))
        rows = rows_of(model.layers[0].w)
        assert (rows == rows[0]).all() == (step % PERIOD == PERIOD - 1), step
    assert optimizer.exchange.steps == 0 and optimizer.averaging.steps == 3 * PERIOD


def check_resuming_equals_not_stopping() -> None:
    """A training resumes exactly if it was saved while models or gradients were averaged."""
    wanted, oracle = [], Oracle(hvd.size(), in_velocity=True)
    for step in range(44):
        wanted.append(oracle.take(step)[hvd.rank()])
    for stop in some((16, 20, 40), (20,)):
        model, optimizer = network(), wrapped(policy())
        take = stepper(model, optimizer, graph=True)
        for step, pull in enumerate(pulls(44)):
            if step == stop:
                folder = hvdtf.broadcast_object(tempfile.mkdtemp(), 0)
                hvd.save_state(folder, only=[optimizer])
                kept = [[v.numpy() for v in x] for x in (model.weights, optimizer.variables)]
                model, optimizer = network(), wrapped(policy())
                optimizer.build(model.trainable_variables)
                hvd.load_state(folder, only=[optimizer])
                for variables, values in zip(
                    (model.weights, optimizer.variables), kept, strict=True
                ):
                    for variable, value in zip(variables, values, strict=True):
                        variable.assign(value)
                take = stepper(model, optimizer, graph=True)
            optimizer.learning_rate = rate(step)
            take(tf.constant(pull))
            found = model.layers[0].w.numpy()
            np.testing.assert_allclose(found, wanted[step], atol=3e-5, err_msg=f"{stop} {step}")


def check_refusals() -> None:
    wrap, chosen = hvd.DistributedOptimizer, policy()
    ema = keras.optimizers.SGD(LR, use_ema=True)
    plain = keras.optimizers.SGD(LR)
    for action, words in (
        (lambda: wrap(ema, compression=chosen), "use_ema"),
        (lambda: wrap(plain, compression=chosen, op=hvd.Sum), "hvd.Average"),
        (lambda: wrap(plain, compression=chosen, skip=["b"]), "skip"),
        (lambda: wrap(plain, compression=policy(WAGMA(99))), "group_size"),
    ):
        raises(ValueError, words, action)
    raises(RuntimeError, "models are equal already", wrap(plain, compression=Dense()).average_now)


if __name__ == "__main__":
    harness.main(globals())
