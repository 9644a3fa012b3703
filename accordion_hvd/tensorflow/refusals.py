"""What cannot be done, said in a sentence before anything has happened."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging, check_use, need_plain
from accordion_hvd.optimizers import refuse_rules
from accordion_hvd.policy import Policy, levers
from accordion_hvd.stock import is_ours

WHO = "DistributedOptimizer"


def check_arguments(op: Any, compression: Any, predivide: float, groups: Any) -> None:
    """Raise ValueError for arguments that make no sense."""
    if op == hvd.Adasum and is_ours(compression):
        raise ValueError(
            f"{WHO}: op=hvd.Adasum cannot be combined with compression={compression!r}: Adasum is "
            "not an average. Use op=hvd.Average, or Adasum with hvd.Compression."
        )
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        check.refuse(WHO, "op", op, "hvd.Average, hvd.Sum or hvd.Adasum")
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if groups is not None and not (
        isinstance(groups, list) or (check.is_integer(groups) and groups >= 0)
    ):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of tf.Variable."
        )


def check_policy(policy: Policy, optimizer: Any = None) -> None:
    """Raise ValueError for what does not fit gradients, or an optimizer with momentum."""
    if policy.target != "gradient":
        check.refuse(WHO, "compression", policy, "one whose target is the gradient")
    if policy.output == "update":
        refuse_rules(policy, "accordion_hvd.tensorflow.keras")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if policy.output == "update" and _of_own_rules(inner):
        raise ValueError(
            f"{WHO}: {policy!r} returns finished updates, momentum included, but "
            f"{type(inner).__name__} has momentum or step sizes of its own; use plain SGD, "
            "without momentum, inside."
        )


def check_batches(policy: Policy, optimizer: Any, ranks: int) -> None:
    """Raise ValueError for what does not go with batches that grow."""
    if policy.batch_size is None:
        return
    levers.share(policy, policy.batch_size, ranks)
    sizes = f"with batch_size={policy.batch_size}"
    half = tf.keras.config.dtype_policy().name == "mixed_float16"
    if half or isinstance(optimizer, tf.keras.optimizers.LossScaleOptimizer):
        allowed = f"one without loss scaling {sizes}; use mixed_bfloat16"
        check.refuse(WHO, "optimizer", type(optimizer).__name__, allowed)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        steps = optimizer.gradient_accumulation_steps
        check.refuse(WHO, "gradient_accumulation_steps", steps, f"None {sizes}")


def check_averaging(method: Averaging, optimizer: Any, total: bool, skip: tuple[str, ...]) -> None:
    """Raise ValueError for what does not go with a method that averages models."""
    check_use(WHO, method, total, skip)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    name = type(inner).__name__
    if getattr(inner, "gradient_accumulation_steps", None):
        raise ValueError(
            f"{WHO}: {method!r} averages after each step, and {name} with "
            "gradient_accumulation_steps does not say which calls take one; leave it out and pass "
            "backward_passes_per_step to DistributedOptimizer."
        )
    if getattr(inner, "use_ema", False):
        raise ValueError(
            f"{WHO}: {name} with use_ema=True would put means of one rank's own weights in the "
            f"place of those that {method!r} averages; leave it out."
        )
    need_plain(WHO, method, name, not _of_own_rules(inner))


def _of_own_rules(inner: Any) -> bool:
    """Whether an optimizer does more than to take the learning rate times what it is given."""
    own = any(hasattr(inner, name) for name in _OF_OWN_RULES)
    return bool(getattr(inner, "momentum", 0)) or own


def refuse_models(who: str, policy: Policy) -> None:
    """Raise ValueError for a policy that averages models at times."""
    if policy.method is not None:
        allowed = (
            f"one without {policy.method!r} among its levels, which works with "
            "accordion_hvd.tensorflow.keras.DistributedOptimizer"
        )
        check.refuse(who, "compression", policy, allowed)


def check_private_gradients(
    policy: Policy, grads: Sequence[Any], variables: Sequence[Any], local: set[int]
) -> None:
    """Raise ValueError where a gradient would be used unprotected, or is not of the right kind."""
    if local:
        raise ValueError(
            f"{policy!r} is private, but {len(local)} local variable(s) are registered, which "
            "would be trained unprotected."
        )
    if not policy.several:
        return
    known = [(v, g) for v, g in zip(variables, grads, strict=True) if g is not None]
    counts = {tuple(g.shape)[0] if len(g.shape) else None for _, g in known}
    if len(counts) > 1 or any(tuple(g.shape)[1:] != tuple(v.shape) for v, g in known):
        raise ValueError(
            f"{policy!r} wants gradients of single contributors, along a new first dimension "
            "(accordion_hvd.privacy.tensorflow.gradients gives them), equally many of each."
        )


_OF_OWN_RULES = ("beta_1", "beta_2", "rho", "epsilon", "learning_rate_power")
"""Settings of optimizers that do more than to take the learning rate times what they are given."""


def check_context() -> None:
    """Raise RuntimeError within XLA or a distribution strategy."""
    check_strategy()
    if tf.executing_eagerly():
        return
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "Horovod's operations cannot be compiled by XLA: pass jit_compile=False to "
            "model.compile() or tf.function() (in fit(), the BroadcastGlobalVariablesCallback "
            "does it for you)."
        )


def check_strategy() -> None:
    """Raise RuntimeError within a distribution strategy."""
    if tf.distribute.has_strategy():
        kind = type(tf.distribute.get_strategy()).__name__
        raise RuntimeError(
            f"{WHO} does not work within tf.distribute ({kind}): both would exchange gradients. "
            "Leave the strategy's scope; Horovod runs one process for each device."
        )


def check_keras_caller(optimizer: Any) -> None:
    """Refuse to be wrapped in loss scaling; turn XLA off in the model that builds `optimizer`.

    Keras gives an optimizer no handle on who uses it, but both `LossScaleOptimizer` and `fit` call
    its `build`, before anything is traced.

    Raises:
        TypeError: a LossScaleOptimizer contains the optimizer.
    """
    frame = sys._getframe(2)
    for _ in range(12):
        owner = frame.f_locals.get("self")
        if getattr(owner, "inner_optimizer", None) is optimizer:
            raise TypeError(
                "LossScaleOptimizer(DistributedOptimizer(...)) would exchange gradients only on "
                "ranks without an overflow, and hang; write DistributedOptimizer("
                "LossScaleOptimizer(...)) instead. (Under the mixed_float16 policy, "
                "DistributedOptimizer does so by itself if the policy is set before.)"
            )
        compiled = hasattr(owner, "jit_compile") and hasattr(owner, "train_function")
        if compiled and getattr(owner, "optimizer", None) is optimizer:
            turn_xla_off(owner)
        if frame.f_back is None:
            return
        frame = frame.f_back


def turn_xla_off(model: Any) -> None:
    """Have `model` train without XLA (Keras' "auto" would turn it on)."""
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
