"""The gain of Keras' optimizers; see `accordion_hvd.engine.gain`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from accordion_hvd.engine import gain

ADAM = (keras.optimizers.Adam, keras.optimizers.Nadam)


def gain_of(optimizer: Any, variable: Any) -> float:
    """Return the gain of `optimizer` for a variable."""
    if not isinstance(optimizer, ADAM):
        momentum = getattr(optimizer, "momentum", None)
        return gain.USUAL if momentum is None else gain.of_sgd(float(momentum))
    moments = optimizer._velocities[optimizer._get_variable_index(variable)]
    mean = float(tf.reduce_mean(tf.cast(moments, tf.float32)))
    return gain.of_adam(mean, optimizer.beta_2, float(tf.cast(optimizer.iterations, tf.float32)))
