"""Tests of the Keras 3 optimizer and callbacks on real ranks. See `harness.py`."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow.keras as stock
import keras
import numpy as np
import tensorflow as tf
from harness import raises, some

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import (
    BF16,
    DGC,
    EF21,
    FP16,
    LGC,
    QSGD,
    Accordion,
    AdaComp,
    Allgather,
    Allreduce,
    Compressor,
    Dense,
    EFSignSGD,
    Fixed,
    Gate,
    Int8,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    ScaleCom,
    SignSGD,
    SketchedSGD,
    StepSchedule,
    TernGrad,
    Threshold,
    TopK,
)
from accordion_hvd.engine.guard import ReplicasDiffer

SOLO = stock.ProcessSet([0])
SGD = keras.optimizers.SGD


def INIT() -> None:  # noqa: D103, N802
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(process_sets=[SOLO])


# ------------------------------------------------------------------------------------------- tools
def make_model(seed: int = 0) -> keras.Model:
    """Return a model of two matrices that are compressed and four small tensors."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(40, "tanh"), keras.layers.Dense(40, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((40,)), *layers])


def data(rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return data that differ between ranks but not between runs."""
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = rng.standard_normal((32, 40), np.float32)
    return x, x[:, :1] * 2 + 1 + 0.1 * rng.standard_normal((32, 1), np.float32)


def weights(model: Any) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def everywhere(values: Any) -> np.ndarray:
    """Return all ranks' values; row r is from rank r."""
    return hvd.allgather(np.asarray(values)[None]).numpy()


def barrier() -> None:
    everywhere(0.0)


def assert_equal_ranks(model: Any, what: object = "") -> None:
    rows = everywhere(weights(model))
    assert np.isfinite(rows).all(), what
    assert (rows == rows[0]).all(), (what, np.abs(rows - rows[0]).max())


def fit(
    model: Any, compression: Any, *, epochs: int = 2, callback: bool = True, eager: bool = False,
    optimizer: Any = None, callbacks: Any = (), **options: Any,
) -> Any:  # fmt: skip
    """Train for two batches per epoch, and return the optimizer."""
    opt = hvd.DistributedOptimizer(optimizer or SGD(0.05), compression=compression, **options)
    model.compile(opt, loss="mse", run_eagerly=eager)
    mine = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if callback else []
    model.fit(*data(), batch_size=16, epochs=epochs, verbose=0, shuffle=False,
              callbacks=[*mine, *callbacks])  # fmt: skip
    return model.optimizer


def in_graph(graph: bool, function: Any) -> Any:
    """Return the function, as a tf.function if `graph`."""
    return tf.function(function) if graph else function


def stepper(graph: bool, opt: Any, *variables: Any) -> Any:
    """Return a function that applies its arguments as gradients of the variables."""
    return in_graph(graph, lambda *grads: opt.apply(list(grads), list(variables)))


# --------------------------------------------------------------------------------------------- fit
def check_weights_are_equal_after_training() -> None:
    """Ranks that begin with different weights and have different data end with equal weights."""
    few = [PowerSGD(2), TopK(0.05)]
    for compression in some([*few, Dense(), RandomK(0.1), FP16(), BF16()], few):
        model = make_model(hvd.rank())
        start = weights(make_model(0))
        opt = fit(model, compression, guard_every=3)
        assert_equal_ranks(model, compression)
        assert np.abs(weights(model) - start).max() > 1e-4
        assert opt.exchange.stats()["steps"] == 4, opt.exchange.stats()


def check_sparse_methods_in_fit() -> None:
    """Ranks stay equal with data-dependent sizes, changing leaders and stages that are retraced."""
    uneven, led, staged = Threshold(0.05), ScaleCom(0.05, beta=0.3), DGC(0.01, warmup=2)
    few = [(uneven, True), (staged, True), (led, False)]
    rest = [(led, True), (uneven, False), (staged, False)]
    rest += [(c, callback) for c in (AdaComp(50), DGC(0.05)) for callback in (True, False)]
    for compression, callback in some([*few, *rest], few):
        model = make_model()
        start = weights(model)
        opt = fit(model, compression, callback=callback, guard_every=3)
        assert_equal_ranks(model, compression)
        assert np.abs(weights(model) - start).max() > 1e-4
        assert opt.exchange.stats()["steps"] == 4, opt.exchange.stats()


def check_other_methods_in_fit() -> None:
    """Ranks stay equal with the other compressors; eight of them serve one layer each.

    LGC begins with the only step of its training phase.
    """
    factors = [PowerSGD(2, alternate=True), PowerSGD(2, wire="float16")]
    layers = [QSGD(4), TernGrad(), Natural(), Int8(), EFSignSGD(), OneBit(), *factors]
    several = Fixed(Dense(), overrides={f"*layer{i}*": c for i, c in enumerate(layers)})
    few = [several, LGC(0.05, dense=0, training=1)]
    for compression in some([*few, SignSGD(0.9), SketchedSGD(0.02, columns=5)], few):
        keras.utils.set_random_seed(0)
        names = [f"layer{i}" for i in range(len(layers) if compression is several else 1)]
        hidden = [keras.layers.Dense(40, "relu", name=name) for name in names]
        model = keras.Sequential([keras.Input((40,)), *hidden, keras.layers.Dense(1)])
        start = weights(model)
        opt = fit(model, compression, optimizer=SGD(0.01), guard_every=3)
        assert_equal_ranks(model, compression)
        assert np.isfinite(weights(model)).all() and np.abs(weights(model) - start).max() > 1e-4
        assert opt.exchange.stats()["steps"] == 4, opt.exchange.stats()
        served = set(opt.exchange.levels().values())
        assert compression is not several or served >= set(map(repr, layers)), served


def check_fit_without_callback_and_stock_compression() -> None:
    for compression in (stock.Compression.none, stock.Compression.fp16):
        model = make_model()
        opt = fit(model, compression, callback=False, guard_every=2)
        assert_equal_ranks(model, compression)
        assert not model.jit_compile
    assert 1.9 < opt.exchange.stats()["ratio"] < 2.1, opt.exchange.stats()


def check_all_ways_of_running_agree() -> None:
    """Weights and bytes are equal in a graph, with eager steps, and with untraced exchanges."""
    results = []
    for callback, eager, traceable in (
        (False, False, True),
        (True, True, True),
        (True, True, False),
    ):
        model = make_model()
        start = [Untraced()] if not traceable else []
        opt = fit(model, TopK(0.05), callback=callback, eager=eager, callbacks=start)
        assert_equal_ranks(model)
        assert opt._averager._traceable == traceable
        stats = opt.exchange.stats()
        results.append((weights(model), {k: v for k, v in stats.items() if k != "seconds"}))
    for values, stats in results[1:]:
        np.testing.assert_allclose(values, results[0][0], rtol=1e-4, atol=1e-5)
        assert stats == results[0][1], results
    assert results[0][1]["payload"] > 0 and results[0][1]["steps"] == 4


class Untraced(keras.callbacks.Callback):
    """A callback with which exchanges run operation by operation instead of traced."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer._averager._traceable = False


def check_accordion_switches_in_fit() -> None:
    """Accordion decides alike in a graph, in a py_function (no callback), and eagerly.

    Only in a graph does Keras make a new train function for each choice of levels.
    """
    found = {}
    methods = {
        "graph": (None, True, False),
        "python": (2, False, False),
        "eager": (None, True, True),
    }
    for method, (window, callback, eager) in methods.items():
        accordion = Accordion(
            low=PowerSGD(4), high=TopK(0.02), threshold=0.9, interval=1, window=window
        )
        model = make_model()
        made = CountTrainFunctions()
        opt = fit(
            model, accordion, epochs=4, callback=callback, eager=eager, callbacks=[made],
            guard_every=2,
        )  # fmt: skip
        assert_equal_ranks(model, method)
        rows = opt.exchange.policy.history
        assert {r["compressor"] for r in rows} == {"PowerSGD(rank=4)", "TopK(ratio=0.02)"}, rows
        found[method] = [(r["step"], r["window"], r["level"], r["reason"]) for r in rows]
        assert opt.exchange.stats()["steps"] == 8
        assert (made.count > 1) == (method == "graph"), (method, made.count)
    assert found["graph"][: len(found["python"])] == found["python"], found
    assert found["graph"] == found["eager"], found


def check_a_residual_goes_beside_though_one_rank_has_none() -> None:
    """The next level is EF21, which takes no residual of another; rank 0 alone has gradients."""
    x, _ = data()
    alone = x * (hvd.rank() == 0)
    for eager in (False, True):
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40, use_bias=False)])
        schedule = StepSchedule({0: TopK(0.1), 1: EF21(TopK(0.1))}, window=2)
        optimizer = hvd.DistributedOptimizer(SGD(0.01), compression=schedule)
        model.compile(optimizer, "mse", run_eagerly=eager)
        model.fit(alone, np.ones_like(x), batch_size=8, verbose=0, callbacks=[broadcast])
        exchange = model.optimizer.exchange
        assert "EF21" in str(exchange.levels())
        assert exchange.bucket_states[0].carried is None, "it is sent once"
        assert_equal_ranks(model, eager)


def linear(y: Any, predicted: Any) -> Any:
    """A loss whose gradient does not depend on the weights."""
    return tf.reduce_mean(tf.reduce_sum(predicted * y, -1))


class Fails(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 3:
            raise InterruptedError


def check_the_first_change_of_levels_in_fit() -> None:
    """Also between the first executions of a train function, and after a fit that was ended."""
    x = data()[0]
    gradient = everywhere(x.T @ x / len(x)).mean(0)
    for steps, interrupted in ((1, False), (2, False), (1, True)):
        zeros = keras.layers.Dense(40, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((40,)), zeros])
        change = 4 if interrupted else 1
        schedule = StepSchedule({0: TopK(0.05), change: Dense()})
        opt = hvd.DistributedOptimizer(SGD(0.1), compression=schedule)
        model.compile(opt, loss=linear, steps_per_execution=steps)
        for callbacks in ([Fails()], []) if interrupted else ([],):
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
            try:
                model.fit(np.repeat(x, steps, 0), np.repeat(x, steps, 0), batch_size=len(x),
                          epochs=6, shuffle=False, verbose=0, callbacks=callbacks)  # fmt: skip
            except InterruptedError:
                assert interrupted
        taken = int(opt.iterations)
        assert taken == (9 if interrupted else 6 * steps), taken
        if steps == 1:  # else a batch has repeated rows of another part of x
            moved = -model.get_weights()[0] / (0.1 * taken)
            np.testing.assert_allclose(moved, gradient, rtol=1e-3, atol=1e-4)
        assert_equal_ranks(model, (steps, interrupted))


class OwnStep(keras.Model):
    """A model with a training step of its own, which is compiled without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(40, use_bias=False)
        self.last = keras.layers.Dense(40, use_bias=False)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def train_step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(batch[0]) - batch[1]))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def check_compiling_anew_without_a_loss() -> None:
    """A layer that is frozen between two fits stays as it is under a policy that switches."""
    x, model = data()[0], OwnStep()
    model(x)
    policy = StepSchedule({0: TopK(0.1), 50: Dense()})
    opt = hvd.DistributedOptimizer(SGD(0.1), compression=policy)
    for trainable in (True, False):
        model.first.trainable = trainable
        model.compile(opt)
        before = model.first.get_weights()[0]
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, x, batch_size=16, epochs=2, verbose=0, callbacks=[broadcast])
        assert (model.first.get_weights()[0] == before).all() != trainable


def check_settings_that_a_config_lacks() -> None:
    """Rates that are functions, and what is left out of weight decay."""
    for plain in (keras.optimizers.AdamW(0.1, weight_decay=0.5), hvd.Adam(0.1, weight_decay=0.5)):
        weight, bias = (keras.Variable(tf.ones((2,)), name=name) for name in ("weight", "bias"))
        plain.exclude_from_weight_decay(var_names=["bias"])
        opt = plain if hasattr(plain, "rule") else hvd.DistributedOptimizer(plain)
        opt.build([weight, bias])
        opt.apply([tf.zeros((2,))] * 2, [weight, bias])
        assert float(weight[0]) < 0.96 and float(bias[0]) == 1.0, (weight, bias)
    rates, weight = iter((0.5, 0.25)), keras.Variable(tf.zeros((2,)))
    opt = hvd.DistributedOptimizer(SGD(lambda: next(rates)))
    opt.build([weight])
    assert callable(opt._learning_rate)


def check_graphs_with_other_gradients_are_refused() -> None:
    """Sums of several passes are those of one graph: another one has other gradients."""
    a, b = (keras.Variable(tf.zeros((2,)), name=name) for name in "ab")
    opt = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    opt.build([a, b])
    tf.function(lambda g: opt.apply([g, None], [a, b]))(tf.ones((2,)))
    other = tf.function(lambda g: opt.apply([None, g], [a, b]))
    raises(ValueError, "in all graphs or in none", lambda: other(tf.ones((2,))))


def check_fitting_again_traces_nothing_anew() -> None:
    """A call of `fit` reuses the last train function unless compilation or levels changed."""
    model = make_model()
    policy = Accordion(low=PowerSGD(4), high=TopK(0.02), window=6, interval=1, threshold=0.0)
    opt = hvd.DistributedOptimizer(SGD(0.01), compression=policy)
    model.compile(opt, loss="mse", jit_compile=False)
    made, broadcast = CountTrainFunctions(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)

    def train(times: int) -> None:
        for _ in range(times):
            model.fit(*data(), batch_size=16, verbose=0, callbacks=[broadcast, made])

    train(5)  # two batches each; at threshold 0 all layers stay critical
    assert made.count == 1, made.count
    model.compile(opt, loss="mae", jit_compile=False)
    train(2)
    assert made.count == 2, made.count
    policy.threshold = math.inf  # nothing is critical: other levels from the next window on
    train(6)
    assert made.count == 3, made.count
    assert {r["compressor"] for r in policy.history[-2:]} == {"TopK(ratio=0.02)"}
    assert_equal_ranks(model)


def check_a_gate_tries_and_chooses() -> None:
    """Levels change between steps of fit; every rank ends with the same weights and verdict."""
    for callback in some((True, False), (True,)):
        model = make_model()
        gate = Gate(steps=2, every=20)
        opt = fit(model, Fixed(TopK(0.1), gate=gate), epochs=22, callback=callback)
        assert_equal_ranks(model, callback)
        assert opt.exchange.stats()["steps"] >= 40
        assert " a step" in gate.verdict, gate.verdict
        text = np.frombuffer(gate.verdict.encode().ljust(200)[:200], np.uint8)
        verdicts = everywhere(text.astype(np.float64))
        assert (verdicts == verdicts[0]).all(), gate.verdict


class CountTrainFunctions(keras.callbacks.Callback):
    """A callback that counts the train functions which Keras has used."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.train_function not in self.seen:
            self.seen.append(self.model.train_function)

    @property
    def count(self) -> int:
        return len(self.seen)


def check_several_steps_per_execution() -> None:
    accordion = Accordion(low=PowerSGD(2), high=TopK(0.05), threshold=9.0, interval=1, window=3)
    model = make_model()
    opt = hvd.DistributedOptimizer(SGD(0.05), compression=accordion)
    model.compile(opt, loss="mse", steps_per_execution=2)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*data(), batch_size=4, epochs=1, verbose=0, callbacks=[callback])
    assert_equal_ranks(model)
    assert {row["step"] for row in accordion.history} == {3, 6}, accordion.history
    assert model.optimizer.exchange.stats()["steps"] == 8


# ---------------------------------------------------------------------------------- custom loops
def check_custom_loops() -> None:
    """`apply_gradients` gives the same weights eagerly and in a tf.function, to rounding."""
    x, y = map(tf.constant, data())

    def make_step(model: Any, opt: Any) -> Any:
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        return step

    results = []
    for graph in (False, True):
        model = make_model()
        opt = hvd.DistributedOptimizer(SGD(0.05), compression=TopK(0.05), guard_every=1)
        run = in_graph(graph, make_step(model, opt))
        for _ in range(3):
            run()
        assert_equal_ranks(model)
        assert opt.exchange.stats()["steps"] == 3
        results.append(weights(model))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


def check_two_optimizers_in_one_function() -> None:
    a, b = (
        keras.Variable(tf.zeros((32, 40)), name="a"),
        keras.Variable(tf.zeros((32, 40)), name="b"),
    )
    one = hvd.DistributedOptimizer(SGD(1.0), compression=TopK(1.0))
    two = hvd.DistributedOptimizer(SGD(1.0))

    @tf.function
    def step(grad: tf.Tensor) -> None:
        for _ in range(2):
            one.apply([grad], [a])
            two.apply([grad], [b])

    step(tf.fill((32, 40), float(hvd.rank())))
    mean = (hvd.size() - 1) / 2
    np.testing.assert_allclose(a.numpy(), -2 * mean, atol=1e-5)
    np.testing.assert_allclose(b.numpy(), -2 * mean, atol=1e-5)


def check_gradients_of_several_passes_are_averaged() -> None:
    """With `average_aggregated_gradients`, weights change at the last pass only, by the average."""
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)))
        opt = hvd.DistributedOptimizer(
            SGD(1.0), compression=TopK(1.0), backward_passes_per_step=2,
            average_aggregated_gradients=True,
        )  # fmt: skip
        run = stepper(graph, opt, variable)
        run(tf.fill((40, 40), hvd.rank() + 1.0))
        assert (variable.numpy() == 0).all()
        run(tf.fill((40, 40), hvd.rank() + 2.0))
        want = -((hvd.size() - 1) / 2 + 1.5)
        np.testing.assert_allclose(variable.numpy(), want, rtol=1e-5)
        assert opt.exchange.stats()["steps"] == 1
        assert int(opt.iterations) == 2


def check_clipping_comes_after_the_average() -> None:
    variable = keras.Variable(tf.zeros((4,)))
    opt = hvd.DistributedOptimizer(SGD(1.0, clipnorm=1.0))
    grad = np.zeros(4, "f")
    grad[hvd.rank() % 4] = 100.0
    opt.apply([tf.constant(grad)], [variable])
    mean = np.mean(everywhere(grad), 0)
    np.testing.assert_allclose(variable.numpy(), -mean / np.linalg.norm(mean), rtol=1e-5)


def check_missing_and_local_gradients() -> None:
    a, b, c, d = (keras.Variable(tf.zeros((2,)), name=n) for n in "abcd")
    opt = hvd.DistributedOptimizer(SGD(1.0))
    opt.register_local_var(c)
    one = tf.ones((2,))
    opt.apply([one if hvd.rank() == 0 else None, one, one * hvd.size(), None], [a, b, c, d])
    np.testing.assert_allclose(a.numpy(), -1 / hvd.size(), rtol=1e-6)
    np.testing.assert_allclose(b.numpy(), -1, rtol=1e-6)
    np.testing.assert_allclose(c.numpy(), -1, rtol=1e-6)
    assert (d.numpy() == 0).all()


def check_layers_that_are_local() -> None:
    model = make_model(0)
    first, last = model.layers[0], model.layers[-1]
    before = [variable.numpy() for variable in last.trainable_weights]
    opt = hvd.PartialDistributedOptimizer(SGD(1.0), local_layers=last, scale_local_gradients=False)
    variables = model.trainable_variables
    opt.apply([tf.fill(v.shape, float(hvd.rank() + 1)) for v in variables], variables)
    mean = (hvd.size() + 1) / 2
    for variable, old in zip(last.trainable_weights, before, strict=True):
        np.testing.assert_allclose(old - variable.numpy(), hvd.rank() + 1, rtol=1e-5)
    np.testing.assert_allclose(first.bias.numpy(), -mean, rtol=1e-5)
    raises(ValueError, "Layer", lambda: hvd.PartialDistributedOptimizer(SGD(1.0), local_layers=[3]))
    unbuilt = keras.layers.Dense(3)
    raises(ValueError, "model.build()", lambda: hvd.PartialDistributedOptimizer(
        SGD(1.0), local_layers=unbuilt))  # fmt: skip
    variable = last.trainable_weights[0]
    for plain in (SGD(1.0, global_clipnorm=1.0), keras.optimizers.LossScaleOptimizer(SGD(1.0))):
        raises(ValueError, "register_local_var", lambda plain=plain: hvd.DistributedOptimizer(
            plain).register_local_var(variable))  # fmt: skip


def make_sparse_step(opt: Any, table: Any) -> Any:
    @tf.function
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, rows))
        opt.apply(tape.gradient(loss, [table.value]), [table])

    return step


def check_sparse_gradients() -> None:
    """Sparse gradients of an embedding are averaged, gathered or converted to dense ones."""
    for dense in (False, True):
        keras.utils.set_random_seed(0)
        table = keras.Variable(tf.zeros((50, 30)), name="table")
        opt = hvd.DistributedOptimizer(SGD(1.0), compression=TopK(1.0), sparse_as_dense=dense)

        step = make_sparse_step(opt, table)
        step(tf.constant([0, hvd.rank() + 1]))
        want = np.zeros((50, 30), "f")
        want[0] = -1
        want[1 : hvd.size() + 1] = -1 / hvd.size()
        np.testing.assert_allclose(table.numpy(), want, rtol=1e-5)


# ------------------------------------------------------------------------------------- numerics
def scaled_stepper(opt: Any, variable: Any) -> Any:
    return lambda grad: opt.apply([opt.scale_loss(grad)], [variable])


def check_loss_scaling() -> None:
    """An overflow on one rank skips the step on all ranks; residuals are in unscaled units."""
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)))
        inner = keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
        opt = hvd.DistributedOptimizer(inner, compression=TopK(0.5), guard="off")
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        run = in_graph(graph, scaled_stepper(opt, variable))
        grad = np.random.default_rng(1).standard_normal((40, 40)).astype("f")
        run(tf.constant(grad))
        first, carried = variable.numpy(), opt.exchange.bucket_states[0].state["error"].numpy()
        np.testing.assert_allclose(first.ravel() - carried, -grad.ravel(), rtol=1e-5, atol=1e-6)
        bad = np.where(hvd.rank() == 0, np.inf, 1.0) * grad
        run(tf.constant(bad.astype("f")))
        assert (variable.numpy() == first).all()
        assert float(opt.dynamic_scale) == 4.0
        assert (opt.exchange.bucket_states[0].state["error"].numpy() == carried).all()
        run(tf.constant(np.zeros((40, 40), "f")))
        assert (everywhere(variable.numpy()) == variable.numpy()).all()
        np.testing.assert_allclose(  # the scale has changed, the residual has not
            variable.numpy().ravel() - opt.exchange.bucket_states[0].state["error"].numpy(),
            -grad.ravel(), rtol=1e-5, atol=1e-6,
        )  # fmt: skip


def check_spikes_cost_a_step() -> None:
    """Means are zeros where a finite gradient of some rank is huge, but NaN after ten in a row."""
    for compression in (TopK(0.5), PowerSGD(2)):
        for graph in (False, True):
            variable = keras.Variable(tf.zeros((40, 40)))
            opt = hvd.DistributedOptimizer(SGD(1.0, clipnorm=1.0), compression=compression)
            run = in_graph(graph, stepper(graph, opt, variable))
            grad = np.random.default_rng(hvd.rank()).standard_normal((40, 40)).astype("f")
            for step in range(14):
                before, spike = variable.numpy(), step == 1 or step > 2
                run(tf.constant(grad * (1e24 if spike and hvd.rank() == 1 else 1), tf.float32))
                assert (before == variable.numpy()).all() == (spike and step < 13), step
            assert np.isfinite(before).all() and np.isnan(variable.numpy()).all()
            assert opt.exchange.skipped == 12


def check_spikes_leave_frozen_layers_alone() -> None:
    """Momentum would move a variable whose gradient is zeros instead of None."""
    for compression in (TopK(0.1), Uneven()):
        for graph in (False, True):
            spike_with_a_frozen_variable(compression, graph)


def spike_with_a_frozen_variable(compression: Any, graph: bool) -> None:
    a, b = pair = [keras.Variable(tf.zeros((40, 40)), name=name) for name in "ab"]
    opt = hvd.DistributedOptimizer(SGD(1.0, momentum=0.9), compression=compression, guard="off")
    opt.build(pair)
    both = stepper(graph, opt, *pair)
    one = in_graph(graph, lambda grad: opt.apply([grad, None], pair))
    for step in range(5):
        spike = 1e24 if step == 3 and hvd.rank() == 1 else 1.0
        random = np.random.default_rng((step, hvd.rank()))
        grad = tf.constant(random.standard_normal((40, 40)) * spike, tf.float32)
        before = [x.numpy() for x in pair]
        both(grad, grad) if step < 2 else one(grad)
        moved = [not np.array_equal(x, y.numpy()) for x, y in zip(before, pair, strict=True)]
        assert moved == [True, step < 2], (compression, graph, step)
    assert opt.exchange.skipped == 1


def check_variables_in_turn() -> None:
    """What is owed to a variable stays owed while its gradient is None, or apply() is without it.

    In some eager steps, the ranks train different variables.
    """
    few = [("none", True), ("subset", False)]
    for way, graph in some([*few, ("none", False), ("subset", True)], few):
        variables_in_turn(way, graph)


def variables_in_turn(way: str, graph: bool) -> None:
    a, b = pair = [keras.Variable(tf.zeros((40, 40)), name=name) for name in "ab"]
    opt = hvd.DistributedOptimizer(SGD(1.0), compression=TopK(0.1), guard="off")
    opt.build(pair)
    if way == "none":
        runs = [
            in_graph(graph, lambda g: opt.apply([g, None], pair)),
            in_graph(graph, lambda g: opt.apply([None, g], pair)),
        ]
    else:
        runs = [stepper(graph, opt, a), stepper(graph, opt, b)]
    both, wanted = stepper(graph, opt, *pair), [np.zeros((40, 40)), np.zeros((40, 40))]
    for step in range(12):
        mixed = way == "none" and not graph and step % 4 == 3
        for rank in range(hvd.size()):
            grad = np.random.default_rng((step, rank)).standard_normal((40, 40)).astype("f")
            trained = (step // 2 + mixed * rank) % 2
            wanted[trained] -= grad / hvd.size()
            if rank == hvd.rank():
                mine = runs[trained], tf.constant(grad)
        mine[0](mine[1])
    for _ in range(60):
        both(tf.zeros((40, 40)), tf.zeros((40, 40)))
    for variable, want in zip(pair, wanted, strict=True):
        error = np.linalg.norm(variable.numpy() - want) / np.linalg.norm(want)
        assert error < 1e-3, (way, graph, error)


def check_sums_of_passes_without_some_gradients() -> None:
    """A gradient of an earlier pass is not lost; each pass must have the same variables."""
    a, b = (keras.Variable(tf.zeros((40, 40)), name=name) for name in "ab")
    opt = hvd.DistributedOptimizer(
        SGD(1.0), compression=Dense(), backward_passes_per_step=2,
        average_aggregated_gradients=False,
    )  # fmt: skip
    grad = tf.ones((40, 40))
    opt.apply([grad, grad], [a, b])
    opt.apply([grad, None], [a, b])
    np.testing.assert_allclose(a.numpy(), -2.0)
    np.testing.assert_allclose(b.numpy(), -1.0)
    raises(ValueError, "trainable_variables is", lambda: opt.apply([grad], [b]))


def check_half_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model()
        opt = fit(model, PowerSGD(2))
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(opt).__name__ == "LossScaleOptimizer" and opt is model.optimizer
    assert opt.exchange.stats()["steps"] == 4
    assert_equal_ranks(model)
    raises(TypeError, "hang", lambda: keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(SGD(0.1))).build(model.trainable_variables))  # fmt: skip


# --------------------------------------------------------------------------------------- exchanges
@dataclass(frozen=True)
class Uneven(Compressor):
    """A compressor that gathers tensors of different lengths, which a graph cannot do."""

    def exchange(self, grad: Any, state: Any, info: Any) -> Any:
        flat = tf.reshape(grad, (-1,))
        parts = yield Allgather(flat[: 10 + info.rank], uneven=True)
        mean = yield Allreduce(grad)
        assert [int(p.shape[0]) for p in parts] == [10 + r for r in range(info.size)]
        return mean, state


@dataclass(frozen=True)
class Phased(Compressor):
    """A compressor that returns twice the average in its first two steps."""

    def variant(self, step: int) -> int:
        return int(step >= 2)

    def exchange(self, grad: Any, state: Any, info: Any) -> Any:
        phase = PHASE.setdefault("now", 0)
        mean = yield Allreduce(grad)
        return mean * (2.0 - phase), state


PHASE: dict[str, int] = {}


def check_generators_that_cannot_be_traced() -> None:
    variable = keras.Variable(tf.zeros((40, 40)))
    opt = hvd.DistributedOptimizer(SGD(1.0), compression=Uneven())
    for graph in (False, True):
        before = variable.numpy()
        stepper(graph, opt, variable)(tf.fill((40, 40), float(hvd.rank())))
        np.testing.assert_allclose(variable.numpy() - before, -(hvd.size() - 1) / 2, rtol=1e-6)
    assert opt.exchange.stats()["steps"] == 2


def check_phases_are_traced_anew() -> None:
    variable = keras.Variable(tf.zeros((40, 40)))
    opt = hvd.DistributedOptimizer(SGD(1.0), compression=Phased())
    run = tf.function(lambda grad: opt.apply([grad], [variable]))
    for step in range(4):
        PHASE["now"] = int(step >= 2)
        before = variable.numpy()
        run(tf.ones((40, 40)))
        np.testing.assert_allclose(before - variable.numpy(), 2.0 if step < 2 else 1.0)


# -------------------------------------------------------------------------------------- callbacks
class Recorder(keras.callbacks.Callback):
    """A callback that records the learning rates of all batches and the logs of all epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs or {}))


def check_learning_rate_callbacks() -> None:
    size, recorder = hvd.size(), Recorder()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.08, lambda epoch: 0.1, start_epoch=2)
    fit(make_model(), "dense", epochs=3, callbacks=[warmup, decay, recorder])
    want = [0.08 / size * ((step + 1) / 2 * (size - 1) / 2 + 1) for step in range(4)]
    np.testing.assert_allclose(recorder.rates, [*want, 0.008, 0.008], rtol=1e-5)
    np.testing.assert_allclose(recorder.rates[3], 0.08, rtol=1e-5)
    np.testing.assert_allclose(recorder.logs[-1]["lr"], 0.008, rtol=1e-5)


def check_warm_up_within_an_epoch() -> None:
    warmup, recorder = hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=0.5), Recorder()
    fit(make_model(), "dense", epochs=2, callbacks=[warmup, recorder])
    np.testing.assert_allclose(recorder.rates, 0.08, rtol=1e-5)  # one of two batches is half of one


def check_momentum_correction() -> None:
    """A change of the learning rate scales the velocity, which contains the learning rate."""
    model, opt = make_model(), SGD(0.1, momentum=0.9)
    model.compile(opt, loss="mse")
    opt.build(model.trainable_variables)
    opt.momentums[0].assign(tf.ones_like(opt.momentums[0]))
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    np.testing.assert_allclose(opt.momentums[0].numpy(), 0.5, rtol=1e-6)
    np.testing.assert_allclose(float(opt.learning_rate), 0.05, rtol=1e-6)


def check_metric_average() -> None:
    logs = {"loss": float(hvd.rank()), "accuracy": 1.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2, "accuracy": 1.0}, logs


def check_learning_rate_fall_makes_layers_critical() -> None:
    """Accordion sees the learning rates that Keras uses: layers are critical when they fall."""
    accordion = Accordion(low=PowerSGD(4), high=PowerSGD(1), interval=10)
    fall = hvd.callbacks.LearningRateScheduleCallback(0.05, lambda epoch: 0.1 ** (epoch // 2))
    fit(make_model(), accordion, epochs=3, callbacks=[fall])
    reasons = [(row["window"], row["reason"]) for row in accordion.history]
    assert (1, "learning rate fell") in reasons and (0, "learning rate fell") not in reasons, (
        reasons
    )


# ------------------------------------------------------------------------------- saving and loading
def check_save_and_load() -> None:
    """Keras loads a saved model; `hvd.load_model` also wraps its optimizer and keeps momentum."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model = make_model()
        fit(model, PowerSGD(2), optimizer=SGD(0.05, momentum=0.9))
        model.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is SGD, type(plain.optimizer).__mro__
        again = hvd.load_model(path, compression=TopK(0.1))
    assert "TopK" in repr(again.optimizer._averager.policy)
    assert isinstance(again.optimizer, SGD) and type(again.optimizer).__name__ == "SGD"
    assert (weights(again) == weights(model)).all()
    for ours, theirs in zip(again.optimizer.momentums, model.optimizer.momentums, strict=True):
        assert (ours.numpy() == theirs.numpy()).all() and np.abs(ours.numpy()).max() > 0
    again.fit(*data(), batch_size=16, verbose=0)
    assert_equal_ranks(again)
    assert again.optimizer.exchange.stats()["steps"] == 2
    rewrapped = hvd.DistributedOptimizer(plain.optimizer)  # loaded first, wrapped afterwards
    assert int(rewrapped.iterations) == int(plain.optimizer.iterations) == 4


def check_models_from_hdf5_train_on() -> None:
    """A model from an HDF5 file trains on, with a warning if its optimizer's state is lost.

    Keras 3 restores no variables of such optimizers.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.h5")
        model = make_model()
        fit(model, PowerSGD(2), optimizer=SGD(0.05, momentum=0.9))
        model.compile(model.optimizer, keras.losses.MeanSquaredError())  # "mse" is not read back
        model.save(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = hvd.load_model(path, compression=TopK(0.1))
    assert again.optimizer.built or any(".keras" in str(w.message) for w in caught)
    assert (weights(again) == weights(model)).all()
    again.fit(*data(), batch_size=16, verbose=0)
    assert_equal_ranks(again)


def check_config() -> None:
    opt = hvd.DistributedOptimizer(keras.optimizers.Adam(0.003), compression=TopK(0.1))
    config = opt.get_config()
    np.testing.assert_allclose(config["learning_rate"], 0.003)
    twin = type(opt).from_config(config)
    assert isinstance(twin, keras.optimizers.Adam) and twin._averager is not opt._averager
    np.testing.assert_allclose(float(twin.learning_rate), 0.003)
    assert type(keras.optimizers.Adam.from_config(config)) is keras.optimizers.Adam


def check_resuming_from_a_file_equals_not_stopping() -> None:
    """A resumed training has the weights and decisions of a training that does not stop.

    It loads the model's file, which Keras has written, and the files of `hvd.save_state`.
    """

    def policy() -> Accordion:
        return Accordion(low=PowerSGD(4), high=TopK(0.02), threshold=0.9, interval=1)

    def go_on(model: Any, first: int, last: int) -> None:
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(
            *data(), batch_size=16, initial_epoch=first, epochs=last, verbose=0, shuffle=False,
            callbacks=[callback],
        )  # fmt: skip

    where = bytes(hvd.broadcast(np.frombuffer(tempfile.mkdtemp().encode(), np.uint8), 0).numpy())
    folder = where.decode()
    path = os.path.join(folder, "model.keras")
    model = make_model()
    fit(model, policy(), epochs=4, optimizer=SGD(0.05, momentum=0.9))
    if hvd.rank() == 0:
        model.save(path)
    hvd.save_state(folder, only=[model.optimizer])
    go_on(model, 4, 8)

    again = hvd.load_model(path, compression=policy())
    hvd.load_state(folder, only=[again.optimizer])
    go_on(again, 4, 8)
    assert_equal_ranks(again)
    gap = np.abs(weights(again) - weights(model)).max()
    assert gap == 0 if hvd.size() == 2 else gap < 1e-5, gap
    ours, theirs = (
        [{**row, "name": row["name"].rpartition("dense")[2]} for row in history]
        for history in (m.optimizer.exchange.policy.history for m in (model, again))
    )
    assert repr(ours) == repr(theirs)
    assert again.optimizer.exchange.steps == 16


# ----------------------------------------------------------------------------- noticing, refusing
def check_guard_in_fit() -> None:
    """The callback reports replicas that differ between batches, unless the guard is off."""
    model = make_model()

    class Poke(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 0 and batch == 1:
                model.trainable_variables[0].assign(model.trainable_variables[0] * 1.5)

    raises(ReplicasDiffer, "kernel", lambda: fit(model, "dense", callbacks=[Poke()]))
    calm = make_model()
    fit(calm, "dense", callbacks=[Poke()], guard="off")


def check_refusals() -> None:
    raises(ValueError, "already", lambda: hvd.DistributedOptimizer(
        hvd.DistributedOptimizer(SGD(0.1))))  # fmt: skip
    raises(TypeError, "Keras 3 optimizer", lambda: hvd.DistributedOptimizer("sgd"))
    for name, value in (("use_ema", True), ("gradient_accumulation_steps", 2)):
        plain = SGD(0.1, **{name: value})
        raises(ValueError, f"{name} is {value}", lambda plain=plain: hvd.DistributedOptimizer(
            plain, backward_passes_per_step=2))  # fmt: skip
    raises(ValueError, "name is TopK(ratio=0.1)", lambda: hvd.DistributedOptimizer(
        SGD(0.1), TopK(0.1)))  # fmt: skip
    raises(AttributeError, "write accordion_hvd.TopK", lambda: hvd.TopK)
    variable = keras.Variable(tf.zeros((2,)))
    opt = hvd.DistributedOptimizer(SGD(0.1))
    opt.build([variable])
    compiled = tf.function(lambda grad: opt.apply([grad], [variable]), jit_compile=True)
    raises(RuntimeError, "jit_compile=False", lambda: compiled(tf.ones((2,))))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        raises(RuntimeError, "tf.distribute", lambda: hvd.DistributedOptimizer(SGD(0.1)))
        raises(RuntimeError, "tf.distribute", lambda: opt.apply([tf.ones((2,))], [variable]))


def check_stock_wrapper_refuses_ours() -> None:
    """Horovod's own wrapper fails at its first use and names the import to use instead."""
    opt = stock.DistributedOptimizer(SGD(0.1), compression=TopK(0.1))
    raises(TypeError, "import accordion_hvd.tensorflow as hvd", lambda: opt._allreduce(
        [tf.ones((2,))], [tf.Variable(tf.ones((2,)))]))  # fmt: skip


def check_names_are_complete() -> None:
    import horovod.tensorflow.keras as theirs

    imported = {"K", "keras", "tf", "is_version_greater_equal_than"}
    for name in ("", "callbacks", "elastic"):
        module, ours = (getattr(m, name) if name else m for m in (theirs, hvd))
        missing = [n for n in dir(module) if not n.startswith("_") and not hasattr(ours, n)]
        assert not set(missing) - imported, (module, missing)
        assert set(getattr(module, "__all__", ())) <= set(getattr(ours, "__all__", dir(ours)))
    for name in ("DistributedOptimizer", "load_model", "callbacks", "elastic"):
        assert getattr(hvd, name).__module__.startswith("accordion") if name[0] == "D" else True
        assert getattr(hvd, name) is not getattr(theirs, name), name


def check_elastic_state() -> None:
    if hvd.rank() == 0:  # an optimizer of one rank alone, and of no elastic state
        stray = hvd.DistributedOptimizer(SGD(0.1), process_set=SOLO, compression=DGC(0.1))
        stray.apply([tf.ones((2,))], [keras.Variable(tf.zeros((2,)))])
    model = make_model(hvd.rank())
    opt = hvd.DistributedOptimizer(SGD(0.1, momentum=0.9))
    model.compile(opt, loss="mse")
    model.fit(*data(), batch_size=16, verbose=0)
    state = hvd.elastic.KerasState(model, batch=hvd.rank(), epoch=3)
    state.sync()
    assert_equal_ranks(model)
    assert state.batch == 0 and state.epoch == 3
    kept = weights(model)
    model.trainable_variables[0].assign(model.trainable_variables[0] * 2.0)
    state.restore()
    assert (weights(model) == kept).all()
    commits = hvd.elastic.CommitStateCallback(state)
    batches = hvd.elastic.UpdateBatchStateCallback(state)
    epochs = hvd.elastic.UpdateEpochStateCallback(state)
    model.fit(*data(), batch_size=16, verbose=0, callbacks=[commits, batches, epochs])
    assert state.epoch == 4 and state.batch == 0


if __name__ == "__main__":
    from harness import main

    main(globals())
