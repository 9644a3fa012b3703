"""Calls from graphs into Python."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from accordion_hvd.core.base import Tensor


def call_back(function: Callable[..., Any], inputs: list[Tensor], kinds: list[Any]) -> list[Tensor]:
    """Call Python from a graph."""
    return in_turn(lambda: tf.py_function(function, inputs, kinds))


def in_turn(operations: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Do this, in a graph, after everything else that is done in turn and before what follows.

    A call that waits for other ranks blocks a thread of TensorFlow's; several at a time, in another
    order on each rank, would wait for each other for ever.
    """
    if tf.executing_eagerly():
        return operations()
    with tf.init_scope():
        turn = _turn()
    with tf.control_dependencies([turn.assign_add(1)]):
        results = operations()
    with tf.control_dependencies(results):
        turn.assign_add(1)
    return results


def when(flag: Any, act: Callable[[], Any]) -> None:
    """Do this if the flag says so; within a graph, a tensor does."""
    if not isinstance(flag, bool):

        def acted() -> Tensor:
            act()
            return tf.constant(True)

        tf.cond(flag, acted, lambda: tf.constant(False))
    elif flag:
        act()


def few_threads() -> bool:
    """Return whether Python code that a graph calls holds the only thread that can run graphs."""
    word = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    told = int(word) if word.isdecimal() else 0
    chosen = tf.config.threading.get_inter_op_parallelism_threads() or told
    return (chosen or len(os.sched_getaffinity(0))) < 2


@functools.cache
def _turn() -> tf.Variable:
    with tf.device("/cpu:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)
