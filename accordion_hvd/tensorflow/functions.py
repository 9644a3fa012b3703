"""Functions before training: the start of Horovod, broadcasts, for Keras 3's variables too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from accordion_hvd.comm.horovod import process_sets
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator, hvd
from accordion_hvd.core.base import Broadcast, ExchangeGenerator
from accordion_hvd.tensorflow.variables import plain

_CHUNK = 64 << 20  # bytes that travel together


def init(*args: Any, **kwargs: Any) -> Any:
    """Start Horovod; over MPI so that process sets can be added later. Arguments are Horovod's."""
    process_sets.let_add()
    return hvd.init(*args, **kwargs)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Give every rank the values of `root_rank`; eagerly or in a `tf.function`.

    Args:
        variables: TensorFlow's or Keras', of any numeric dtype; in the same order on all ranks.
        root_rank: the rank whose values are taken.
        process_set: the ranks taking part.
        inplace: accepted for compatibility.
    """
    inner = [plain(variable) for variable in variables]
    if not process_set.included() or not inner:
        return
    communicator = HorovodCommunicator(process_set)
    root = process_set.ranks.index(root_rank) if process_set.ranks else root_rank
    for number, chunk in enumerate(_chunks(inner)):
        name = f"accordion.broadcast.{number}"
        values = communicator.run(name, _broadcast([_bits(v) for v in chunk], root))
        for variable, value in zip(chunk, values, strict=True):
            variable.assign(tf.cast(value, tf.bool) if variable.dtype == tf.bool else value)


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast all global variables; only within a TensorFlow 1 graph.

    Raises:
        RuntimeError: TensorFlow 2 has no collection of all variables.
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


def _chunks(variables: list[Any]) -> list[list[Any]]:
    chunks: list[list[Any]] = [[]]
    filled = 0
    for variable in variables:
        size = variable.dtype.size * (variable.shape.num_elements() or 1)
        if chunks[-1] and filled + size > _CHUNK:
            chunks.append([])
            filled = 0
        chunks[-1].append(variable)
        filled += size
    return chunks
