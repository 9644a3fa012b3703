"""Tests of `DistributedOptimizer` with model averaging between real ranks in Keras 3."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import keras
import numpy as np
import tensorflow as tf
from harness import raises

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import COLD, DPSGD, WAGMA, DiLoCo, DynaCOLD, LocalSGD, Nesterov, TopK
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.tensorflow.keras.optimizer import _statistics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from model_ranks import Ranks  # noqa: E402

SGD = keras.optimizers.SGD
SOLO = hvd.ProcessSet([0])
SHAPES = {"weight": (4, 5), "bias": (5,)}
SIZE = 25
LR = 0.2


def INIT() -> None:  # noqa: D103, N802
    hvd.init(process_sets=[SOLO])


# ------------------------------------------------------------------------------------------- tools
def centre(rank: int) -> np.ndarray:
    return np.random.default_rng([3, rank]).normal(size=SIZE).astype(np.float32)


def parameters() -> list[Any]:
    return [keras.Variable(np.zeros(shape, "f"), name=name) for name, shape in SHAPES.items()]


def flat(variables: Any) -> np.ndarray:
    return np.concatenate([v.numpy().reshape(-1) for v in variables])


def stepper(optimizer: Any, variables: Any, graph: bool) -> Any:
    """Return a function that takes a step on f_i = 0.5 ||x - c_i||^2."""
    goal = tf.constant(centre(hvd.rank()))

    def step() -> None:
        with tf.GradientTape() as tape:
            x = tf.concat([tf.reshape(v.value, (-1,)) for v in variables], 0)
            loss = 0.5 * tf.reduce_sum((x - goal) ** 2)
        grads = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    return tf.function(step) if graph else step


def simulated(method: Averaging, steps: int) -> list[np.ndarray]:
    """Return this rank's model after each step, as simulated ranks in NumPy compute it."""
    world = Ranks(method, hvd.size(), np.zeros(SIZE, np.float32))
    return [
        world.take(lambda rank, step, x: -np.float32(LR) * (x - centre(rank)), LR)[hvd.rank()]
        for _ in range(steps)
    ]


def everybody(values: Any) -> np.ndarray:
    """Return all ranks' values; row r is from rank r."""
    return hvd.allgather(np.asarray(values)[None]).numpy()


def assert_equal(values: Any, what: object = "") -> None:
    rows = everybody(values)
    assert np.isfinite(rows).all(), what
    assert (rows == rows[0]).all(), (what, np.abs(rows - rows[0]).max())


def close(optimizer: Any) -> None:
    """End the averaging, and assert that its thread, if it has one, has ended."""
    engine = getattr(optimizer.averaging._averages, "engine", None)
    optimizer.close()
    assert engine is None or not engine._thread.is_alive()


# ---------------------------------------------------------------------------------- custom loops
def follow(method: Averaging, graph: bool) -> None:
    """Assert that real ranks compute the same models as simulated ranks."""
    variables = parameters()
    optimizer = hvd.DistributedOptimizer(SGD(LR), compression=method)
    step = stepper(optimizer, variables, graph)
    for number, due in enumerate(simulated(method, 7)):
        step()
        np.testing.assert_allclose(
            flat(variables), due, rtol=1e-4, atol=1e-4, err_msg=f"{method} {number}"
        )
    optimizer.average_now()
    assert_equal(flat(variables), method)
    stats = optimizer.averaging.stats()
    assert stats["steps"] == 7 and stats["sent"] > 0, stats
    assert not optimizer.averaging.without_waiting


def check_real_ranks_do_what_simulated_ones_do() -> None:
    """Real ranks compute the same models as simulated ranks, eagerly and in graphs."""
    wagma = WAGMA(2, 4, wait_avoiding=False)
    follow(wagma, graph=False)
    for method in (wagma, DiLoCo(3, Nesterov(0.7, 0.9)), COLD("ring", 0.5, TopK(0.5))):
        follow(method, graph=True)


def scaled_stepper(optimizer: Any, variable: Any) -> Any:
    return lambda grad: optimizer.apply([optimizer.scale_loss(grad)], [variable])


def check_loss_scaling() -> None:
    """A rank with an overflow skips its step but averages, and only its loss scale falls."""
    for graph in (True, False):
        variable = keras.Variable(np.zeros(3, "f"), name="x")
        inner = keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
        optimizer = hvd.DistributedOptimizer(inner, compression=LocalSGD(2))

        step = scaled_stepper(optimizer, variable)
        run = tf.function(step) if graph else step
        run(tf.fill((3,), -1.0))
        run(tf.fill((3,), np.float32(np.inf if hvd.rank() == 1 else -1.0)))
        np.testing.assert_allclose(variable.numpy(), 2 - 1 / hvd.size(), rtol=1e-6)
        assert float(optimizer.dynamic_scale) == (4.0 if hvd.rank() == 1 else 8.0)
        assert optimizer.averaging.steps == 2


def check_backward_passes_per_step() -> None:
    variable = keras.Variable(np.zeros(3, "f"), name="x")
    optimizer = hvd.DistributedOptimizer(
        SGD(1.0), compression=LocalSGD(2), backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )  # fmt: skip
    run = tf.function(lambda grad: optimizer.apply([grad], [variable]))
    for number in range(4):
        run(tf.fill((3,), -1.0 - hvd.rank()))
        if number < 3:
            np.testing.assert_allclose(
                variable.numpy(), number // 2 + number % 2 and 1 + hvd.rank()
            )
    np.testing.assert_allclose(variable.numpy(), hvd.size() + 1, rtol=1e-6)
    assert optimizer.averaging.steps == 2 and int(optimizer.iterations) == 4


def check_learning_rates_are_those_of_the_step() -> None:
    """Methods see the learning rate of the step itself, not the schedule's next rate."""
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.1, 0.2, 0.3])
    seen: list[float] = []

    class Listening(LocalSGD):
        def exchange(self, model: Any, state: Any, info: Any) -> Any:
            seen.append(info.lr)
            return (yield from super().exchange(model, state, info))

    variables = parameters()
    optimizer = hvd.DistributedOptimizer(SGD(rates), compression=Listening(2))
    step = stepper(optimizer, variables, True)
    for _ in range(3):
        step()
    np.testing.assert_allclose(seen, [0.1, 0.2, 0.3], rtol=1e-6)


def check_half_precision_and_local_variables() -> None:
    kinds = ("bfloat16", "float32", "float64", "float32")
    variables = [keras.Variable(np.zeros(3), dtype=kind, name=kind) for kind in kinds]
    optimizer = hvd.DistributedOptimizer(SGD(1.0), compression=WAGMA(2, 2))
    optimizer.register_local_var(variables[3])
    run = tf.function(lambda *grads: optimizer.apply(list(grads), variables))
    for _ in range(2):
        run(*[tf.fill((3,), tf.cast(-float(hvd.rank()), kind)) for kind in kinds])
    for variable, kind in zip(variables[:3], kinds, strict=False):
        assert variable.dtype == kind
        np.testing.assert_allclose(variable.numpy().astype("f"), hvd.size() - 1.0)
    np.testing.assert_allclose(variables[3].numpy(), 2 * hvd.rank())
    raises(
        RuntimeError, "before the first step", lambda: optimizer.register_local_var(variables[0])
    )
    close(optimizer)


# --------------------------------------------------------------------------------------------- fit
def network(seed: int = 0, norm: bool = True) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    layers[1:1] = [keras.layers.BatchNormalization()] if norm else []
    return keras.Sequential([keras.Input((6,)), *layers])


def data(rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = rng.standard_normal((32, 6), np.float32) + rng.standard_normal(6).astype("f")
    return x, x[:, :1] * 2 + 1


class Watch(keras.callbacks.Callback):
    """A callback that records whether ranks' weights are equal after batches and epochs.

    It also compares the weights before each validation.
    """

    def __init__(self, batches: bool = True) -> None:
        super().__init__()
        self.batches = batches
        self.seen: dict[str, list[bool]] = {"batch": [], "test": [], "epoch": []}

    def note(self, when: str) -> None:
        rows = everybody(np.concatenate([w.ravel() for w in self.model.get_weights()]))
        assert np.isfinite(rows).all()
        self.seen[when].append(bool((rows == rows[0]).all()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.batches:
            self.note("batch")

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("test")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch")


def fit(
    model: Any, method: Any, epochs: int = 2, callbacks: Any = (), optimizer: Any = None,
    average: str = "all", validate: bool = True, **compiled: Any,
) -> Any:  # fmt: skip
    """Train for four batches per epoch, and return the optimizer."""
    if not hasattr(optimizer, "average_now"):
        optimizer = hvd.DistributedOptimizer(optimizer or SGD(0.05, 0.5), compression=method)
    model.compile(optimizer, loss="mse", **compiled)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0, average=average)
    model.fit(
        *data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0,
        validation_data=data() if validate else None, callbacks=[first, *callbacks],
    )  # fmt: skip
    return model.optimizer


def check_fit_averages_before_validation_and_at_ends_of_epochs() -> None:
    """Models are averaged before each validation and are still equal when the epoch ends.

    Ranks begin with different weights. Optimizer slots stay local.
    """
    results = []
    for compiled in ({}, {"run_eagerly": True}):
        model, watch = network(hvd.rank()), Watch()
        optimizer = fit(model, LocalSGD(3), callbacks=[watch], **compiled)
        assert watch.seen["test"] == watch.seen["epoch"] == [True, True], watch.seen
        assert not any(watch.seen["batch"]), watch.seen  # averages do not include statistics
        assert not model.jit_compile
        assert optimizer.averaging.stats()["steps"] == 8
        velocity = optimizer.momentums[0].numpy()
        assert not (everybody(velocity) == velocity).all(), "slots must stay local"
        results.append(flat(model.trainable_variables))
    np.testing.assert_allclose(results[0], results[-1], rtol=1e-4, atol=1e-5)


def check_statistics_are_a_matter_of_choice() -> None:
    model = network()
    optimizer = fit(model, LocalSGD(100), epochs=1, average="trainable", validate=False)
    assert_equal(flat(model.trainable_variables))
    norm = model.layers[1]
    rows = everybody(norm.moving_mean.numpy())
    assert not (rows == rows[0]).all()
    model.layers[0].trainable = False  # weights of frozen layers are not statistics
    assert _statistics(model) == [norm.moving_mean, norm.moving_variance]
    optimizer.average_now(model)
    np.testing.assert_allclose(norm.moving_mean.numpy(), rows.mean(0), rtol=1e-5, atol=1e-6)
    assert_equal(flat(model.weights))


def check_fit_equals_steps_of_its_own() -> None:
    """`fit` with LocalSGD equals plain training with an average by hand after every two steps."""
    model = network(norm=False)
    fit(model, LocalSGD(2), epochs=1, optimizer=SGD(0.05, 0.5), average="nothing", validate=False)
    twin = network(norm=False)
    plain = SGD(0.05, 0.5)
    x, y = data()
    for number in range(4):
        part = slice(8 * number, 8 * number + 8)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((twin(x[part]) - y[part]) ** 2)
        plain.apply(tape.gradient(loss, twin.trainable_variables), twin.trainable_variables)
        if number % 2:
            for variable in twin.trainable_variables:
                variable.assign(everybody(variable.numpy()).mean(0))
    ours = flat(model.trainable_variables)
    np.testing.assert_allclose(ours, flat(twin.trainable_variables), rtol=1e-4, atol=1e-5)


def check_mixed_precision_and_several_steps_per_execution() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        optimizer = fit(model, "wagma:2,period=3", epochs=1, steps_per_execution=2)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert optimizer.averaging.steps == 4
    assert_equal(flat(model.weights))
    close(optimizer)


def check_what_the_page_says() -> None:
    """The Keras example of docs/averaging.md runs and leaves all ranks with equal weights."""
    page = Path(__file__).resolve().parent.parent.parent / "docs" / "averaging.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    chosen = [text for text in blocks if "WAGMA(" in text and "tensorflow" in text]
    assert len(chosen) == 1
    names: dict[str, Any] = {}
    exec(chosen[0], names)
    model = network(hvd.rank())
    names["train"](model, SGD(0.01), *data(), data())
    assert_equal(flat(model.weights))
    close(model.optimizer)


# ---------------------------------------------------------------------------- saving and loading
def folder() -> str:
    name = np.frombuffer(tempfile.mkdtemp().encode(), np.uint8)
    return bytes(hvd.broadcast(name, 0).numpy()).decode()


def check_saved_state_goes_on_exactly() -> None:
    """A resumed training takes the same steps as a training that does not stop.

    The saved state includes DiLoCo's velocity, COLD's estimates and the number of steps. Saving is
    refused while models differ.
    """
    for method in (DiLoCo(3, Nesterov(0.7, 0.9)), COLD("ring", 0.5, TopK(0.5))):
        variables = parameters()
        optimizer = hvd.DistributedOptimizer(SGD(LR), compression=method)
        step = stepper(optimizer, variables, True)
        for _ in range(4):
            step()
        where = folder()
        raises(RuntimeError, "average_now", lambda o=optimizer, w=where: hvd.save_state(w, [o]))
        optimizer.average_now()
        hvd.save_state(where, only=[optimizer])
        kept = [v.numpy() for v in variables]
        for _ in range(3):
            step()
        twins = parameters()
        other = hvd.DistributedOptimizer(SGD(LR), compression=method)
        again = stepper(other, twins, True)
        again()  # traced, and begun, before the state is restored
        hvd.load_state(where, only=[other])
        for variable, value in zip(twins, kept, strict=True):
            variable.assign(value)
        for _ in range(3):
            again()
        assert other.averaging.steps == optimizer.averaging.steps == 7
        np.testing.assert_allclose(flat(twins), flat(variables), atol=1e-7, err_msg=repr(method))


def check_saved_models() -> None:
    """Keras loads a saved model; `load_model` wraps its optimizer, whose state is then restored."""
    path = os.path.join(folder(), f"model-{hvd.rank()}.keras")
    model = network()
    fit(model, LocalSGD(3), epochs=1)
    model.save(path)
    where = folder()
    hvd.save_state(where, only=[model.optimizer])
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is SGD
    again = hvd.load_model(path, compression=LocalSGD(3))
    assert again.optimizer.averaging.method == LocalSGD(3)
    hvd.load_state(where, only=[again.optimizer])
    for ours, theirs in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()
    for each in (model, again):
        fit(each, None, epochs=1, optimizer=each.optimizer, average="nothing", validate=False)
    np.testing.assert_allclose(flat(again.weights), flat(model.weights), atol=1e-6)


# ----------------------------------------------------------------------------- alone, and refused
def check_alone_is_plain_training() -> None:
    results = []
    for distributed in (False, True):
        model, plain = network(), SGD(0.05, 0.9)
        if distributed:
            plain = hvd.DistributedOptimizer(plain, compression=WAGMA(), process_set=SOLO)
        model.compile(plain, loss="mse", jit_compile=False)
        model.fit(*data(), batch_size=16, verbose=0, shuffle=False)
        results.append(flat(model.weights))
    assert (results[0] == results[1]).all()
    model.optimizer.average_now(model)
    assert model.optimizer.averaging.stats()["sent"] == 0


def check_models_that_differ_at_first() -> None:
    for graph in (True, False):
        variables = parameters()
        variables[0].assign(variables[0] + hvd.rank())
        optimizer = hvd.DistributedOptimizer(SGD(LR), compression=LocalSGD(2))
        kind = tf.errors.OpError if graph else RuntimeError
        raises(kind, "Were the initial weights broadcast", stepper(optimizer, variables, graph))


def check_ranks_that_disagree() -> None:
    method = LocalSGD(2 + (hvd.rank() == 1))
    raises(RuntimeError, "LocalSGD(period=3)", lambda: hvd.DistributedOptimizer(
        SGD(LR), compression=method))  # fmt: skip


def check_what_is_refused() -> None:
    def wrapped(method: Any, optimizer: Any = None, **options: Any) -> Any:
        return lambda: hvd.DistributedOptimizer(
            optimizer or SGD(0.1), compression=method, **options
        )

    adam = keras.optimizers.Adam
    for make, word in (
        (wrapped(WAGMA(), op=hvd.Sum), "hvd.Average"),
        (wrapped(WAGMA(), skip=["a"]), "skip"),
        (wrapped(WAGMA(9)), "group_size is 9"),
        (wrapped(COLD(), SGD(0.1, 0.9)), "plain SGD"),
        (wrapped(DynaCOLD(), adam()), "plain SGD"),
        (wrapped(DPSGD(np.eye(1))), "a matrix of"),
        (wrapped(WAGMA(), SGD(0.1, gradient_accumulation_steps=2)), "backward_passes_per_step"),
        (wrapped(WAGMA(), adam(use_ema=True)), "use_ema"),
        (lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, average="some"), "average"),
    ):
        raises(ValueError, word, make)
    optimizer = wrapped(LocalSGD())()
    raises(RuntimeError, "no variables are known", optimizer.average_now)
    raises(ValueError, "already distributed", wrapped(LocalSGD(), optimizer))
    raises(
        AttributeError, "optimizer.averaging", lambda: optimizer._averager and optimizer.exchange
    )
    raises(RuntimeError, "outside of tf.function", tf.function(
        lambda: optimizer.average_now(), autograph=False))  # fmt: skip
    compiled = tf.function(stepper(optimizer, parameters(), False), jit_compile=True)
    raises(RuntimeError, "jit_compile=False", compiled)
    raises(RuntimeError, "was not started by an MPI launcher", wrapped(
        WAGMA(2, wait_avoiding=True)))  # fmt: skip


if __name__ == "__main__":
    harness.main(globals())
