"""Refusals of unsupported uses of `DistributedOptimizer`, before anything is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from accordion_hvd import check
from accordion_hvd.comm.horovod.torch import hvd
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import Serving
from accordion_hvd.validate import OWNER, Use, growth_of, method_of


def check_groups(groups: Any) -> None:
    """Raise ValueError for a list of groups whose members are not parameters, once each."""
    members = [p for group in groups for p in group] if isinstance(groups, list) else []
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(p) for p in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")


def check_names(param_groups: list[dict[str, Any]], named: Any) -> list[tuple[str, Any]]:
    """Names and parameters, one each.

    Raises:
        ValueError: no tuples, a name twice, or a parameter without a name.
    """
    if named is None:
        return [
            (f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(param_groups)
            for j, p in enumerate(group["params"])
        ]
    named = list(named)
    if any(not isinstance(item, tuple) for item in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(n for n, _ in named).items() if count > 1)
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    names = {parameter: name for name, parameter in reversed(named)}
    mine = [p for group in param_groups for p in group["params"]]
    missing = [tuple(p.shape) for p in mine if p not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(missing)} of {len(mine)}, with shapes {missing[:5]}."
        )
    kept = set(mine)
    return [(name, p) for p, name in reversed(names.items()) if p in kept]


def check_parameters(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for parameters that are only a part of themselves."""
    for name, parameter in named:
        kind = type(parameter).__name__
        inner = type(getattr(parameter, "data", None)).__name__
        if (
            "DTensor" in (kind, inner)
            or "FlatParameter" in kind
            or hasattr(parameter, "_is_flat_param")
        ):
            raise ValueError(
                f"{OWNER}: parameter {name!r} is sharded ({kind}: FSDP or DTensor). Its framework "
                "exchanges gradients itself; accordion_hvd needs whole tensors on every rank."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # frozen for ever, as quantised weights are
        if not (parameter.is_floating_point() and parameter.layout == torch.strided):
            raise ValueError(
                f"{OWNER}: parameter {name!r} is a {parameter.dtype} tensor of layout "
                f"{parameter.layout}, but must be a dense tensor of real floating-point numbers."
            )


_OF_OWN_RULES = {"betas", "eps", "rho", "alpha", "etas", "lambd", "max_iter", "lr_decay"}
"""Settings of optimizers that do more than to take lr times what they are given."""


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step adds nothing to lr times the gradient: SGD without momentum."""
    groups = optimizer.param_groups
    return not any(g.get("momentum") or not _OF_OWN_RULES.isdisjoint(g) for g in groups)


def use_of(
    optimizer: torch.optim.Optimizer,
    process_set: Any,
    total: bool,
    skip: Sequence[str],
    passes: int,
) -> Use:
    """Return what `validate` must know of an optimizer and its job."""
    return Use(
        module="accordion_hvd.torch",
        ranks=hvd.size(),
        members=process_set.size(),
        optimizer=type(optimizer).__name__,
        plain=is_plain(optimizer),
        one_rate=len({float(group["lr"]) for group in optimizer.param_groups}) == 1,
        total=total,
        skip=tuple(skip),
        passes=passes,
    )


def check_optimizer(serving: Serving, optimizer: torch.optim.Optimizer, scaled: bool) -> None:
    """Check what `validate` cannot know: closures that run again, and gradient scaling.

    Args:
        serving: the policy or the averaging method.
        optimizer: the wrapped optimizer.
        scaled: whether a `GradScaler` was given.

    Raises:
        ValueError: it does not suit `serving`.
    """
    growth, method = growth_of(serving), method_of(serving)
    ahead = isinstance(serving, Policy) and serving.observers.any("decides_ahead")
    if ahead and isinstance(optimizer, torch.optim.LBFGS):
        allowed = "one that looks at each batch once, where Accordion decides for the whole model"
        check.refuse(OWNER, "optimizer", "LBFGS", allowed)
    if scaled and growth is not None:
        allowed = f"left out with batch_size={growth.sizes}: it unscales gradients that have "
        check.refuse(OWNER, "grad_scaler", "given", allowed + "yet to be added to; use bfloat16")
    if scaled and method is not None:
        allowed = f"left out with {method!r}: each rank skips its own steps"
        check.refuse(OWNER, "grad_scaler", "given", allowed)
