"""An elastic training in Keras; see `elastic_torch.py` for the arguments."""

from __future__ import annotations

import os
import sys
from typing import Any

import elastic
import harness
import keras
import numpy as np
import tensorflow as tf

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import LocalSGD
from benchmarks.storm.conserved import conserved

hvd.init()
stages = elastic.Stages(sys.argv[2:])
keras.utils.set_random_seed(0 if hvd.rank() == 0 else 100 + os.getpid())  # rank 0's are broadcast
model = keras.Sequential(
    [keras.Input((40,)), keras.layers.Dense(50, activation="tanh"), keras.layers.Dense(4)]
)
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.05, momentum=0.9),
    compression=LocalSGD(4) if sys.argv[1] == "local" else sys.argv[1],
    guard_every=1,
)
optimizer.build(model.trainable_variables)


def one_step(state: Any) -> None:
    x = np.random.default_rng([state.step, hvd.rank()]).normal(size=(16, 40)).astype("f")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x[:, :4]) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    state.step += 1


@hvd.elastic.run
def train(state: Any) -> None:
    def add(x: np.ndarray) -> np.ndarray:
        return hvd.allreduce(tf.constant(x), op=hvd.Sum, name="total").numpy()

    def total() -> np.ndarray:
        weights = [variable.numpy() for variable in model.trainable_variables]
        return conserved(optimizer, weights, hvd.size(), add)

    stages.enter(state, hvd.size(), total())
    while not stages.over(state):
        one_step(state)
        state.total = total()
        stages.act(state, hvd.rank())
        state.commit()


state = hvd.elastic.KerasState(model, optimizer, **elastic.BEGIN)
train(state)
if sys.argv[1] == "local":
    optimizer.average_now(model)
harness.tell(
    rank=hvd.rank(),
    size=hvd.size(),
    sizes=state.sizes,
    leaders=state.leaders,
    changes=state.changes,
    steps=state.step,
    resumed=stages.resumed,
    weights=[float(np.sum(v.numpy(), dtype=np.float64)) for v in model.trainable_variables],
)
