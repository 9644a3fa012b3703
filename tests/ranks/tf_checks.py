"""Tests of tapes, broadcasts and names of `accordion_hvd.tensorflow`; see `harness.py`."""

from __future__ import annotations

import functools
import gc
import os
import warnings
from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
from harness import raises, some
from horovod.common.exceptions import HorovodInternalError

import accordion_hvd.tensorflow as hvd
from accordion_hvd import (
    Accordion,
    Allreduce,
    Broadcast,
    Dense,
    Displacement,
    Fixed,
    PowerSGD,
    TopK,
    simulate,
)
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.comm.horovod import tensorflow as engine
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator
from accordion_hvd.core.base import Allgather, Alltoall, Neighbours
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.guard import ReplicasDiffer
from accordion_hvd.engine.membership import replaced
from accordion_hvd.simulation import one_process
from accordion_hvd.tensorflow import tape as tapes
from accordion_hvd.tensorflow.tape import exchange_of
from accordion_hvd.tensorflow.variables import describe

PAIR = hvd.ProcessSet([0, 1])


def INIT() -> None:  # noqa: D103, N802
    ranks = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    hvd.init(process_sets=[PAIR] if ranks > 2 else None)


def everywhere(values: Any) -> np.ndarray:
    """Return all ranks' values; row r is from rank r."""
    return hvd.allgather(tf.constant(np.asarray(values)[None])).numpy()


def in_graph(graph: bool, function: Any) -> Any:
    """Return the function, as a tf.function if `graph`."""
    return tf.function(function) if graph else function


def tape_step(variables: list[Any], **options: Any) -> Any:
    """Return a step that averages x, the gradients of sum(v * x), with a new tape each time."""

    def step(x: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v in variables])
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)

    return step


def rank_gradient(step: int = 0, rank: int | None = None) -> np.ndarray:
    rank = hvd.rank() if rank is None else rank
    return np.random.default_rng((rank, step)).standard_normal((40, 40)).astype("f")


# ------------------------------------------------------------------------------------ collectives
def check_requests() -> None:
    """All requests work eagerly and in a graph, even in dtypes that Horovod refuses."""
    ours = HorovodCommunicator()
    size, rank = hvd.size(), hvd.rank()

    def served(name: str) -> Any:
        return ours.run(name, everything())

    def everything() -> Any:
        x = tf.reshape(tf.range(6, dtype=tf.float32), (2, 3)) + float(rank)
        half = tf.cast(x, tf.bfloat16)
        mean, low, count, top = yield (
            Allreduce(x), Allreduce(half), Allreduce(tf.constant([rank]), op="sum"),
            Allreduce(x, op="max"),
        )  # fmt: skip
        parts = yield Allgather(half)
        sent = yield Broadcast(x, root=size - 1)
        rows = yield Alltoall(tf.tile(tf.constant([[rank]], tf.uint8), (size, 1)))
        return mean, low, count, top, tf.stack(parts), sent, rows

    base = np.arange(6, dtype="f").reshape(2, 3)
    for graph in (False, True):
        run = in_graph(graph, lambda name=f"requests.{graph}": served(name))
        mean, low, count, top, parts, sent, rows = (np.asarray(v) for v in run())
        np.testing.assert_allclose(mean, base + (size - 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(low.astype("f"), base + (size - 1) / 2, rtol=2**-7)
        assert count == [sum(range(size))]
        np.testing.assert_allclose(top, base + size - 1)
        np.testing.assert_allclose(parts.astype("f")[size - 1], base + size - 1)
        np.testing.assert_allclose(sent, base + size - 1)
        assert rows.ravel().tolist() == list(range(size))


def check_neighbours() -> None:
    """A rank receives the tensors of its neighbour, or nothing if it has no neighbour."""
    ours = HorovodCommunicator()
    size, rank = hvd.size(), hvd.rank()
    after, before = (rank + 1) % size, (rank - 1) % size

    def served(name: str) -> Any:
        return ours.run(name, generator())

    def generator() -> Any:
        x, y = tf.fill((2, 2), float(rank)), tf.constant([rank, 7])
        found = yield tuple(Neighbours(z, to=(after,), of=(before,)) for z in (x, y))
        nobody = yield Neighbours(x)
        assert nobody == ()
        return [part for (part,) in found]

    for graph in (False, True):
        run = in_graph(graph, lambda name=f"neighbours.{graph}": served(name))
        x, y = (np.asarray(v) for v in run())
        assert x.tolist() == [[before] * 2] * 2 and y.tolist() == [before, 7]


def check_broadcast_variables() -> None:
    """Keras' and TensorFlow's variables of all dtypes are broadcast, also in a tf.function."""
    for graph in (False, True):
        start = float(hvd.rank() + 1)
        variables = [
            keras.Variable(np.full((3, 2), start, "f")),
            tf.Variable(start),
            keras.Variable(hvd.rank(), dtype="int64"),
            tf.Variable([hvd.rank() == 1]),
            tf.Variable(tf.cast([start], tf.bfloat16)),
            keras.Variable(np.array([hvd.rank()], "uint32"), dtype="uint32"),
        ]
        in_graph(graph, make_broadcast(variables))()
        firsts = [float(np.asarray(v).astype("f").ravel()[0]) for v in variables]
        assert firsts == [2, 2, 1, 1, 2, 1], firsts
    raises(RuntimeError, "broadcast_variables", lambda: hvd.broadcast_global_variables(0))


def make_broadcast(variables: list[Any]) -> Any:
    return lambda: hvd.broadcast_variables(variables, root_rank=1)


# ------------------------------------------------------------------------------------------- tapes
def check_tape_averages() -> None:
    variables = [keras.Variable(tf.zeros((40, 40))), tf.Variable(tf.zeros((40, 40)))]
    want = np.mean([rank_gradient(0, rank) for rank in range(hvd.size())], 0)
    methods: list[dict[str, Any]] = [
        {}, {"compression": stock.Compression.fp16}, {"compression": "dense"},
        {"compression": TopK(1.0)}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0},
        {"num_groups": 0, "groups": 2},
    ]  # fmt: skip
    for options in methods:
        for graph in (False, True):
            run = in_graph(graph, tape_step(variables, guard="off", **options))
            factor = hvd.size() if "op" in options else 1
            for grad in run(tf.constant(rank_gradient())):
                np.testing.assert_allclose(grad.numpy(), want * factor, rtol=1e-2, atol=2e-3)


def check_tape_with_residuals_in_16_bits() -> None:
    """Tapes average as simulated ranks do, eagerly and in graphs, with words of bfloat16."""
    narrow = functools.partial(Exchange, residual_dtype="bfloat16")
    for graph in (False, True):
        variable = tf.Variable(tf.zeros((40, 40)))
        options = {"compression": TopK(0.1), "residual_dtype": "bfloat16", "guard": "off"}
        run = in_graph(graph, tape_step([variable], **options))
        with replaced(one_process, Exchange=narrow):
            world = simulate(TopK(0.1), hvd.size())
            for step in range(3):
                (mean,) = run(tf.constant(rank_gradient(step)))
                rows = [{"Variable": rank_gradient(step, rank)} for rank in range(hvd.size())]
                (want, *_) = world.step(rows)
                assert want is not None
                np.testing.assert_allclose(mean.numpy(), want["Variable"], rtol=1e-6, atol=1e-7)
        (entry,) = exchange_of(TopK(0.1), [variable]).bucket_states
        (own,) = world.exchanges[hvd.rank()].bucket_states
        assert entry.bucket.name == own.bucket.name and entry.stored and own.stored
        np.testing.assert_array_equal(entry.stored["error"].numpy(), own.stored["error"])
    step = functools.partial(tape_step([variable], residual_dtype="half"), tf.ones((40, 40)))
    raises(ValueError, "DistributedGradientTape: residual_dtype is 'half'", step)


def check_tape_in_a_later_trace_of_a_function() -> None:
    """A tape works in a second trace, in which a tf.function may create no variables."""
    for compression in ("none", "topk:0.5", "powersgd:1", "powersgd:4,wire='float16'"):
        step = step_of_two_traces(tf.Variable(tf.zeros((40, 40))), compression)
        step(tf.constant(rank_gradient()), everyone=False)
        mean = step(tf.constant(rank_gradient()), everyone=True)
        same = hvd.allgather(tf.reshape(mean, (1, -1))).numpy()
        assert np.abs(same[0]).max() > 0 and (same == same[0]).all(), compression


def check_tape_in_an_elastic_job() -> None:
    """A rank that joins takes its first step although the other ranks no longer compare plans.

    Elastic jobs accept only Horovod's own compression in tapes.
    """
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        variable = tf.Variable(tf.zeros((40, 40)))
        grad = tf.constant(rank_gradient())
        want = np.mean([rank_gradient(0, rank) for rank in range(hvd.size())], 0)
        for joined in (False, True):
            if joined and hvd.rank() == 0:
                list(tapes._averagers.values())[-1].agreed = False  # as before its first step
            (mean,) = tape_step([variable])(grad)
            np.testing.assert_allclose(mean.numpy(), want, rtol=1e-5, atol=1e-6)
        step = tape_step([tf.Variable(tf.zeros((40, 40)))], compression=TopK(0.5))
        raises(ValueError, "Horovod's own in elastic jobs", lambda: step(grad))
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def check_failed_operations_raise_horovods_exception() -> None:
    """A failure of Horovod raises Horovod's exception even if the error names no operation."""

    def fail(message: str) -> None:
        with hvd.elastic._failures():
            raise tf.errors.UnknownError(None, None, message)

    shut_down = "{{function_node __inference_283}} Horovod has been shut down."
    raises(HorovodInternalError, "shut down", lambda: fail(shut_down))
    raises(tf.errors.UnknownError, "no space left", lambda: fail("no space left"))


def step_of_two_traces(variable: tf.Variable, compression: str) -> Any:
    made: list[tf.Variable] = []

    @tf.function
    def step(grad: tf.Tensor, everyone: bool) -> tf.Tensor:
        if not made:
            made.append(tf.Variable(0.0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * grad)
        if everyone:
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [variable])[0]

    return step


def check_tape_with_weights_that_were_never_broadcast() -> None:
    """Weights that differ between ranks cause a warning or an error.

    With Horovod's own compression, rank 0 warns once and training goes on. With compressors of
    this library, all ranks stop.
    """
    options: list[dict[str, Any]] = [{}, {"compression": stock.Compression.fp16}]
    for option in options:
        variable = tf.Variable(tf.fill((40, 40), float(hvd.rank())))
        step = tape_step([variable], guard_every=1, **option)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                step(tf.constant(rank_gradient()))
        told = [w for w in caught if "replicas differ" in str(w.message)]
        assert len(told) == (hvd.rank() == 0), option
    step = tape_step([variable], compression=TopK(0.5))
    step(tf.constant(rank_gradient()))
    raises(ReplicasDiffer, "after step 1", lambda: step(tf.constant(rank_gradient())))


def check_tape_remembers_errors() -> None:
    """Residuals survive although each step makes a new tape with an equal, new compressor.

    The sum of the averages is the sum of the gradients' means less the mean residual.
    """
    results = []
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)), name="w")

        def step(x: tf.Tensor, variable: Any = None) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * x)
            tape = hvd.DistributedGradientTape(tape, compression=TopK(0.1))
            return tape.gradient(loss, [variable])[0]

        run = in_graph(graph, bind(step, variable))
        total, want = 0, 0
        for number in range(3):
            total = total + run(tf.constant(rank_gradient(number))).numpy()
            want = want + rank_gradient(number)
        exchange = exchange_of(TopK(0.1), [variable])
        assert exchange.stats()["steps"] == 3
        error = exchange.bucket_states[0].state["error"].numpy().reshape(40, 40)
        everything = everywhere(want - error).mean(0)
        np.testing.assert_allclose(total, everything, rtol=1e-4, atol=1e-5)
        results.append(total)
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def bind(step: Any, variable: Any) -> Any:
    return lambda x: step(x, variable)


def bind_first(step: Any, variable: Any) -> Any:
    return lambda x, y: step(variable, x, y)


def check_losses_of_one_step_have_residuals_of_their_own() -> None:
    """Two tapes, or two calls of one tape, serve two losses of the same variables.

    What each loss owes is paid in steps without gradients, and not to the other.
    """

    def two_tapes(variable: Any, x: tf.Tensor, y: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as one, tf.GradientTape() as two:
            first, second = tf.reduce_sum(variable * x), tf.reduce_sum(variable * y)
        one, two = (hvd.DistributedGradientTape(t, compression=TopK(0.1)) for t in (one, two))
        return [one.gradient(first, [variable])[0], two.gradient(second, [variable])[0]]

    def one_tape(variable: Any, x: tf.Tensor, y: tf.Tensor) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_sum(variable * x), tf.reduce_sum(variable * y)
        tape = hvd.DistributedGradientTape(tape, compression=TopK(0.1))
        return [tape.gradient(loss, [variable])[0] for loss in losses]

    few = [(two_tapes, False), (one_tape, True)]
    for step, graph in some([*few, (two_tapes, True), (one_tape, False)], few):
        variable, totals = keras.Variable(tf.zeros((40, 40)), name="w"), [0.0, 0.0]
        run = in_graph(graph, bind_first(step, variable))
        for number in range(14):
            factor = float(number < 2)
            x = tf.constant(rank_gradient(number)) * factor
            means = run(x, 0.01 * x)
            totals = [t + mean.numpy() for t, mean in zip(totals, means, strict=True)]
        want = everywhere(rank_gradient(0) + rank_gradient(1)).mean(0)
        np.testing.assert_allclose(totals[0], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(totals[1], 0.01 * want, rtol=1e-4, atol=1e-7)


def check_late_sources_of_a_tape_take_part() -> None:
    """What the first sources owe is paid after others have joined at the same call."""

    def step(x: tf.Tensor, variables: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v in variables])
        tape = hvd.DistributedGradientTape(tape, compression=TopK(0.1), guard="off")
        return tape.gradient(loss, variables)

    for graph in (False, True):
        variables = [keras.Variable(tf.zeros((40, 40)), name=name) for name in "wv"]
        few = in_graph(graph, bind(step, variables[:1]))
        every = in_graph(graph, bind(step, variables))
        totals = [np.zeros((40, 40)), np.zeros((40, 40))]
        for number in range(16):
            run = every if number >= 2 else few
            for i, mean in enumerate(run(tf.constant(rank_gradient(number) * (number < 4)))):
                totals[i] += mean.numpy()
        rows = [everywhere(rank_gradient(number)).mean(0) for number in range(4)]
        np.testing.assert_allclose(totals[0], sum(rows), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(totals[1], rows[2] + rows[3], rtol=1e-4, atol=1e-5)
        served = len(tapes._averagers)
        del variables, few, every, run
        gc.collect()
        assert graph or len(tapes._averagers) == served - 1, "ids of variables are used again"


def check_sources_in_turn() -> None:
    """What is owed to a source stays owed while it has no gradient on any rank."""
    for graph in (False, True):
        variables = [keras.Variable(tf.zeros((40, 40)), name=name) for name in "wv"]

        def step(x: tf.Tensor, used: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * x) for v in used])
            tape = hvd.DistributedGradientTape(tape, compression=TopK(0.1), guard="off")
            return tape.gradient(loss, variables)  # noqa: B023 (called below only)

        runs = [in_graph(graph, bind(step, [v])) for v in variables]
        runs.append(in_graph(graph, bind(step, variables)))
        totals, wants = [np.zeros((40, 40))] * 2, [np.zeros((40, 40))] * 2
        for number in range(28):
            turn = number % 2 if number < 6 else 2
            x = rank_gradient(number) * (number < 6)
            for i, mean in enumerate(runs[turn](tf.constant(x))):
                assert (mean is None) == (turn == 1 - i)
                if mean is not None:
                    totals[i] = totals[i] + mean.numpy()
                    wants[i] = wants[i] + everywhere(x).mean(0)
        np.testing.assert_allclose(totals, wants, rtol=1e-4, atol=1e-5)


def check_scaled_losses_of_a_tape() -> None:
    """Residuals do not follow the scale of a LossScaleOptimizer, which a tape finds itself."""
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)), name="w")
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=1024.0, dynamic_growth_steps=3
        )
        run, want = in_graph(graph, scaled_step(variable, optimizer)), 0.0
        for number in range(16):
            x = rank_gradient(number) * (number < 4)
            run(tf.constant(x))
            want = want - everywhere(x).mean(0)
        assert float(optimizer.dynamic_scale) > 1024.0
        np.testing.assert_allclose(variable.numpy(), want, rtol=1e-4, atol=1e-5)
    two = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]
    variable = keras.Variable(tf.zeros((40, 40)), name="w")
    unknown = tape_step([variable], compression=TopK(0.1))
    raises(ValueError, "built before the first step", lambda: unknown(tf.constant(rank_gradient())))
    two[1].build([variable])
    unknown(tf.constant(rank_gradient()))


def check_sources_that_are_left_out_for_good() -> None:
    """What is owed to the others is paid on."""
    a, b = (tf.Variable(tf.zeros((40, 40))) for _ in range(2))

    def step(x: Any, *sources: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(source * x) for source in (a, b)])
        tape = hvd.DistributedGradientTape(tape, compression=compression, guard="off")
        return tape.gradient(loss, list(sources))

    compression, total, want = TopK(0.1), 0.0, 0.0
    for number in range(16):
        x = rank_gradient(number) * (number < 6)
        total = total + step(tf.constant(x), *((a, b) if number < 3 else (a,)))[0].numpy()
        want = want + everywhere(x).mean(0)
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-5)


def check_policies_made_in_each_step_are_refused() -> None:
    variable = tf.Variable(tf.zeros((40, 40)))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        hvd.DistributedGradientTape(tape, compression=Fixed(TopK(0.1))).gradient(loss, [variable])

    def steps() -> None:
        for _ in range(3):
            step()

    raises(ValueError, "made once, before the loop", steps)


def check_loss_scaling_that_is_gone_counts_nowhere() -> None:
    """When garbage is collected differs between ranks: rank 0 has an optimizer that nobody uses."""
    gc.collect()
    gc.disable()
    try:
        if hvd.rank() == 0:
            other = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
            other.own = [other]  # a cycle
            del other
        variable = tf.Variable(tf.zeros((40, 40)))
        step = tape_step([variable], compression=TopK(0.1))
        rows = everywhere(step(tf.constant(rank_gradient()))[0])
        assert (rows == rows[0]).all()
    finally:
        gc.enable()


def scaled_step(variable: Any, optimizer: Any) -> Any:
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable * x))
        tape = hvd.DistributedGradientTape(tape, compression=TopK(0.1), guard="off")
        optimizer.apply(tape.gradient(loss, [variable]), [variable])

    return step


def check_learning_rates_of_tapes_are_compared() -> None:
    variable = tf.Variable(tf.zeros((40, 40)))
    rate = 0.1 * (1 + hvd.rank())
    step = tape_step([variable], compression=TopK(0.5), lr=lambda: rate)
    step(tf.constant(rank_gradient()))
    raises(ReplicasDiffer, "learning rates", lambda: step(tf.constant(rank_gradient())))


def check_tape_with_accordion() -> None:
    """A policy that is shared by all tapes changes levels, eagerly and within a tf.function."""
    for graph in (False, True):
        variable = keras.Variable(tf.zeros((40, 40)), name="w")
        accordion = Accordion(low=PowerSGD(2), high=TopK(0.1), window=2, interval=1, threshold=0.9)
        run = in_graph(graph, tape_step([variable], compression=accordion, lr=lambda: 0.1))
        for number in range(7):
            scale = 10.0 if number == 4 else 1.0
            mean = run(tf.constant(rank_gradient(0) * scale))[0].numpy()
            rows = everywhere(mean)
            assert (rows == rows[0]).all() and np.isfinite(rows).all(), (graph, number, rows)
        assert [row["level"] for row in accordion.history] == [0, 1, 0], accordion.history


def check_tape_structures_and_local_sources() -> None:
    a, b = tf.Variable(tf.ones((2,))), tf.Variable(tf.ones((2,)))
    factor = float(hvd.rank() + 1)
    with tf.GradientTape(persistent=True) as tape:
        loss = factor * (tf.reduce_sum(a) + tf.reduce_sum(b))
    mine = hvd.DistributedGradientTape(tape)
    assert isinstance(mine, tf.GradientTape) and type(mine).__name__ == "GradientTape"
    grads = mine.gradient(loss, {"a": a, "b": [b]})
    mean = (hvd.size() + 1) / 2
    np.testing.assert_allclose(grads["a"].numpy(), mean)
    np.testing.assert_allclose(grads["b"][0].numpy(), mean)
    assert float(tape.gradient(loss, a)[0]) == factor  # the given tape is unchanged
    local = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    local.register_local_source(b)
    np.testing.assert_allclose(local.gradient(loss, [a, b])[1].numpy(), factor)
    layer = keras.layers.Dense(1)
    layer.build((None, 3))
    with tf.GradientTape() as tape:
        loss = factor * tf.reduce_sum(layer(tf.ones((1, 3))))
    partial = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    for grad in partial.gradient(loss, layer.trainable_variables):
        np.testing.assert_allclose(grad.numpy(), factor / hvd.size())
    raises(ValueError, "Layer", lambda: hvd.PartialDistributedGradientTape(tape, local_layers=[3]))


def check_tape_with_adasum() -> None:
    variable = tf.Variable(tf.zeros((3,)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    mine = hvd.DistributedGradientTape(tape, op=hvd.Adasum)
    if hvd.mpi_enabled():  # Gloo has none
        assert np.allclose(mine.gradient(loss, [variable])[0].numpy(), 1.0)
    raises(ValueError, "Adasum", lambda: hvd.DistributedGradientTape(
        tf.GradientTape(), op=hvd.Adasum, compression=TopK(0.1)))  # fmt: skip


def check_compression_by_position_is_refused() -> None:
    for arguments in ((TopK(0.1),), ("", TopK(0.1))):
        raises(ValueError, "is TopK(ratio=0.1)", lambda given=arguments: (
            hvd.DistributedGradientTape(tf.GradientTape(), *given)))  # fmt: skip


def check_tape_with_a_pattern_that_matches_nothing() -> None:
    variable = keras.Variable(tf.zeros((40, 40)), name="w")
    step = tape_step([variable], compression=TopK(0.1), skip="haed*")
    raises(ValueError, "skip is 'haed*'", lambda: step(tf.ones((40, 40))))


def check_tape_with_displacement() -> None:
    variable = tf.Variable(tf.zeros((40, 40)))
    step = tape_step([variable], compression=Displacement(TopK(0.1), TopK(0.01), window=5))
    raises(ValueError, "does not know the optimizer", lambda: step(tf.ones((40, 40))))


def check_tapes_that_disagree() -> None:
    variable = keras.Variable(tf.zeros((40, 40)))
    compression = TopK(0.1) if hvd.rank() == 0 else TopK(0.2)
    step = tape_step([variable], compression=compression)
    raises(RanksDisagree, "TopK", lambda: step(tf.ones((40, 40))))


def check_process_sets() -> None:
    """Ranks outside of the process set get their own gradients."""
    if hvd.size() < 3:
        return
    variable = tf.Variable(tf.zeros((40, 40)))
    for graph in (False, True):
        step = tape_step([variable], compression=TopK(1.0), process_set=PAIR, guard="off")
        grad = in_graph(graph, step)(tf.constant(rank_gradient()))[0].numpy()
        inside = (rank_gradient(0, 0) + rank_gradient(0, 1)) / 2
        want = inside if hvd.rank() < 2 else rank_gradient()
        np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------- names
def check_names_are_complete() -> None:
    for theirs, ours in ((stock, hvd), (stock.elastic, hvd.elastic)):
        missing = [n for n in dir(theirs) if not n.startswith("_") and not hasattr(ours, n)]
        assert not missing, missing
        public = {n for n in dir(theirs) if not n.startswith("_")}
        assert set(getattr(theirs, "__all__", public)) <= set(getattr(ours, "__all__", public))
    for name in ("DistributedOptimizer", "DistributedGradientTape", "broadcast_variables"):
        assert getattr(hvd, name).__module__.startswith("accordion_hvd."), name


def check_waits_end_with_their_graph() -> None:
    """An exchange whose graph has failed has not told that it ended: only executed graphs wait."""
    seen: list[bool] = []

    def look() -> Any:
        seen.append(engine._executes())
        return np.float32(0)

    tf.function(lambda: tf.numpy_function(look, [], tf.float32))()
    assert seen == [True] and not engine._executes()


def check_equal_names_are_numbered() -> None:
    """The first variable of a name keeps it, so that others do not rename it in checkpoints."""
    made = [keras.Variable(tf.zeros(3), name=name) for name in ("w", "b", "w", "w")]
    assert [row.name for row in describe(made)] == ["w", "b", "w.2", "w.3"]


def check_optimizers() -> None:
    """`DistributedOptimizer` wraps optimizers of Keras and of TensorFlow 1.

    Optimizers of TensorFlow 1 get Horovod's own wrapper and accept only Horovod's compression.
    """
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=TopK(1.0))
    variable = keras.Variable(tf.zeros((40, 40)))
    opt.apply([tf.constant(rank_gradient())], [variable])
    want = np.mean([rank_gradient(0, rank) for rank in range(hvd.size())], 0)
    np.testing.assert_allclose(variable.numpy(), -want, rtol=1e-5, atol=1e-6)
    old = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    assert isinstance(hvd.DistributedOptimizer(old), tf.compat.v1.train.Optimizer)
    raises(ValueError, "Keras", lambda: hvd.DistributedOptimizer(old, compression=TopK(0.1)))


def check_stock_horovod_refuses_ours() -> None:
    """Horovod's own functions fail at their first use and name the import to use instead."""
    for ours in (TopK(0.1), Fixed(Dense())):
        raises(TypeError, "import accordion_hvd.tensorflow as hvd", lambda c=ours: stock.allreduce(
            tf.ones((2,)), compression=c))  # fmt: skip


if __name__ == "__main__":
    from harness import main

    main(globals())
