"""An elastic training in Keras that a third rank joins; the argument is the compression."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import harness
import keras
import numpy as np
import tensorflow as tf

import accordion_hvd.tensorflow.keras as hvd

GROWS, STEPS = 6, 30
"""Steps after which a third rank may join, and at least so many in all."""

PATIENCE = 60.0
"""Seconds to wait for it."""

hvd.init()
keras.utils.set_random_seed(0 if hvd.rank() == 0 else 100 + os.getpid())  # rank 0's are broadcast
model = keras.Sequential(
    [keras.Input((40,)), keras.layers.Dense(50, activation="tanh"), keras.layers.Dense(4)]
)
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.05, momentum=0.9), compression=sys.argv[1], guard_every=1
)
optimizer.build(model.trainable_variables)


def one_step(state: Any) -> None:
    x = np.random.default_rng([state.step, hvd.rank()]).normal(size=(16, 40)).astype("f")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x[:, :4]) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    state.joined += hvd.size() == 3


@hvd.elastic.run
def train(state: Any) -> None:
    waited = 0.0
    while state.step < STEPS or hvd.size() < 3 and waited < PATIENCE:
        one_step(state)
        if state.step == GROWS and hvd.rank() == 0:
            Path(os.environ["ELASTIC_HOSTS"]).write_text("localhost:3\n")
        if state.step >= GROWS and hvd.size() < 3:
            time.sleep(0.1)  # until the third rank is here
            waited += 0.1
        state.step += 1
        state.commit()


state = hvd.elastic.KerasState(model, optimizer, step=0, joined=0)
train(state)
harness.tell(
    rank=hvd.rank(),
    size=hvd.size(),
    joined=state.joined,
    steps=optimizer.exchange.steps,
    weights=[float(np.sum(v.numpy(), dtype=np.float64)) for v in model.trainable_variables],
)
