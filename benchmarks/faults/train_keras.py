"""A small training in Keras in which one rank meets a fault; started by `launch.run`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import accordion_hvd
import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator
from benchmarks.faults import training
from benchmarks.faults.cases import SAVED
from benchmarks.faults.rank import Rank


class Place(keras.layers.Layer):
    """A layer without effect, whose forward and backward passes are places of faults.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def call(self, inputs: Any) -> Any:
        """Return the inputs."""

        @tf.custom_gradient
        def passed(x: Any) -> Any:
            return _altered(self._rank, "forward", x), lambda grad: _altered(
                self._rank, "gradient", grad
            )

        return passed(inputs)


class Steps(keras.callbacks.Callback):
    """Records each step, and saves twice.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Pass the place between two steps."""
        self._rank.at("step")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the weights; save."""
        rank = self._rank
        rank.stepped([weight.numpy() for weight in self.model.trainable_weights])
        if rank.step in SAVED:
            if rank.number == 0:
                self.model.save_weights(rank.folder / f"model-{rank.step}.weights.h5")
            hvd.save_state(training.checkpoints(rank), step=rank.step)
            rank.tell("saved", step=rank.step)


def main(rank: Rank) -> None:
    """Train, save twice, and resume in a second launch."""
    if rank.differs("version"):
        accordion_hvd.__version__ = "0.0.1"
    rank.at("start")
    hvd.init()
    rank.install()
    rank.install_sending(HorovodCommunicator, lambda place, x: _altered(rank, place, x))
    model = network(rank)
    compression = training.method(rank)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=compression, ledger=training.ledger(rank)
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Steps(rank)]
    if "metric" in rank.case.options:
        callbacks.append(hvd.callbacks.MetricAverageCallback())
    if rank.differs("weights"):
        callbacks = callbacks[1:]  # the others wait for its part of the broadcast
        model.layers[0].kernel.assign(model.layers[0].kernel + 1)
    if rank.resumed:
        resume(rank, model, optimizer)
    taken = range(rank.step, training.steps(rank))
    pairs = [training.batch(rank.number, step) for step in taken]
    images, labels = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    rows = training.BATCH
    model.fit(images, labels, rows, shuffle=False, callbacks=callbacks, verbose=0)
    rank.skipped = int(optimizer.exchange.skipped)


def network(rank: Rank) -> keras.Model:
    """Return the model, whose forward and backward passes are places of faults."""
    keras.utils.set_random_seed(0)
    hidden = training.HIDDEN * (2 if rank.differs("width") else 1)
    first = keras.layers.Dense(hidden, activation="relu")
    layers = [first, Place(rank), keras.layers.Dense(training.CLASSES)]
    return keras.Sequential([keras.Input((training.FEATURES,)), *layers])


def resume(rank: Rank, model: keras.Model, optimizer: Any) -> None:
    """Load the last complete checkpoint and the model of the same step."""
    optimizer.build(model.trainable_variables)
    rank.step = hvd.load_state(training.checkpoints(rank))
    model.load_weights(rank.folder / f"model-{rank.step}.weights.h5")
    rank.tell("resumed", step=rank.step)


def _altered(rank: Rank, place: str, tensor: Any) -> Any:
    """Return a tensor that passes a place of faults when it is computed."""

    def passed(value: Any) -> Any:
        return rank.at(place, value)

    after = tf.numpy_function(passed, [tensor], tensor.dtype)
    known = tensor.shape
    after.set_shape([None, *known[1:]] if place == "payload" else known)
    return after


if __name__ == "__main__":
    this = Rank()
    with this.recorded():
        main(this)
