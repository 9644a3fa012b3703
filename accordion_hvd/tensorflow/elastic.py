"""Drop-in replacement for `horovod.tensorflow.elastic`, with a state for Keras 3 models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as _horovod
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow.elastic import *  # noqa: F403

from accordion_hvd.comm.horovod import engine
from accordion_hvd.engine.membership import FollowsRanks
from accordion_hvd.tensorflow.functions import broadcast_variables


class _ModelState(ObjectState):
    """State of a Keras model and its optimizer, without the state of compression."""

    leading_rank: int  # of `FollowsRanks`

    def __init__(self, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self._store()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        self._store()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables(), self._stored, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._variables(), self.leading_rank)
        self._store()
        super().sync()

    def _variables(self) -> list[Any]:
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.weights, *self.optimizer.variables]

    def _store(self) -> None:
        self._stored = [tf.identity(variable) for variable in self._variables()]


class TensorFlowKerasState(FollowsRanks, _ModelState):
    """State of a Keras model and its optimizer for elastic training: commit, restore, synchronize.

    Args:
        model: a model that is built.
        optimizer: the optimizer. Default: the one with which the model was compiled.
        backend: accepted for compatibility with Horovod; not used.
        kwargs: further values to synchronize; they become attributes.

    Raises:
        ValueError: if the model is not built.
    """

    interrupt = HostsUpdatedInterrupt

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        super().__init__(model, optimizer or model.optimizer, **kwargs)

    def sync(self) -> None:
        """Broadcast the leader's state to all ranks, and share the residuals; collective."""
        with _failures():
            super().sync()

    def _gather(self, value: Any) -> list[Any]:
        with _failures():
            return hvd.allgather_object(value, name="accordion.elastic")

    def _optimizers(self) -> Iterable[Any]:
        return [self.optimizer]


__all__ = sorted({*_horovod.__all__, "TensorFlowKerasState"})


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function; see `horovod.tensorflow.elastic.run`.

    After a failure, all connections of Horovod are closed, so that other ranks notice the failure.
    """

    @functools.wraps(function)
    def converting(*args: Any, **kwargs: Any) -> Any:
        with _failures():
            return function(*args, **kwargs)

    return engine.decorated(_horovod, hvd, converting)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    # Horovod's decorator knows its failures by the names of operations, which errors of functions
    # lack. It then returns as if the training had ended.
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Horovod" not in error.message:
            raise
        raise HorovodInternalError(error) from error


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)
