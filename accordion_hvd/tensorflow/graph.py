"""Calls from TensorFlow graphs to Python."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from accordion_hvd.core.base import Tensor
from accordion_hvd.tensorflow.variables import create


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
    """Return the variable whose updates order the operations of graphs."""
    with tf.device("/cpu:0"):
        return create(tf.constant(0, tf.int64))
