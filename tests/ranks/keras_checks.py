"""The Keras 3 optimizer and callbacks, on real ranks. See `harness.py`."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import horovod.tensorflow.keras as stock
import keras
import numpy as np
import tensorflow as tf
from harness import raises

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import (
    BF16,
    DGC,
    FP16,
    LGC,
    QSGD,
    Accordion,
    AdaComp,
    AdaQS,
    Allgather,
    Allreduce,
    Compressor,
    Dense,
    EFSignSGD,
    Fixed,
    Gate,
    Int8,
    LocalSGD,
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
    TwoLevel,
)
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.engine import halves
from accordion_hvd.engine.guard import ReplicasDiffer
from accordion_hvd.simulation.one_process import simulate
from accordion_hvd.tensorflow import allreduce

SOLO = stock.ProcessSet([0])
SGD = keras.optimizers.SGD


def INIT() -> None:  # noqa: D103, N802
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(process_sets=[SOLO])


# ------------------------------------------------------------------------------------------- tools
def make_model(seed: int = 0) -> keras.Model:
    """Two matrices that are compressed, four small tensors."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(40, "tanh"), keras.layers.Dense(40, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((32,)), *layers])


def data(rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Different on each rank; the same in each run."""
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = rng.standard_normal((32, 32), np.float32)
    return x, x[:, :1] * 2 + 1 + 0.1 * rng.standard_normal((32, 1), np.float32)


def weights(model: Any) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def everywhere(values: Any) -> np.ndarray:
    """Row r is rank r's."""
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
    """Two batches an epoch; returns the optimizer."""
    opt = hvd.DistributedOptimizer(optimizer or SGD(0.05), compression=compression, **options)
    model.compile(opt, loss="mse", run_eagerly=eager)
    mine = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if callback else []
    model.fit(*data(), batch_size=16, epochs=epochs, verbose=0, shuffle=False,
              callbacks=[*mine, *callbacks])  # fmt: skip
    return model.optimizer


def local_gradients(model: Any, rank: int | None = None) -> list[np.ndarray]:
    x, y = data(rank)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


def mean_gradients(model: Any) -> list[np.ndarray]:
    """By arithmetic on this rank alone."""
    rows = [local_gradients(model, rank) for rank in range(hvd.size())]
    return [np.mean(same, axis=0) for same in zip(*rows, strict=True)]


def in_graph(graph: bool, function: Any) -> Any:
    """The function, traced or not."""
    return tf.function(function) if graph else function


def stepper(graph: bool, opt: Any, *variables: Any) -> Any:
    """Applies the gradients it is given."""
    return in_graph(graph, lambda *grads: opt.apply(list(grads), list(variables)))


# --------------------------------------------------------------------------------------------- fit
def check_dense_is_the_average() -> None:
    model = make_model()
    before, means = [v.numpy() for v in model.trainable_variables], mean_gradients(model)
    plain = [allreduce(tf.constant(g)).numpy() for g in local_gradients(model)]
    opt = hvd.DistributedOptimizer(SGD(0.5))
    opt.apply([tf.constant(g) for g in local_gradients(model)], model.trainable_variables)
    for old, mean, same, new in zip(before, means, plain, model.trainable_variables, strict=True):
        np.testing.assert_allclose(new.numpy(), old - 0.5 * mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new.numpy(), old - 0.5 * same, rtol=1e-5, atol=1e-6)


def check_fit_in_a_graph() -> None:
    """Different initial weights and data on each rank; the callback broadcasts."""
    for compression in (Dense(), PowerSGD(2), TopK(0.05), RandomK(0.1), FP16(), BF16()):
        model = make_model(hvd.rank())
        start = weights(make_model(0))
        opt = fit(model, compression, guard_every=3)
        assert_equal_ranks(model, compression)
        assert np.abs(weights(model) - start).max() > 1e-4
        assert opt.exchange.stats()["steps"] == 4, opt.exchange.stats()


def check_halves_that_the_engine_adds() -> None:
    """As on slow links."""
    limit, halves.SLOW = halves.SLOW, math.inf
    try:
        exact, rounded = make_model(), make_model()
        fit(exact, Dense())
        opt = fit(rounded, FP16())
    finally:
        halves.SLOW = limit
    assert opt.exchange.communicator.half_allreduce
    assert_equal_ranks(rounded)
    np.testing.assert_allclose(weights(rounded), weights(exact), atol=2e-3)


def check_sparse_methods_in_fit() -> None:
    """Sizes that are values, a leader that changes, stages that are traced anew."""
    for compression in (
        Threshold(0.05),
        AdaComp(50),
        ScaleCom(0.05, beta=0.3),
        DGC(0.05),
        DGC(0.01, warmup=2),
    ):
        for callback in (True, False):
            model = make_model()
            start = weights(model)
            opt = fit(model, compression, callback=callback, guard_every=3)
            assert_equal_ranks(model, compression)
            assert np.abs(weights(model) - start).max() > 1e-4
            assert opt.exchange.stats()["steps"] == 4, opt.exchange.stats()


def check_other_methods_in_fit() -> None:
    """One layer each for what may stand side by side; LGC from its training's last step on."""
    layers = [QSGD(4), TernGrad(), Natural(), Int8(), EFSignSGD(), OneBit()]
    several = Fixed(Dense(), overrides={f"*layer{i}*": c for i, c in enumerate(layers)})
    codes = LGC(0.05, dense=0, training=1)
    for compression in (several, SignSGD(0.9), SketchedSGD(0.02, columns=5), codes):
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(40, "relu", name=f"layer{i}") for i in range(len(layers))]
        model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(1)])
        start = weights(model)
        opt = fit(model, compression, optimizer=SGD(0.01), guard_every=3)
        assert_equal_ranks(model, compression)
        assert np.isfinite(weights(model)).all() and np.abs(weights(model) - start).max() > 1e-4
        assert opt.exchange.stats()["steps"] == 4, opt.exchange.stats()
        served = set(opt.exchange.levels().values())
        assert compression is not several or served >= set(map(repr, layers)), served


def check_updates_contain_the_momentum() -> None:
    """DGC that leaves nothing out, around plain SGD, is SGD with momentum; alone too."""
    for options in ({}, {"process_set": SOLO}):
        results = []
        for compression, momentum in ((DGC(1.0, momentum=0.9), 0.0), (Dense(), 0.9)):
            model = make_model()  # on all ranks: Keras counts them to name them
            if options and hvd.rank() != 0:
                continue
            fit(model, compression, callback=False, optimizer=SGD(0.05, momentum), **options)
            results.append(weights(model))
        if results:
            np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
    barrier()


def check_fit_without_callback_and_stock_compression() -> None:
    for compression in (stock.Compression.none, stock.Compression.fp16):
        model = make_model()
        opt = fit(model, compression, callback=False, guard_every=2)
        assert_equal_ranks(model, compression)
        assert not model.jit_compile
    assert 1.9 < opt.exchange.stats()["ratio"] < 2.1, opt.exchange.stats()


def check_all_ways_of_running_agree() -> None:
    """Weights and bytes: in the train graph, with eager steps, and operation by operation."""
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
    """Has exchanges run operation by operation."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer._averager._traceable = False


def check_accordion_switches_in_fit() -> None:
    """The train function is made anew; py_function (no callback) and eager runs decide alike."""
    found = {}
    ways = {"graph": (None, True, False), "python": (2, False, False), "eager": (None, True, True)}
    for way, (window, callback, eager) in ways.items():
        accordion = Accordion(
            low=PowerSGD(4), high=TopK(0.02), threshold=0.9, interval=1, window=window
        )
        model = make_model()
        made = CountTrainFunctions()
        opt = fit(
            model, accordion, epochs=4, callback=callback, eager=eager, callbacks=[made],
            guard_every=2,
        )  # fmt: skip
        assert_equal_ranks(model, way)
        rows = opt.exchange.policy.history
        assert {r["compressor"] for r in rows} == {"PowerSGD(rank=4)", "TopK(ratio=0.02)"}, rows
        found[way] = [(r["step"], r["window"], r["level"], r["reason"]) for r in rows]
        assert opt.exchange.stats()["steps"] == 8
        assert (made.count > 1) == (way == "graph"), (way, made.count)
    assert found["graph"][: len(found["python"])] == found["python"], found
    assert found["graph"] == found["eager"], found


def check_fitting_again_traces_nothing_anew() -> None:
    """Each call of fit goes on with the train function of the last, unless something changed."""
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
    for callback in (True, False):
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
    """How many train functions have been used."""

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


def check_decisions_equal_simulation() -> None:
    """One stream of gradients: eager, in a graph, and NumPy alone."""
    shape, steps = (32, 40), 12
    streams = [
        [np.random.default_rng((r, t)).standard_normal(shape).astype("f") * (1 + t // 6 * 3)
         for t in range(steps)]
        for r in range(hvd.size())
    ]  # fmt: skip

    def policy() -> Accordion:
        return Accordion(low=PowerSGD(2), high=TopK(0.05), window=3, interval=1)

    world = simulate(policy(), hvd.size())
    truth = [
        world.step([{"w": s[t].copy()} for s in streams], lr=0.1)[0]["w"] for t in range(steps)
    ]
    want = [decision(r) for r in world.exchanges[0].policy.history]
    for graph in (False, True):
        variable = keras.Variable(np.zeros(shape, "f"), name="w")
        opt = hvd.DistributedOptimizer(SGD(0.1), compression=policy(), guard="off")
        run = stepper(graph, opt, variable)
        means = []
        for t in range(steps):
            before = variable.numpy()
            run(tf.constant(streams[hvd.rank()][t]))
            means.append((before - variable.numpy()) / 0.1)
        got = [decision(r) for r in opt.exchange.policy.history]
        assert len(got) == 3 and len({row[2] for row in got}) == 2, got
        for mine, theirs in zip(got, want, strict=True):
            assert mine[:4] == theirs[:4], (graph, got, want)
            np.testing.assert_allclose(mine[4], theirs[4], rtol=1e-5)
        np.testing.assert_allclose(means[-1], truth[-1], rtol=1e-2, atol=1e-2)


def check_two_levels_equal_simulation() -> None:
    """Two machines by name; eager, in a graph, within fit."""
    shape, steps, local_size = (32, 40), 4, max(1, hvd.size() // 2)
    streams = [
        [np.random.default_rng((r, t)).standard_normal(shape).astype("f") for t in range(steps)]
        for r in range(hvd.size())
    ]
    level = TwoLevel(PowerSGD(2))
    world = simulate(level, hvd.size(), local_size=local_size)
    truth = [world.step([{"w": s[t].copy()} for s in streams])[0]["w"] for t in range(steps)]
    with harness.machines_of(local_size, barrier):
        for graph in (False, True):
            variable = keras.Variable(np.zeros(shape, "f"), name="w")
            opt = hvd.DistributedOptimizer(SGD(1.0), compression=level, guard="off")
            run = stepper(graph, opt, variable)
            for t in range(steps):
                before = variable.numpy()
                run(tf.constant(streams[hvd.rank()][t]))
                np.testing.assert_allclose(before - variable.numpy(), truth[t], atol=1e-3)
            ours, theirs = opt.exchange.stats(), world.exchanges[0].stats()
            for key in ("payload", "sent", "between"):
                assert np.isclose(ours[key], theirs[key]), (key, ours, theirs)
        model = make_model(hvd.rank())
        pair = {"low": TwoLevel(PowerSGD(4)), "high": TwoLevel(TopK(0.1))}
        opt = fit(model, Accordion(**pair, interval=1, threshold=0.9), epochs=4)
        assert_equal_ranks(model)
        assert {row["level"] for row in opt.exchange.policy.history} == {0, 1}


def decision(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["step"], row["window"], row["level"], row["reason"], row["norm"]


def check_what_is_owed_is_paid_once() -> None:
    """TopK hands its error to Dense, which sends it in its first step and no other."""
    shape = (32, 40)
    rng = np.random.default_rng(5)
    grads = [rng.standard_normal((hvd.size(), *shape)).astype("f") for _ in range(6)]
    accordion = Accordion(low=TopK(0.05), high=Dense(), window=2, interval=1, threshold=9.0)
    variable = keras.Variable(np.zeros(shape, "f"), name="w")
    opt = hvd.DistributedOptimizer(SGD(1.0), compression=accordion, guard="off")
    seen = []
    for grad in grads:
        before = variable.numpy()
        opt.apply([tf.constant(grad[hvd.rank()])], [variable])
        seen.append(before - variable.numpy())
    levels = [row["level"] for row in accordion.history]
    assert levels == [0, 1], accordion.history
    means = [grad.mean(0) for grad in grads]
    np.testing.assert_allclose(sum(seen[:5]), sum(means[:5]), atol=1e-4)
    assert np.abs(seen[4] - means[4]).max() > 1e-2  # the debt
    np.testing.assert_allclose(seen[5], means[5], atol=1e-5)


# ---------------------------------------------------------------------------------- custom loops
def check_custom_loops() -> None:
    """apply_gradients, eagerly and in a tf.function."""
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


def check_sum() -> None:
    variable = keras.Variable(tf.zeros((3,)))
    opt = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, gradient_predivide_factor=1.0)
    opt.apply([tf.fill((3,), hvd.rank() + 1.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), -sum(range(1, hvd.size() + 1)))


def check_backward_passes_per_step() -> None:
    for graph in (False, True):
        for average in (False, True):
            variable = keras.Variable(tf.zeros((40, 40)))
            opt = hvd.DistributedOptimizer(
                SGD(1.0), compression=TopK(1.0), backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )  # fmt: skip
            run = stepper(graph, opt, variable)
            mean, factor = (hvd.size() - 1) / 2, 0.5 if average else 1.0
            run(tf.fill((40, 40), hvd.rank() + 1.0))
            assert (variable.numpy() == 0).all()
            run(tf.fill((40, 40), hvd.rank() + 2.0))
            want = -(2 * mean + 3) * factor
            np.testing.assert_allclose(variable.numpy(), want, rtol=1e-5)
            run(tf.fill((40, 40), hvd.rank() + 5.0))
            np.testing.assert_allclose(variable.numpy(), want, rtol=1e-5)
            run(tf.fill((40, 40), hvd.rank() + 5.0))
            want -= (2 * mean + 10) * factor
            np.testing.assert_allclose(variable.numpy(), want, rtol=1e-5)
            assert opt.exchange.stats()["steps"] == 2
            assert int(opt.iterations) == 4


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


def make_sparse_step(opt: Any, table: Any) -> Any:
    @tf.function
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, rows))
        opt.apply(tape.gradient(loss, [table.value]), [table])

    return step


def check_sparse_gradients() -> None:
    """Embeddings: gathered, or dense if wanted."""
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
def averaging(averager: Any, variable: Any) -> Any:
    return lambda grad: averager.average([grad], [variable], lambda: 0.0)[0]


def check_a_bad_gradient_on_one_rank() -> None:
    """NaN on every rank; errors keep what they were, to the bit."""
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)))
        opt = hvd.DistributedOptimizer(SGD(0.0), compression=TopK(0.1), guard="off")
        averager = opt._averager
        opt.build([variable])
        run = in_graph(graph, averaging(averager, variable))
        rng = np.random.default_rng(hvd.rank())
        grad = rng.standard_normal((40, 40)).astype("f")
        assert np.isfinite(run(tf.constant(grad)).numpy()).all()
        before = averager.exchange.slots[0].state["error"].numpy()
        assert np.abs(before).max() > 0
        bad = grad.copy()
        if hvd.rank() == hvd.size() - 1:
            bad[3, 4] = np.inf
        assert np.isnan(run(tf.constant(bad)).numpy()).all()
        assert (averager.exchange.slots[0].state["error"].numpy() == before).all()
        assert np.isfinite(run(tf.constant(grad)).numpy()).all()
        assert averager.exchange.stats()["steps"] == 3


def scaled_stepper(opt: Any, variable: Any) -> Any:
    return lambda grad: opt.apply([opt.scale_loss(grad)], [variable])


def check_loss_scaling() -> None:
    """An overflow on one rank skips the step on all; errors are in unscaled units."""
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)))
        inner = keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
        opt = hvd.DistributedOptimizer(inner, compression=TopK(0.5), guard="off")
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        run = in_graph(graph, scaled_stepper(opt, variable))
        grad = np.random.default_rng(1).standard_normal((40, 40)).astype("f")
        run(tf.constant(grad))
        first, owed = variable.numpy(), opt.exchange.slots[0].state["error"].numpy()
        np.testing.assert_allclose(first.ravel() - owed, -grad.ravel(), rtol=1e-5, atol=1e-6)
        bad = np.where(hvd.rank() == 0, np.inf, 1.0) * grad
        run(tf.constant(bad.astype("f")))
        assert (variable.numpy() == first).all()
        assert float(opt.dynamic_scale) == 4.0
        assert (opt.exchange.slots[0].state["error"].numpy() == owed).all()
        run(tf.constant(np.zeros((40, 40), "f")))
        assert (everywhere(variable.numpy()) == variable.numpy()).all()
        np.testing.assert_allclose(  # the scale has changed, what is owed has not
            variable.numpy().ravel() - opt.exchange.slots[0].state["error"].numpy(),
            -grad.ravel(), rtol=1e-5, atol=1e-6,
        )  # fmt: skip


def check_mixed_float16() -> None:
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


def check_alone_is_plain_training() -> None:
    """A process set of one rank (and ranks outside of it) exchanges nothing."""
    results = []
    for distributed in (False, True):
        model = make_model()
        opt: Any = SGD(0.05, momentum=0.9)
        if distributed:
            opt = hvd.DistributedOptimizer(opt, compression=TopK(0.01), process_set=SOLO)
        model.compile(opt, loss="mse", jit_compile=False)
        model.fit(*data(), batch_size=16, epochs=2, verbose=0, shuffle=False)
        results.append(weights(model))
    assert (results[0] == results[1]).all()
    assert opt.exchange.stats()["sent"] == 0


# ----------------------------------------------------------------------------------- conversations
@dataclass(frozen=True)
class Uneven(Compressor):
    """Gathers tensors of different lengths, which no graph can do."""

    def exchange(self, grad: Any, state: Any, info: Any) -> Any:
        flat = tf.reshape(grad, (-1,))
        parts = yield Allgather(flat[: 10 + info.rank], uneven=True)
        mean = yield Allreduce(grad)
        assert [int(p.shape[0]) for p in parts] == [10 + r for r in range(info.size)]
        return mean, state


@dataclass(frozen=True)
class Phased(Compressor):
    """Sends twice the gradient in its first two steps."""

    def variant(self, step: int) -> int:
        return int(step >= 2)

    def exchange(self, grad: Any, state: Any, info: Any) -> Any:
        phase = PHASE.setdefault("now", 0)
        mean = yield Allreduce(grad)
        return mean * (2.0 - phase), state


PHASE: dict[str, int] = {}


def check_conversations_that_cannot_be_traced() -> None:
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
    """Learning rates of all batches, and the logs of all epochs."""

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


def check_momentum_correction() -> None:
    """The velocity, which contains the learning rate, is scaled with it."""
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
    """Accordion is told of the rates that Keras really uses."""
    accordion = Accordion(low=PowerSGD(4), high=PowerSGD(1), interval=10)
    fall = hvd.callbacks.LearningRateScheduleCallback(0.05, lambda epoch: 0.1 ** (epoch // 2))
    fit(make_model(), accordion, epochs=3, callbacks=[fall])
    reasons = [(row["window"], row["reason"]) for row in accordion.history]
    assert (1, "learning rate fell") in reasons and (0, "learning rate fell") not in reasons, (
        reasons
    )


# ------------------------------------------------------------------------------- saving and loading
def check_save_and_load() -> None:
    """Wrapped models load without us; hvd.load_model wraps; momentum survives."""
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
    """Keras 3 gives their optimizers no variables; ours starts anew and says so."""
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


def check_state_survives_a_restart() -> None:
    """Errors, levels and windows are restored into variables that graphs know."""
    for policy in RESTARTED:
        folder = hvd.broadcast(np.frombuffer(tempfile.mkdtemp().encode(), np.uint8), 0)
        where = folder.numpy().tobytes().decode()
        grads = np.random.default_rng(hvd.rank()).standard_normal((6, 32, 40)).astype("f")
        variable, opt, run = restartable(policy)
        for grad in grads[:5]:
            run(tf.constant(grad))
        hvd.save_state(where, only=[opt])
        kept = variable.numpy()
        run(tf.constant(grads[5]))
        twin, other, again = restartable(policy)
        again(tf.constant(grads[0]))  # traced before the state is restored
        hvd.load_state(where, only=[other])
        twin.assign(kept)
        again(tf.constant(grads[5]))
        np.testing.assert_allclose(twin.numpy(), variable.numpy(), rtol=1e-5, atol=1e-6)
        assert other.exchange.steps == 6
        ours, theirs = (repr(o.exchange.policy.history) for o in (other, opt))  # NaN among it
        assert ours == theirs


def check_resuming_fit_equals_not_stopping() -> None:
    """The model's file, and ours beside it; then the rest of the epochs."""

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

    hvd.allgather(np.zeros(1))
    if hvd.rank() == 0:
        os.remove(os.path.join(folder, f"rank-00001-of-{hvd.size():05d}.npz"))
    hvd.allgather(np.zeros(1))
    raises(RuntimeError, "ranks [1]", lambda: hvd.load_state(folder, only=[again.optimizer]))


RESTARTED: list[Callable[[], Any]] = [
    lambda: TopK(0.05),
    lambda: Accordion(low=PowerSGD(2), high=TopK(0.05), window=2, interval=1, threshold=9.0),
    lambda: AdaQS([PowerSGD(1), PowerSGD(2)], window=3, probes=1, drop=1.0),
    lambda: StepSchedule({0: PowerSGD(2), 3: TopK(0.05)}, window=1),
    lambda: LGC(0.05, dense=1, training=5),  # shipped in the step after the restart
    lambda: LGC(0.05, "server", dense=1, training=2, innovation=0.005),
]


def restartable(policy: Callable[[], Any]) -> Any:
    variable = keras.Variable(tf.zeros((32, 40)), name="w")
    opt = hvd.DistributedOptimizer(SGD(1.0), compression=policy(), guard="off")
    opt.build([variable])
    return variable, opt, stepper(True, opt, variable)


# ----------------------------------------------------------------------------- noticing, refusing
def check_ranks_that_disagree() -> None:
    ways = [
        (TopK(0.1), PowerSGD(2)),
        (stock.Compression.none, stock.Compression.fp16),
        (stock.Compression.none, TopK(0.5)),
    ]
    for first, rest in ways:
        compression = first if hvd.rank() == 0 else rest
        for graph in (False, True):
            variable = keras.Variable(tf.zeros((40, 40)), name="w")
            opt = hvd.DistributedOptimizer(SGD(1.0), compression=compression)
            run = functools.partial(stepper(graph, opt, variable), tf.ones((40, 40)))
            raises(RanksDisagree, "rank 0", run)


def check_guard_finds_a_changed_replica() -> None:
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)), name="poked")
        opt = hvd.DistributedOptimizer(SGD(1.0), compression=Dense(), guard_every=4)
        run = functools.partial(stepper(graph, opt, variable), tf.ones((40, 40)))
        for _ in range(4):
            run()
        if hvd.rank() == hvd.size() - 1:
            variable.assign(variable + 1e-3)
        kind = tf.errors.OpError if graph else ReplicasDiffer
        raises(kind, "poked", run)


def check_weights_that_were_never_broadcast() -> None:
    """Horovod's own compression warns once, on rank 0, and goes on as Horovod does; ours stops."""
    for graph in (False, True):
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            variable = keras.Variable(tf.fill((40, 40), float(hvd.rank())), name="careless")
            opt = hvd.DistributedOptimizer(SGD(1.0), compression=compression, guard_every=1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = stepper(graph, opt, variable)
                for _ in range(5):
                    run(tf.ones((40, 40)))
            told = [w for w in caught if "replicas differ" in str(w.message)]
            assert len(told) == (hvd.rank() == 0), (graph, compression)
            assert (variable.numpy() == hvd.rank() - 5.0).all()
        variable = keras.Variable(tf.fill((40, 40), float(hvd.rank())), name="careless")
        opt = hvd.DistributedOptimizer(SGD(1.0), compression=TopK(0.5))
        run = functools.partial(stepper(graph, opt, variable), tf.ones((40, 40)))
        run()
        raises(tf.errors.OpError if graph else ReplicasDiffer, "careless", run)


def check_guard_in_fit() -> None:
    """The callback looks, between batches."""
    model = make_model()

    class Poke(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 0 and batch == 1:
                model.trainable_variables[0].assign(model.trainable_variables[0] * 1.5)

    raises(ReplicasDiffer, "kernel", lambda: fit(model, "dense", callbacks=[Poke()]))
    calm = make_model()
    fit(calm, "dense", callbacks=[Poke()], guard="off")


def check_refusals() -> None:
    import horovod.tensorflow as core

    raises(ValueError, "Adasum", lambda: hvd.DistributedOptimizer(
        SGD(0.1), compression=TopK(0.1), op=core.Adasum))  # fmt: skip
    raises(ValueError, "already", lambda: hvd.DistributedOptimizer(
        hvd.DistributedOptimizer(SGD(0.1))))  # fmt: skip
    raises(TypeError, "Keras 3 optimizer", lambda: hvd.DistributedOptimizer("sgd"))
    raises(ValueError, "guard", lambda: hvd.DistributedOptimizer(SGD(0.1), guard="perhaps"))
    raises(ValueError, "backward_passes", lambda: hvd.DistributedOptimizer(
        SGD(0.1), backward_passes_per_step=0))  # fmt: skip
    variable = keras.Variable(tf.zeros((2,)))
    opt = hvd.DistributedOptimizer(SGD(0.1))
    opt.build([variable])
    compiled = tf.function(lambda grad: opt.apply([grad], [variable]), jit_compile=True)
    raises(RuntimeError, "jit_compile=False", lambda: compiled(tf.ones((2,))))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        raises(RuntimeError, "tf.distribute", lambda: hvd.DistributedOptimizer(SGD(0.1)))
        raises(RuntimeError, "tf.distribute", lambda: opt.apply([tf.ones((2,))], [variable]))
    policy = Accordion(low=PowerSGD(2), high=PowerSGD(1))
    both = [hvd.DistributedOptimizer(SGD(0.1), compression=policy) for _ in range(2)]
    both[0].apply([tf.ones((2,))], [variable])
    raises(ValueError, "another optimizer", lambda: both[1].apply([tf.ones((2,))], [variable]))


def check_stock_wrapper_refuses_ours() -> None:
    """Horovod's own wrapper fails at its first use, and says what to write."""
    opt = stock.DistributedOptimizer(SGD(0.1), compression=TopK(0.1))
    raises(TypeError, "import accordion_hvd.tensorflow as hvd", lambda: opt._allreduce(
        [tf.ones((2,))], [tf.Variable(tf.ones((2,)))]))  # fmt: skip


def check_words_and_environment() -> None:
    os.environ["ACCORDION_HVD_COMPRESSION"] = "topk:0.25"
    try:
        assert (
            repr(hvd.DistributedOptimizer(SGD(0.1))._averager.policy) == "Fixed(TopK(ratio=0.25))"
        )
        os.environ["ACCORDION_HVD_COMPRESSION"] = "none"
        assert repr(hvd.DistributedOptimizer(SGD(0.1))._averager.policy) == "Fixed(Dense())"
        os.environ["ACCORDION_HVD_COMPRESSION"] = "localsgd:2"
        assert hvd.DistributedOptimizer(SGD(0.1)).averaging.method == LocalSGD(2)
        os.environ["ACCORDION_HVD_COMPRESSION"] = "topk:7"
        raises(ValueError, "ACCORDION_HVD_COMPRESSION is 'topk:7'",
               lambda: hvd.DistributedOptimizer(SGD(0.1)))  # fmt: skip
    finally:
        del os.environ["ACCORDION_HVD_COMPRESSION"]
    opt = hvd.DistributedOptimizer(SGD(0.1), compression="powersgd:rank=3")
    assert repr(opt._averager.policy) == "Fixed(PowerSGD(rank=3))"


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
