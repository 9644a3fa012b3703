"""Checks of unsupported uses that need the types of TensorFlow and Keras."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import Resolved
from accordion_hvd.validate import OWNER, Use


def is_plain(optimizer: Any) -> bool:
    """Return whether a step is lr times the gradient: SGD without momentum."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = any(hasattr(inner, name) for name in _MORE_THAN_SGD)
    return not own and not getattr(inner, "momentum", 0)


def use_of(optimizer: Any, process_set: Any, total: bool, skip: Sequence[str], passes: int) -> Use:
    """Return the facts about a Keras optimizer and its job that `validate` checks."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return Use(
        module="accordion_hvd.tensorflow.keras",
        ranks=hvd.size(),
        members=process_set.size(),
        optimizer=type(inner).__name__,
        plain=is_plain(inner),
        total=total,
        skip=check.patterns(skip),
        passes=passes,
    )


def check_positions(owner: str, **texts: Any) -> None:
    """Raise ValueError unless arguments are texts, since a compression by position is none."""
    for name, value in texts.items():
        if not (value is None or isinstance(value, str)):
            check.refuse(owner, name, value, "a string; pass compression= by keyword")


def check_optimizer(resolved: Resolved, optimizer: Any, passes: int) -> None:
    """Check what `validate` cannot: accumulation, moving averages and loss scaling in Keras.

    Raises:
        ValueError: if the optimizer does not suit the policy or the averaging method.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    growth, method = resolved.growth, resolved.method
    if passes > 1:
        check_passes_of_keras(OWNER, f"backward_passes_per_step={passes}", inner)
    if growth is not None:
        _check_growing(growth.sizes, optimizer)
    if method is None:
        return
    name = type(inner).__name__
    if getattr(inner, "gradient_accumulation_steps", None):
        raise ValueError(
            f"{OWNER}: {method!r} averages after each step, but with gradient_accumulation_steps "
            f"{name} does not reveal which calls take a step. Pass backward_passes_per_step to "
            "DistributedOptimizer instead."
        )
    if getattr(inner, "use_ema", False):
        raise ValueError(
            f"{OWNER}: use_ema is True, but must be False with {method!r}: {name} would replace "
            "the averaged weights by moving averages of local weights."
        )


def check_passes_of_keras(owner: str, several: str, optimizer: Any) -> None:
    """Raise ValueError for settings of Keras that take each backward pass for a step."""
    if getattr(optimizer, "use_ema", False):
        allowed = f"False with {several}, of which Keras counts each as a step"
        check.refuse(owner, "use_ema", True, allowed)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        found, allowed = optimizer.gradient_accumulation_steps, f"None with {several}"
        check.refuse(owner, "gradient_accumulation_steps", found, allowed)


def _check_growing(batch_size: tuple[int, int], optimizer: Any) -> None:
    sizes = f"with batch_size={batch_size}"
    half = tf.keras.config.dtype_policy().name == "mixed_float16"
    if half or isinstance(optimizer, tf.keras.optimizers.LossScaleOptimizer):
        allowed = f"one without loss scaling {sizes}; use mixed_bfloat16"
        check.refuse(OWNER, "optimizer", type(optimizer).__name__, allowed)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        steps = optimizer.gradient_accumulation_steps
        check.refuse(OWNER, "gradient_accumulation_steps", steps, f"None {sizes}")


def check_private_gradients(
    policy: Policy, grads: Sequence[Any], variables: Sequence[Any], local: set[int]
) -> None:
    """Raise ValueError if a gradient would be used without protection, or has a wrong shape."""
    if local:
        raise ValueError(
            f"{policy!r} is private, but {len(local)} local variable(s) are registered, which "
            "would be trained without protection."
        )
    if policy.scope != "samples":
        return
    known = [(v, g) for v, g in zip(variables, grads, strict=True) if g is not None]
    counts = {tuple(g.shape)[0] if len(g.shape) else None for _, g in known}
    if len(counts) > 1 or any(tuple(g.shape)[1:] != tuple(v.shape) for v, g in known):
        raise ValueError(
            f"{policy!r} needs gradients of single contributors along a new first dimension, the "
            "same number for each variable. Use accordion_hvd.privacy.tensorflow.gradients."
        )


_MORE_THAN_SGD = ("beta_1", "beta_2", "rho", "epsilon", "learning_rate_power")
"""Settings by which optimizers are recognized whose step is not lr times the gradient."""


def check_context() -> None:
    """Raise RuntimeError in code that XLA compiles or within a distribution strategy."""
    check_strategy()
    if tf.executing_eagerly():
        return
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "Horovod's operations cannot be compiled by XLA: pass jit_compile=False to "
            "model.compile() or tf.function(). In fit(), BroadcastGlobalVariablesCallback turns "
            "XLA off."
        )


def check_strategy() -> None:
    if tf.distribute.has_strategy():
        kind = type(tf.distribute.get_strategy()).__name__
        raise RuntimeError(
            f"{OWNER} does not work within tf.distribute ({kind}): both would exchange gradients. "
            "Leave the strategy's scope; Horovod runs one process per device."
        )


def check_keras_caller(optimizer: Any) -> None:
    """Check the Keras object that calls `optimizer.build`, and turn off XLA if it is a model.

    An optimizer has no reference to the object that uses it. But both `LossScaleOptimizer` and
    `fit` call its `build` before tracing, so the caller is found on the stack.

    Raises:
        TypeError: if the caller is a LossScaleOptimizer that contains `optimizer`.
    """
    frame = sys._getframe(2)
    for _ in range(12):
        owner = frame.f_locals.get("self")
        if getattr(owner, "inner_optimizer", None) is optimizer:
            raise TypeError(
                "LossScaleOptimizer(DistributedOptimizer(...)) would exchange gradients only on "
                "ranks without an overflow, and hang; use DistributedOptimizer("
                "LossScaleOptimizer(...)) instead. (If the mixed_float16 policy is set before, "
                "DistributedOptimizer adds the LossScaleOptimizer automatically.)"
            )
        compiled = hasattr(owner, "jit_compile") and hasattr(owner, "train_function")
        if compiled and getattr(owner, "optimizer", None) is optimizer:
            turn_xla_off(owner)
        if frame.f_back is None:
            return
        frame = frame.f_back


def turn_xla_off(model: Any) -> None:
    """Make `model` train without XLA, which Keras' default "auto" may turn on."""
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
