"""Initialization of Horovod, and broadcasts of TensorFlow and Keras 3 variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.horovod import engine, process_sets
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator, hvd
from accordion_hvd.core.base import Broadcast, ExchangeGenerator
from accordion_hvd.engine.layout import make_groups
from accordion_hvd.tensorflow.variables import plain

_CHUNK = 64 << 20  # largest number of bytes per broadcast of several variables


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialize Horovod; takes the arguments of `horovod.tensorflow.init`.

    If MPI started the ranks, process sets can be added later. The environment variable
    ACCORDION_HVD_TIMEOUT has the seconds after which a rank that does not answer ends the job.

    Raises:
        ValueError: if ACCORDION_HVD_TIMEOUT is no number of seconds.
    """
    timeouts.limit_horovod()
    process_sets.let_add()
    return engine.start(lambda: hvd.init(*args, **kwargs))


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Broadcast variables from `root_rank` to all ranks, eagerly or in a `tf.function`.

    Args:
        variables: TensorFlow or Keras variables of any numeric dtype, in the same order on all
            ranks.
        root_rank: the rank that sends its values.
        process_set: the ranks that take part.
        inplace: accepted for compatibility with Horovod; not used.
    """
    inner = [plain(variable) for variable in variables]
    if not process_set.included() or not inner:
        return
    communicator = HorovodCommunicator(process_set)
    root = process_set.ranks.index(root_rank) if process_set.ranks else root_rank
    sizes = [variable.dtype.size * (variable.shape.num_elements() or 1) for variable in inner]
    for number, positions in enumerate(make_groups(sizes, _CHUNK)):
        name, chunk = f"accordion.broadcast.{number}", [inner[i] for i in positions]
        values = communicator.run(name, _broadcast([_bits(v) for v in chunk], root))
        for variable, value in zip(chunk, values, strict=True):
            variable.assign(tf.cast(value, tf.bool) if variable.dtype == tf.bool else value)


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast all global variables of a TensorFlow 1 graph.

    Raises:
        RuntimeError: if TensorFlow executes eagerly, since there is no collection of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>, root_rank)` instead."
        )
    return hvd.broadcast_global_variables(root_rank)


def _broadcast(tensors: list[Any], root: int) -> ExchangeGenerator:
    values = yield tuple(Broadcast(tensor, root=root) for tensor in tensors)
    return values  # type: ignore[return-value]


def _bits(variable: Any) -> Any:
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
