"""Tests of the optimizers of `accordion_hvd.tensorflow.keras` on real ranks."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decay_oracle
import harness
import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
from harness import held, some
from keras_checks import assert_equal_ranks, everywhere, in_graph, raises, weights

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import Accordion, optimizers, simulate
from accordion_hvd.tensorflow.keras.optimizers import MARK

INIT = hvd.init
NAMES = optimizers.NATIVE
EARLY: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"warmup_steps": 3},
    "Birder": {"beta": 0.9, "beta_b": 0.99, "bits": 2, "feedback": True},
    "CDAdam": {"bits": 2, "replica_lr": 0.1, "preconditioned": True},
    "SketchedAMSGrad": {"warmup_steps": 3, "ratio": 0.02},
    "OnebitLamb": {"warmup_steps": 3},
    "ZeroOneAdam": {"var_freeze_step": 3},
}
"""Settings with which stages change within a few steps, or that small batches want."""
STAGED = "OnebitAdam", "ZeroOneAdam"
"""Rules whose graphs are traced anew when their stage changes."""


def made(name: str, **options: Any) -> Any:
    return getattr(hvd, name)(**{"learning_rate": 1e-2} | EARLY.get(name, {}) | options)


def network(seed: int = 0, dtype: str | None = None) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(48, activation="relu", dtype=dtype) for _ in range(2)]
    return keras.Sequential([keras.Input((48,)), *layers, keras.layers.Dense(1, dtype="float32")])


def data(rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = rng.standard_normal((64, 48), np.float32)
    return x, np.maximum(x[:, :1], 0.2) * 2 + 1


def fit(model: Any, epochs: int = 2, callback: bool = True) -> list[float]:
    """Train for four batches per epoch, and return the losses."""
    mine = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if callback else []
    options: dict[str, Any] = {"batch_size": 16, "verbose": 0, "shuffle": False}
    return model.fit(*data(), epochs=epochs, callbacks=mine, **options).history["loss"]


def check_weights_are_equal_after_fit() -> None:
    """Ranks have equal weights after `fit`, traced or eager, and losses fall.

    One optimizer is also traced without the callback, which makes new graphs.
    """
    for name in some(NAMES, STAGED[:1]):
        methods = ((True, False), (False, False), (True, True))
        for callback, eager in methods if name == "OnebitAdam" else methods[:1]:
            model = network()
            model.compile(made(name), loss="mse", run_eagerly=eager)
            losses = fit(model, 4, callback)
            assert_equal_ranks(model, (name, callback, eager))
            assert losses[-1] < losses[0], (name, losses)
            served = set(model.optimizer.exchange.levels().values())
            assert repr(model.optimizer.rule) in served, served


def check_steps_follow_the_simulation() -> None:
    """In fp64, real ranks take the same steps as ranks that are simulated in one process."""
    start = np.random.default_rng(0).normal(size=(40, 30))
    for name in NAMES:
        rule = getattr(optimizers, name)(**EARLY.get(name, {}))
        for graph in some((False, True), (name in STAGED,)):
            variable, optimizer = tf.Variable(start, name="w"), made(name)
            world, twin = simulate(rule, hvd.size()), start.copy()
            step = in_graph(graph, lambda g, o=optimizer, v=variable: o.apply([g], [v]))
            for number in range(6):
                rng = np.random.default_rng(number)
                gradients = rng.normal(size=(hvd.size(), *start.shape))
                step(tf.constant(gradients[hvd.rank()]))
                named = optimizer.exchange.tensors[0].name
                known = [{named: twin.copy()}] * hvd.size()
                found = world.step([{named: g} for g in gradients], lr=1e-2, weights=known)[0]
                twin = found[named] if rule.returns_weights else twin - 1e-2 * found[named]
            apart = np.abs(variable.numpy() - twin).max()
            assert apart < 1e-7, (name, graph, apart)  # Keras' learning rate is fp32


def check_adam_is_keras_on_the_mean() -> None:
    start = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    for options, kind in (
        ({"weight_decay": 0.1}, keras.optimizers.AdamW),
        ({"beta_1": 0.8}, keras.optimizers.Adam),
    ):
        options |= {"epsilon": 1e-12}  # which Keras adds before the bias correction
        ours, theirs = made("Adam", **options), kind(1e-2, **options)
        one, two = tf.Variable(start), tf.Variable(start)
        for number in range(5):
            gradients = np.random.default_rng(number).normal(size=(hvd.size(), *start.shape))
            gradients = gradients.astype(np.float32)
            ours.apply([tf.constant(gradients[hvd.rank()])], [one])
            theirs.apply([tf.constant(gradients.mean(0))], [two])
        np.testing.assert_allclose(one.numpy(), two.numpy(), atol=2e-5)


def check_weight_decay_is_decoupled() -> None:
    """Weight decay is decoupled for all rules, as in all optimizers of Keras.

    For rules whose paper decouples it, this is also the default in PyTorch.
    """
    for name in NAMES:
        variables = {k: tf.Variable(x, name=k) for k, x in decay_oracle.start().items()}
        optimizer = getattr(hvd, name)(
            learning_rate=decay_oracle.LR, weight_decay=decay_oracle.DECAY,
            **decay_oracle.DENSE.get(name, {}),
        )  # fmt: skip
        for step in range(decay_oracle.STEPS):
            given = [decay_oracle.gradients(key, step, hvd.size()) for key in variables]
            mine = [tf.constant(gradients[hvd.rank()]) for gradients in given]
            optimizer.apply(mine, list(variables.values()))
        for key, wanted in decay_oracle.end(name, hvd.size(), decoupled=True).items():
            apart = np.abs(variables[key].numpy() - wanted).max()
            assert apart < 1e-10, (name, key, apart)


def check_decoupled_decay_is_no_part_of_messages() -> None:
    """In compressed stages, decoupled decay changes the weights, but not the messages.

    PyTorch's check has the same oracle.
    """
    for name, settings in decay_oracle.COMPRESSED.items():
        variables = {k: tf.Variable(x, name=k) for k, x in decay_oracle.start().items()}
        optimizer = getattr(hvd, name)(
            learning_rate=decay_oracle.LR, weight_decay=decay_oracle.DECAY, **settings
        )
        for step in range(decay_oracle.STEPS):
            given = [decay_oracle.gradients(key, step, hvd.size()) for key in variables]
            mine = [tf.constant(gradients[hvd.rank()]) for gradients in given]
            optimizer.apply(mine, list(variables.values()))
        assert repr(optimizer.rule) in optimizer.exchange.levels().values(), name
        end = decay_oracle.compressed_end(name, optimizer.exchange, hvd.size())
        for key, wanted in end.items():
            apart = np.abs(variables[key].numpy() - wanted).max()
            assert apart < 1e-9, (name, key, apart)


def check_default_arguments_train() -> None:
    for name in some(NAMES, NAMES[2::5]):
        model = network()
        model.compile(getattr(hvd, name)(), loss="mse")
        losses = fit(model, 6)
        assert_equal_ranks(model, name)
        assert losses[-1] < 0.98 * losses[0], (name, losses)


def check_what_is_excluded_from_decay() -> None:
    """Rules that apply decay themselves leave an excluded variable without decay."""
    start = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    names = ("OnebitLamb", "OnebitAdam", "ZeroOneAdam")
    for name in some(names, names[:1]):
        ends = {}
        for decay in (0.0, 0.5):
            kernel, spared = tf.Variable(start, name="kernel"), tf.Variable(start, name="spared")
            optimizer = made(name, weight_decay=decay)
            optimizer.exclude_from_weight_decay(var_names=["spared"])
            for number in range(5):
                rng = np.random.default_rng([number, hvd.rank()])
                gradients = [tf.constant(rng.normal(size=start.shape), tf.float32) for _ in "ab"]
                optimizer.apply(gradients, [kernel, spared])
            ends[decay] = kernel.numpy(), spared.numpy()
        np.testing.assert_array_equal(ends[0.0][1], ends[0.5][1], name)
        assert np.abs(ends[0.0][0] - ends[0.5][0]).max() > 1e-3, name


def check_settings_of_keras() -> None:
    """Schedules, clipping of local gradients, accumulation and averages of weights work."""
    falling = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)
    for name in some(("OnebitAdam", "CDAdam"), ("CDAdam",)):
        model = network()
        options: dict[str, Any] = {"learning_rate": falling, "clipnorm": 0.5}
        model.compile(made(name, **options, gradient_accumulation_steps=2), loss="mse")
        fit(model, 4)
        assert_equal_ranks(model, name)
        assert model.optimizer.exchange.steps == 8
    small, large = tf.Variable(np.zeros((40, 30))), tf.Variable(np.zeros((40, 30)))
    gradient = np.random.default_rng(1).normal(size=(40, 30))
    for variable, factor in ((small, 1.0), (large, 1000.0)):
        optimizer = made("CDAdam", clipnorm=1e-3, epsilon=1e-3)
        optimizer.apply([tf.constant(gradient * factor)], [variable])
    np.testing.assert_allclose(small.numpy(), large.numpy(), rtol=1e-5)


def check_steps_that_are_not_finite_count_nowhere() -> None:
    for name in NAMES:
        for graph in some((False, True), (name in STAGED,)):
            start = np.random.default_rng(0).normal(size=(40, 30))
            variable, optimizer = tf.Variable(start), made(name, weight_decay=0.1)
            step = in_graph(graph, lambda g, o=optimizer, v=variable: o.apply([g], [v]))
            for number in range(6):
                gradient = np.random.default_rng(number + hvd.rank()).normal(size=start.shape)
                before = variable.numpy()
                if number in (2, 4) and hvd.rank() == 0:
                    gradient[3, 3] = np.inf if number == 4 else 1e20
                step(tf.constant(gradient))
                assert (number in (2, 4)) == np.array_equal(before, variable.numpy()), (name, graph)
            rows = everywhere(variable.numpy())
            assert (rows == rows[0]).all() and np.isfinite(rows).all()
            assert optimizer.exchange.skipped == 2


def check_mixed_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for name in some(("OnebitAdam", "Birder"), ("Birder",)):
            model = network()
            model.compile(made(name), loss="mse")
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            fit(model, 3)
            assert_equal_ranks(model, name)
        resume("OnebitAdam")
    finally:
        keras.config.set_dtype_policy("float32")


def check_accordion_moves_between_stages() -> None:
    for name in some(("OnebitAdam", "CDAdam"), ("OnebitAdam",)):
        model = network()
        model.compile(made(name, policy=Accordion(interval=1)), loss="mse")
        fit(model, 4)
        assert_equal_ranks(model, name)
        assert len(model.optimizer.exchange.policy.history) > 2


def check_each_rank_resumes_from_its_own() -> None:
    for name in some(
        ("ZeroOneAdam", "Birder", "OnebitAdam", "SketchedAMSGrad", "CDAdam"), STAGED[1:]
    ):
        resume(name)


def resume(name: str) -> None:
    """Assert that a model which each rank saves and loads trains on as if never stopped."""
    folder = Path(tempfile.mkdtemp())
    model = network()
    model.compile(made(name), loss="mse")
    fit(model, 2)
    model.save(folder / "model.keras")
    fit(model, 2)
    again = keras.models.load_model(folder / "model.keras")
    fit(again, 2)
    np.testing.assert_array_equal(weights(model), weights(again), err_msg=name)
    assert_equal_ranks(again, name)
    shutil.rmtree(folder)


def check_a_refused_state_changes_nothing() -> None:
    for name in some(STAGED, STAGED[:1]):
        model = network()
        model.compile(made(name), loss="mse")
        fit(model, 2)
        late, saved = model.optimizer, {}
        late.save_own_variables(saved)
        steps = late.exchange.steps
        fit(model, 1)
        before = held(late.exchange, np.asarray), [x.numpy().tolist() for x in late.variables]
        for label, wrong in wrong_stores(saved):
            raises(ValueError, "", lambda o=late, w=wrong: o.load_own_variables(w))
            now = held(late.exchange, np.asarray), [x.numpy().tolist() for x in late.variables]
            assert now == before, (name, label)
        late.load_own_variables(saved)
        assert late.exchange.steps == steps


def wrong_stores(saved: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variables of a saved model, each time with one fault in the exchange's state."""
    about = json.loads(np.asarray(saved[MARK]).tobytes())
    for key in about:
        text = json.dumps({k: x for k, x in about.items() if k != key}).encode()
        yield f"without {key}", {**saved, MARK: np.frombuffer(text, np.uint8)}
    for text in (b"[" * 100_000, b"{", b"[]"):
        yield f"{text[:9]!r}", {**saved, MARK: np.frombuffer(text, np.uint8)}
    for key in [key for key in saved if key.startswith(MARK) and key != MARK]:
        x = np.asarray(saved[key])
        yield f"{key}, longer", {**saved, key: np.append(x, x[:1])}
        yield f"{key}, int8", {**saved, key: x.astype(np.int8)}
        if ":state:" in key:
            yield f"{key}, missing", {k: y for k, y in saved.items() if k != key}


def check_one_ranks_model_serves_all() -> None:
    folder = stock.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "", 0)
    for name in some(("OnebitAdam", "Birder", "CDAdam"), ("CDAdam",)):
        model = network()
        model.compile(made(name), loss="mse")
        fit(model, 2)
        if hvd.rank() == 0:
            model.save(Path(folder) / f"{name}.keras")
        everywhere(0.0)
        again = keras.models.load_model(Path(folder) / f"{name}.keras")
        fit(again, 2)
        assert_equal_ranks(again, name)
    everywhere(0.0)
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def check_a_fixed_loss_scale() -> None:
    """Keras divides by the factor what an update rule has computed from scaled gradients."""
    for name in some(("Adam", "OnebitAdam", "Lamb", "CDAdam"), ("Adam", "Lamb")):
        found = []
        for scale in (None, 1024.0):
            weight = keras.Variable(tf.ones((2,)))
            opt = made(name, learning_rate=0.01, loss_scale_factor=scale)
            opt.build([weight])
            for _ in range(3):
                opt.apply([tf.constant([1.0, -1.0]) * (scale or 1.0)], [weight])
            found.append(weight.numpy())
        np.testing.assert_allclose(*found, rtol=1e-5)


def check_refusals() -> None:
    raises(ValueError, "use_ema is True", lambda: made(
        "Adam", gradient_accumulation_steps=2, use_ema=True))  # fmt: skip
    raises(ValueError, "warmup_steps is -1", lambda: hvd.OnebitAdam(warmup_steps=-1))
    raises(ValueError, "gradient_accumulation_steps is 0.5", lambda: made(
        "Adam", gradient_accumulation_steps=0.5))  # fmt: skip
    raises(ValueError, "betas is (0.9, 1.5)", lambda: made("Adam", beta_2=1.5))
    raises(ValueError, "only one stage", lambda: made("Adam", policy=Accordion()))
    raises(ValueError, "Birder is an optimizer", lambda: hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=optimizers.Birder()))  # fmt: skip
    raises(ValueError, "already distributed", lambda: hvd.DistributedOptimizer(made("Adam")))


if __name__ == "__main__":
    harness.main(globals())
