"""A GCN in Keras."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd.graph import Block
from examples.graph.config import GraphSettings

Array = np.ndarray
FRAMEWORK = "tensorflow"


def prepare() -> None:
    """Set the number of threads to this host's cores per rank."""
    threads = max(1, (os.cpu_count() or 1) // hvd.local_size())
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        pass  # TensorFlow has started already, by an earlier comparison in this process


@keras.saving.register_keras_serializable("accordion_hvd")
class GCNLayer(keras.layers.Layer):
    """A layer sigma(A X W + b) on a sampled block (Kipf & Welling, 2017).

    Args:
        units: number of output features.
        activation: sigma.
        options: options of `keras.layers.Layer`.
    """

    def __init__(self, units: int, activation: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.units, self.activation = units, keras.activations.get(activation)

    def build(self, shape: Any) -> None:
        """Create the weights."""
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, x: Any, rows: Any, columns: Any, values: Any, targets: Any) -> Any:
        """Compute A (X W), which is cheaper than (A X) W because W makes rows shorter."""
        messages = tf.gather(tf.matmul(x, self.kernel), columns) * values[:, None]
        total = tf.math.unsorted_segment_sum(messages, rows, targets)
        return self.activation(total + self.bias)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the layer."""
        activation = keras.activations.serialize(self.activation)
        return {**super().get_config(), "units": self.units, "activation": activation}


SPEC = (
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([None], tf.float32),
    tf.TensorSpec([], tf.int64),
)
"""Signature of a block."""


def tensors(block: Block) -> tuple[Any, ...]:
    """Return a block as tensors, for a TensorFlow graph."""
    parts = (block.rows, block.columns, block.values, np.int64(block.targets))
    return tuple(tf.convert_to_tensor(part) for part in parts)


class Network:
    """A GCN and its optimizer in Keras; see `training.Network`."""

    def __init__(self, settings: GraphSettings, sizes: Sequence[int], seed: int) -> None:
        keras.utils.set_random_seed(seed)
        last = len(sizes) - 2
        self.layers = [
            GCNLayer(units, None if number == last else "relu", name=f"layer_{number + 1}")
            for number, units in enumerate(sizes[1:])
        ]
        for layer, features in zip(self.layers, sizes, strict=False):
            layer.build((None, features))
        self.dropouts = [
            keras.layers.Dropout(settings.dropout, seed=1000 * seed + hvd.rank() + place * 7919)
            for place in range(len(self.layers))
        ]
        self.weights = [weight for layer in self.layers for weight in layer.trainable_weights]
        self.decay = settings.weight_decay
        self.optimizer = hvd.DistributedOptimizer(
            keras.optimizers.Adam(settings.lr),
            compression=settings.policy() or hvd.Compression.none,
        )
        self.optimizer.build(self.weights)
        for number, weight in enumerate(self.weights):
            weight.assign(hvd.broadcast(weight.value, 0, name=f"weight.{number}"))
        self.exchange = self.optimizer.exchange if hvd.size() > 1 else None
        blocks = tuple(SPEC for _ in self.layers)
        features = tf.TensorSpec([None, sizes[0]], tf.float32)
        rest = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.float32))
        self._step = tf.function(self._traced, input_signature=(blocks, features, *rest))

    def _traced(self, blocks: Any, x: Any, labels: Any, share: Any) -> Any:
        with tf.GradientTape() as tape:
            for layer, dropout, block in zip(self.layers, self.dropouts, blocks, strict=True):
                x = layer(dropout(x, training=True), *block)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
            loss = tf.reduce_sum(losses) * share
            first = self.layers[0].trainable_weights
            total = loss + self.decay * tf.add_n([tf.nn.l2_loss(w.value) for w in first])
        self.optimizer.apply(tape.gradient(total, [w.value for w in self.weights]), self.weights)
        return loss

    def step(self, blocks: tuple[Block, ...], x: Array, labels: Array, share: float) -> float:
        """Take one optimizer step and return the loss."""
        inputs = tuple(tensors(block) for block in blocks)
        features = tf.convert_to_tensor(x)
        return float(
            self._step(inputs, features, tf.constant(labels), tf.constant(share, tf.float32))
        )

    def layer(self, number: int, block: Block, x: Array) -> Array:
        """Return the output of one layer without dropout."""
        return np.asarray(self.layers[number](tf.convert_to_tensor(x), *tensors(block)))


build = Network
