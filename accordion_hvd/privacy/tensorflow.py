"""Gradients of single examples in TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

Loss = Callable[[Any, Any], tf.Tensor]


def gradients(
    model: keras.Model, loss: Loss, inputs: Any, targets: Any, variables: Sequence[Any] = ()
) -> list[tf.Tensor]:
    """Return each example's gradient of each variable, to be passed to `optimizer.apply`.

    Call this function in a `tf.function`; eager calls trace the model each time.

    Args:
        model: model that processes examples independently; called with training=True.
        loss: function of targets and outputs with one value an example, such as a Keras loss with
            reduction=None.
        inputs: (examples, ...); may have 0 examples.
        targets: (examples, ...).
        variables: variables to differentiate by; by default all trainable ones.

    Returns:
        A list with one tensor for each variable, (examples, *shape of the variable).

    Raises:
        ValueError: if the model has batch normalisation, which mixes examples, or the loss does not
            return one value an example.
    """
    refuse_mixing(model)
    chosen = [getattr(v, "value", v) for v in variables or model.trainable_variables]
    if tf.executing_eagerly() and not len(inputs):
        return [tf.zeros((0, *v.shape), v.dtype) for v in chosen]
    with tf.GradientTape() as tape:
        losses = loss(targets, model(inputs, training=True))
    if losses.shape.rank != 1:
        raise ValueError(
            f"privacy: the loss has shape {tuple(losses.shape)}, but must have one value an "
            "example; set reduction=None."
        )
    jacobians = tape.jacobian(losses, chosen, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(g) for g in jacobians]


def refuse_mixing(model: keras.Model) -> None:
    """Raise ValueError if the model has layers that mix examples (batch normalisation)."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            raise ValueError(
                f"privacy: layer {layer.name!r} is a {type(layer).__name__}, which mixes the "
                "examples of a batch, so that no example has its own gradient; use "
                "GroupNormalization or LayerNormalization."
            )
