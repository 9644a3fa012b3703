"""Tests of model averaging in Keras 3 over MPI: without waiting, and in groups of ranks."""

from __future__ import annotations

import time
from typing import Any

import harness
import keras
import numpy as np
import tensorflow as tf
from keras_averaging_checks import (
    LR,
    SGD,
    Watch,
    assert_equal,
    close,
    everybody,
    fit,
    flat,
    folder,
    follow,
    network,
    parameters,
    raises,
    stepper,
)

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import COLD, WAGMA, DiLoCo, DynaCOLD, Nesterov

PAIR = hvd.ProcessSet([0, 1])


def INIT() -> None:  # noqa: D103, N802
    hvd.init(process_sets=[PAIR])


def check_groups_and_neighbours() -> None:
    for method in (WAGMA(2, 4, wait_avoiding=False), DynaCOLD("ring")):
        follow(method, graph=True)


def check_several_dtypes() -> None:
    kinds = ("bfloat16", "float32", "float64")
    variables = [keras.Variable(np.zeros(3), dtype=kind, name=kind) for kind in kinds]
    optimizer = hvd.DistributedOptimizer(SGD(1.0), compression=WAGMA(2, 2))
    run = tf.function(lambda *grads: optimizer.apply(list(grads), variables))
    for _ in range(2):
        run(*[tf.fill((3,), tf.cast(-float(hvd.rank()), kind)) for kind in kinds])
    for variable, kind in zip(variables, kinds, strict=True):
        assert variable.dtype == kind
        assert_equal(variable.numpy().astype("f"))
    close(optimizer)


def check_a_late_rank_holds_nobody_up_in_fit() -> None:
    """With a late rank, averages take place without it, and all ranks end with equal models."""

    class Late(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 1:
                time.sleep(0.1)

    model, watch = network(hvd.rank()), Watch(batches=False)
    optimizer = fit(model, WAGMA(2, 4), callbacks=[Late(), watch])
    assert watch.seen["test"] == watch.seen["epoch"] == [True, True], watch.seen
    assert_equal(flat(model.weights))
    assert optimizer.averaging.without_waiting
    stats = optimizer.averaging.stats()
    assert stats["steps"] == 8 and stats["sent"] > 0, stats
    assert stats["late"] + stats["on_time"] == 6, stats
    assert everybody(np.array([stats["late"]])).sum() > 0
    close(optimizer)


def check_ranks_that_go_on_are_told() -> None:
    """Ranks that train on after rank 0 has ended get an error, in graphs and eagerly.

    They keep the last average of all ranks.
    """
    for graph in (True, False):
        variables = parameters()
        optimizer = hvd.DistributedOptimizer(SGD(LR), compression=WAGMA(2, 4))
        step = stepper(optimizer, variables, graph)
        for _ in range(3):
            step()
        if hvd.rank() == 0:
            optimizer.close()
        else:
            kind = tf.errors.OpError if graph else RuntimeError
            raises(kind, "the averaging has ended", lambda step=step: [step() for _ in range(9)])
        assert_equal(flat(variables), graph)
        close(optimizer)


def check_periods_go_on_after_a_restart() -> None:
    """After a restart, averages of all ranks take place at the same steps as without it.

    An extra average before the restart makes the numbers of versions and steps differ.
    """
    where, engines = folder(), []
    for steps, due in ((4, 3), (3, 2)):  # 3 is a multiple of the period, and so are 4 + 2
        variables = parameters()
        optimizer = hvd.DistributedOptimizer(SGD(LR), compression=WAGMA(2, 3))
        step = stepper(optimizer, variables, True)
        if engines:
            step()  # before the restore
            hvd.load_state(where, only=[optimizer])
            for variable in variables:
                variable.assign(tf.zeros_like(variable))
        for number in range(steps):
            step()
            rows = everybody(flat(variables))
            assert (rows == rows[0]).all() == (number + 1 == due), (steps, number)
        optimizer.average_now()
        hvd.save_state(where, only=[optimizer])
        engines.append(optimizer.averaging._averages.engine)
        close(optimizer)
    assert [(e.steps, e.version) for e in engines] == [(4, 6), (7, 10)]  # both ends count


def check_saved_state_on_other_ranks() -> None:
    """Two of four ranks resume with DiLoCo's velocity, but without COLD's estimates."""
    for method, shared in ((DiLoCo(2, Nesterov(0.7, 0.9)), True), (COLD("ring", 0.5), False)):
        optimizer = hvd.DistributedOptimizer(SGD(LR), compression=method)
        variables = parameters()
        step = stepper(optimizer, variables, False)
        for _ in range(4):
            step()
        optimizer.average_now()
        where = folder()
        hvd.save_state(where, only=[optimizer])
        few = hvd.DistributedOptimizer(SGD(LR), compression=method, process_set=PAIR)
        few.build(variables)
        hvd.load_state(where, only=[few])
        few.average_now()
        if hvd.rank() < 2:
            ours, theirs = (o.averaging.state()["states"][0] for o in (few, optimizer))
            for key, value in theirs.items():
                same = (ours[key] == value).all()
                assert same == (shared or not value.any()), (method, key)
            assert few.averaging.steps == 0
        everybody(0.0)


if __name__ == "__main__":
    harness.main(globals())
