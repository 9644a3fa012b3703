"""The gain of Keras' optimizers; see `accordion_hvd.engine.gain`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from accordion_hvd.engine import gain

MOMENTS = {
    keras.optimizers.Adam: "_velocities",
    keras.optimizers.Nadam: "_velocities",
    keras.optimizers.RMSprop: "_velocities",
    keras.optimizers.Adagrad: "_accumulators",
}
"""Class of an optimizer -> attribute with its second moments."""


def gain_of(optimizer: Any, variable: Any) -> float:
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    momentum = getattr(optimizer, "momentum", None)
    kind = next((kind for kind in MOMENTS if isinstance(optimizer, kind)), None)
    if kind is None:
        return gain.USUAL if momentum is None else gain.of_sgd(float(momentum))
    moments = getattr(optimizer, MOMENTS[kind])[optimizer._get_variable_index(variable)]
    mean = float(tf.reduce_mean(tf.cast(moments, tf.float32)))
    steps = float(tf.cast(optimizer.iterations, tf.float32))
    beta = getattr(optimizer, "beta_2", 0.0)  # only Adam corrects the bias of its moments
    return gain.of_sgd(momentum or 0.0) * gain.of_adam(mean, beta, steps)
