"""Checks that a resolved `compression=` suits the optimizer and the job, before any communication.

Checks that need the types of one framework are in its `validation` module.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.base import RESIDUAL_DTYPES
from accordion_hvd.optimizers.base import UpdateRule
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import Resolved, is_ours

OWNER = "DistributedOptimizer"

MEASURED = ("SGD", "Adam", "AdamW")
"""Optimizers with which docs/choosing.md has losses of compression."""


@dataclass(frozen=True)
class Use:
    """Properties of a wrapper and its job that the compression must suit.

    Attributes:
        module: name of the module with this framework's compressed optimizers.
        members: number of ranks that exchange.
        optimizer: name of the wrapped optimizer's class.
        plain: whether a step is exactly lr times the gradient: SGD without momentum.
        one_rate: whether all parameters have the same learning rate.
        total: whether gradients are summed instead of averaged.
        skip: patterns of the names of tensors that are sent uncompressed.
        passes: number of backward passes per exchange.
        residual_dtype: dtype in which residuals are stored between steps.
        owner: name of the wrapper in error messages.
        takes_steps: whether the wrapper takes the optimizer's steps; a tape does not.
        knows_optimizer: whether the wrapper knows the optimizer; a tape does not.
        knows_rate: whether the wrapper knows the learning rate.
    """

    module: str
    ranks: int
    members: int
    optimizer: str = ""
    plain: bool = True
    one_rate: bool = True
    total: bool = False
    skip: tuple[str, ...] = ()
    passes: int = 1
    residual_dtype: str = "float32"
    owner: str = OWNER
    takes_steps: bool = True
    knows_optimizer: bool = True
    knows_rate: bool = True


def validate(resolved: Resolved, use: Use) -> None:
    """Check that a resolved `compression=` suits its use, with equal results on all ranks.

    Raises:
        ValueError: if it does not; the message names the argument, its value and what is allowed.
    """
    check.one_of(use.owner, "residual_dtype", use.residual_dtype, RESIDUAL_DTYPES)
    serving, growth, method = resolved.serving, resolved.growth, resolved.method
    if not use.takes_steps:
        _check_without_steps(resolved, use)
    if isinstance(serving, Averaging):
        if use.residual_dtype != "float32":
            allowed = f"'float32' with {serving!r}, which averages models instead of gradients"
            check.refuse(use.owner, "residual_dtype", use.residual_dtype, allowed)
        _check_averaging(serving, use)
        return
    _check_levels(serving, use)
    _check_evidence(serving, use)
    _check_private(serving, use)
    if serving.gate is not None and use.knows_optimizer and use.optimizer not in MEASURED:
        warnings.warn(
            f"{use.owner}: the gate chooses by time alone, and what compression costs in accuracy "
            f"was measured with {', '.join(MEASURED)}, not with {use.optimizer}. Compare the loss "
            "of a short training with that of compression=Dense().",
            stacklevel=2,
        )
    if growth is not None:
        growth.share(use.members)
    if method is not None:
        _check_averaging(method, use)


def check_arguments(op: Any, known: Sequence[Any], predivide: float, groups: Any) -> None:
    """Raise ValueError if an argument that Horovod's own wrapper has, too, is not allowed.

    `known` are Horovod's constants for average, sum and Adasum, in this order.
    """
    if op not in known:
        check.refuse(OWNER, "op", op, "hvd.Average, hvd.Sum or hvd.Adasum")
    if predivide != 1.0 and op != known[0]:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    fine = groups is None or isinstance(groups, list) or (check.is_integer(groups) and groups >= 0)
    if not fine:
        check.refuse(OWNER, "groups", groups, "a non-negative integer or a list of lists")


def check_adasum(compression: Any) -> None:
    """Raise ValueError if Adasum is combined with a compression of this package."""
    if is_ours(compression):
        raise ValueError(
            f"{OWNER}: op=hvd.Adasum cannot be combined with compression={compression!r}: Adasum "
            "is not an average. Use op=hvd.Average, or Adasum with hvd.Compression."
        )


def check_passes(passes: Any, policy: Policy | None = None) -> None:
    """Raise ValueError for a number of backward passes that is not allowed, or not by `policy`."""
    check.integer(OWNER, "backward_passes_per_step", passes, least=1)
    if policy is not None and policy.scope == "samples" and passes != 1:
        raise ValueError(
            f"backward_passes_per_step is {passes}, but must be 1 with {policy!r}: the gradients "
            "of single contributors cannot be accumulated."
        )


def _check_without_steps(resolved: Resolved, use: Use) -> None:
    method = resolved.method
    if method is not None:
        allowed = f"one without {method!r}, which works with {use.module}.DistributedOptimizer"
        check.refuse(use.owner, "compression", resolved.serving, allowed)
    if resolved.growth is not None:
        allowed = "one without batch_size: a tape takes no steps and knows no learning rate"
        check.refuse(use.owner, "compression", resolved.serving, allowed)


def _check_levels(policy: Policy, use: Use) -> None:
    if policy.output == "model":
        check.refuse(use.owner, "compression", policy, "one that averages gradients")
    if policy.output != "update":
        return
    rules = [level for level in policy.levels("") if isinstance(level, UpdateRule)]
    if rules:  # a rule needs the weights and settings, which a wrapper does not pass on
        name = type(rules[-1]).__name__
        raise ValueError(
            f"{use.owner}: compression is {policy!r}, but {name} is an optimizer: use "
            f"{use.module}.{name} instead of another optimizer."
        )
    if not use.plain:
        raise not_plain(policy, use.optimizer, use.owner)


def not_plain(policy: Policy, optimizer: str, owner: str = OWNER) -> ValueError:
    """Return the error for an optimizer whose step is not lr times what the policy returns."""
    return ValueError(
        f"{owner}: {policy!r} returns finished updates, momentum included, but {optimizer} has "
        "momentum or step sizes of its own; wrap plain SGD without momentum instead."
    )


def _check_evidence(policy: Policy, use: Use) -> None:
    steps = any(x.needs_optimizer for x in policy.evidence)
    if steps and use.total:
        check.refuse(use.owner, "op", "hvd.Sum", f"hvd.Average with {policy!r}")
    if steps and not use.knows_optimizer:
        allowed = (
            f"one that needs no step sizes, since {use.owner} does not know the optimizer; pass "
            "optimizer= if that is an argument, or use DistributedOptimizer"
        )
        check.refuse(use.owner, "compression", policy, allowed)
    if policy.watches_rates and not (use.knows_optimizer or use.knows_rate):
        allowed = f"the optimizer, whose learning rate {policy!r} watches; or pass lr=, a function"
        check.refuse(use.owner, "optimizer", None, f"{allowed} that returns it")


def _check_private(policy: Policy, use: Use) -> None:
    if not policy.observers.any("private"):
        return
    if use.members < use.ranks:
        raise ValueError(
            f"{policy!r} is private and must serve all {use.ranks} ranks, but the process set has "
            f"{use.members}: the other ranks would train on their own gradients."
        )
    check_passes(use.passes, policy)


def _check_averaging(method: Averaging, use: Use) -> None:
    if use.total:
        check.refuse(use.owner, "op", "hvd.Sum", f"hvd.Average with {method!r}")
    if use.skip:
        allowed = f"left out with {method!r}, which averages all parameters"
        check.refuse(use.owner, "skip", use.skip, allowed)
    if method.inner == "sgd" and not (use.plain and use.one_rate):
        raise ValueError(
            f"{use.owner}: {method!r} requires steps of plain SGD, with one learning rate and "
            f"without momentum, but the wrapped optimizer {use.optimizer} takes other steps."
        )
