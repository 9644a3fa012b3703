"""Keras and TensorFlow variables, and calls from graphs to Python."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.layout import TensorInfo


def create(value: Any, dtype: Any = None) -> tf.Variable:
    """Create a variable that is not trainable, on the device of its value; call this eagerly.

    While TensorFlow traces a function for the second time, it forbids new variables to the thread,
    even within `tf.init_scope`. Another thread may create them.
    """
    value = tf.convert_to_tensor(value, dtype)

    def make() -> tf.Variable:
        with tf.device(value.device):
            return tf.Variable(value, trainable=False)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def plain(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable; return a TensorFlow variable itself."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def key_of(variable: Any) -> int:
    """Return a key that is equal for a Keras variable and its TensorFlow variable."""
    return id(plain(variable))


def references(variables: Sequence[Any]) -> Callable[[], list[Any]]:
    """Return a function that returns those of the variables that are still alive."""
    found = [weakref.ref(variable) for variable in variables]
    return lambda: [variable for one in found if (variable := one()) is not None]


def multiplied(grad: Any, factor: Any) -> Any:
    """Return a dense or sparse gradient, multiplied by a factor; None remains None."""
    if isinstance(grad, tf.IndexedSlices):
        values = grad.values * tf.cast(factor, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return None if grad is None else grad * tf.cast(factor, grad.dtype)


def describe(variables: Sequence[Any]) -> list[TensorInfo]:
    """Return names (made unique), shapes, dtypes and devices of variables."""
    counts: dict[str, int] = {}
    rows = []
    for variable in variables:
        name = name_of(variable)
        counts[name] = counts.get(name, 0) + 1
        name = name if counts[name] == 1 else f"{name}.{counts[name]}"
        dtype = tf.as_dtype(variable.dtype).name
        device = getattr(getattr(variable, "value", variable), "device", "") or ""
        place = device.rpartition("device:")[2]
        rows.append(TensorInfo(name, tuple(variable.shape), dtype, place))
    return rows


def name_of(variable: Any) -> str:
    """Return a variable's path, which is equal on all ranks that build the same model."""
    return getattr(variable, "path", variable.name).partition(":")[0]


def weights_of(layers: Any) -> list[Any]:
    """Return the trainable weights of a layer or of several layers; None: of no layers.

    Raises:
        ValueError: if `layers` contains an object that is not a layer, or a layer without weights
            that is not built yet.
    """
    kind = tf.keras.layers.Layer
    rows = [] if layers is None else [layers] if isinstance(layers, kind) else list(layers)
    if not all(isinstance(layer, kind) for layer in rows):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    for layer in rows:
        if not layer.built:
            check.refuse("local_layers", "a layer", layer.name, "built: call model.build() before")
    return [variable for layer in rows for variable in layer.trainable_weights]


# ---------------------------------------------------------------------- calls from graphs to Python
def call_back(function: Callable[..., Any], inputs: list[Tensor], kinds: list[Any]) -> list[Tensor]:
    """Call a Python function from a graph, in the order of `in_turn`."""
    return in_turn(lambda: tf.py_function(function, inputs, kinds))


def in_turn(operations: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Run operations of a graph one after another, in the order in which they were traced.

    A call that waits for other ranks blocks a thread of TensorFlow. If several such calls ran at a
    time and in different orders on different ranks, they would deadlock.
    """
    if tf.executing_eagerly():
        return operations()
    with tf.init_scope():
        order = _order()
    with tf.control_dependencies([order.assign_add(1)]):
        results = operations()
    with tf.control_dependencies(results):
        order.assign_add(1)
    return results


def when(flag: Any, act: Callable[[], Any]) -> None:
    """Call `act` if `flag` is True; in a graph, the flag may be a tensor."""
    if not isinstance(flag, bool):

        def acted() -> Tensor:
            act()
            return tf.constant(True)

        tf.cond(flag, acted, lambda: tf.constant(False))
    elif flag:
        act()


def few_threads() -> bool:
    """Return whether Python code called from a graph occupies the only thread that runs graphs."""
    word = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    from_environment = int(word) if word.isdecimal() else 0
    threads = tf.config.threading.get_inter_op_parallelism_threads() or from_environment
    return (threads or len(os.sched_getaffinity(0))) < 2


@functools.cache
def _order() -> tf.Variable:
    with tf.device("/cpu:0"):
        return create(tf.constant(0, tf.int64))
