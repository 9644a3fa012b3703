"""Gradients of single examples, in TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

Loss = Callable[[Any, Any], tf.Tensor]


def gradients(
    model: keras.Model, loss: Loss, inputs: Any, targets: Any, variables: Sequence[Any] = ()
) -> list[tf.Tensor]:
    """Each example's gradient of each variable, vectorised; what `optimizer.apply` wants.

    Best called within a `tf.function`: eagerly, it is traced anew each time.

    Args:
        model: treats examples apart from each other; called with training=True.
        loss: of targets and outputs, one value an example: a Keras loss with reduction=None.
        inputs: (examples, ...); none are allowed, too.
        targets: (examples, ...).
        variables: by default all that are trainable.

    Returns:
        For each variable (examples, its shape).

    Raises:
        ValueError: the model has batch normalisation, which mixes examples; or the loss does not
            give one value an example.
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
            "example; give it reduction=None."
        )
    found = tape.jacobian(losses, chosen, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(g) for g in found]


def refuse_mixing(model: keras.Model) -> None:
    """Raise ValueError where one example changes what others give."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            raise ValueError(
                f"privacy: layer {layer.name!r} is a {type(layer).__name__}, which mixes the "
                "examples of a batch, so that none has a gradient of its own; use "
                "GroupNormalization or LayerNormalization."
            )
