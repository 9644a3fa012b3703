"""Stands in for `horovod.tensorflow.elastic`; its Keras state works with Keras 3."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as _horovod
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.tensorflow.elastic import *  # noqa: F403

from accordion_hvd.engine.gradient_averager import gradient_averagers
from accordion_hvd.tensorflow.functions import broadcast_variables


class TensorFlowKerasState(ObjectState):
    """A Keras model and its optimizer, to be committed, restored and synchronised.

    Args:
        model: the model, built.
        optimizer: its optimizer, if it is not compiled into it.
        backend: accepted for compatibility.
        kwargs: further values to synchronise; they become attributes.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model, self.optimizer = model, optimizer or model.optimizer
        self._keep()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Keep the present values."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Go back to the values kept."""
        for variable, value in zip(self._variables(), self._kept, strict=False):
            variable.assign(value)
        super().restore()

    def reset(self) -> None:
        """Connect optimizers to the ranks that there are now."""
        for averager in gradient_averagers():
            averager.ranks_changed()
        super().reset()

    def sync(self) -> None:
        """Give every rank what rank 0 has; residuals remain with the ranks that have them."""
        broadcast_variables(self._variables(), 0)
        self._keep()
        super().sync()
        for averager in gradient_averagers([self.optimizer]):
            averager.follow_rank_zero(hvd.broadcast_object)

    def _variables(self) -> list[Any]:
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.weights, *self.optimizer.variables]

    def _keep(self) -> None:
        self._kept = [tf.identity(variable) for variable in self._variables()]


__all__ = sorted({*_horovod.__all__, "TensorFlowKerasState"})


def __getattr__(name: str) -> Any:
    """Return other names from Horovod."""
    return getattr(_horovod, name)
