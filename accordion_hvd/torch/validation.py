"""Checks of the arguments of `DistributedOptimizer` that need PyTorch's types."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accordion_hvd import check
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import Resolved
from accordion_hvd.torch.engines import hvd
from accordion_hvd.validate import OWNER, Use


def check_groups(groups: Any) -> None:
    """Raise ValueError if groups contain other objects than tensors, or a tensor twice."""
    members = [p for group in groups for p in group] if isinstance(groups, list) else []
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(p) for p in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")


def check_names(param_groups: list[dict[str, Any]], named: Any) -> list[tuple[str, Any]]:
    """Return (name, parameter) pairs, one for each parameter.

    Raises:
        ValueError: if `named` contains other objects than tuples, a name is used twice, or a
            parameter has no name.
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
    named = plain_names(named)
    duplicates = sorted(name for name, count in Counter(n for n, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(duplicates)
        )
    names = {parameter: name for name, parameter in reversed(named)}
    params = [p for group in param_groups for p in group["params"]]
    missing = [tuple(p.shape) for p in params if p not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(missing)} of {len(params)}, with shapes {missing[:5]}."
        )
    known = set(params)
    return [(name, p) for p, name in reversed(names.items()) if p in known]


def plain_names(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return (name, parameter) pairs without the prefixes of `torch.compile` and of DDP."""
    pairs = [(name.replace("_orig_mod.", ""), parameter) for name, parameter in named]
    while pairs and all(name.startswith("module.") for name, _ in pairs):
        pairs = [(name.removeprefix("module."), parameter) for name, parameter in pairs]
    return pairs


def check_not_averaged(named: Iterable[tuple[str, Any]], owner: str = OWNER) -> None:
    """Raise ValueError if a DistributedDataParallel averages the gradients of these parameters."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    known = {id(parameter) for _, parameter in named}

    def averaged() -> bool:
        every = (x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel))
        return any(id(parameter) in known for module in every for parameter in module.parameters())

    if averaged():
        gc.collect()  # a module that nobody uses any more averages nothing
    if averaged():
        argument, of = ("named_parameters", "those of ") if owner == OWNER else ("model", "")
        allowed = f"{of}the module itself; to compress within it, use accordion_hvd.ddp.register"
        check.refuse(owner, argument, f"{of}a DistributedDataParallel", allowed)


def check_parameters(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for sharded parameters, and for complex or sparse ones."""
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
                "exchanges gradients itself; accordion_hvd.fsdp compresses between replicas."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # it never has a gradient, as quantized weights
        if not (parameter.is_floating_point() and parameter.layout == torch.strided):
            raise ValueError(
                f"{OWNER}: parameter {name!r} is a {parameter.dtype} tensor of layout "
                f"{parameter.layout}, but must be a dense tensor of real floating-point numbers."
            )


_MORE_THAN_SGD = {"betas", "eps", "rho", "alpha", "etas", "lambd", "max_iter", "lr_decay"}
"""Settings by which optimizers are recognized whose step is not lr times the gradient."""


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step is lr times the gradient: SGD without momentum."""
    groups = optimizer.param_groups
    return not any(g.get("momentum") or not _MORE_THAN_SGD.isdisjoint(g) for g in groups)


def use_of(
    optimizer: torch.optim.Optimizer,
    process_set: Any,
    total: bool,
    skip: Sequence[str],
    passes: int,
) -> Use:
    """Return the facts about an optimizer and its job that `validate` checks."""
    return Use(
        module="accordion_hvd.torch",
        ranks=hvd.size(),
        members=process_set.size(),
        optimizer=type(optimizer).__name__,
        plain=is_plain(optimizer),
        one_rate=len({float(group.get("lr", 0.0)) for group in optimizer.param_groups}) == 1,
        total=total,
        skip=check.patterns(skip),
        passes=passes,
    )


def check_optimizer(resolved: Resolved, optimizer: torch.optim.Optimizer, scaled: bool) -> None:
    """Check what `validate` cannot: closures that run several times, and gradient scaling.

    Raises:
        ValueError: if the optimizer or the scaler does not suit `resolved`.
    """
    serving, growth, method = resolved.serving, resolved.growth, resolved.method
    decides_ahead = isinstance(serving, Policy) and serving.observers.any("decides_ahead")
    if decides_ahead and isinstance(optimizer, torch.optim.LBFGS):
        allowed = "one that evaluates each batch once if Accordion decides for the full model"
        check.refuse(OWNER, "optimizer", "LBFGS", allowed)
    if scaled and growth is not None:
        allowed = f"left out with batch_size={growth.sizes}: it would unscale gradients before "
        check.refuse(OWNER, "grad_scaler", "given", allowed + "they are complete; use bfloat16")
    if scaled and method is not None:
        allowed = f"left out with {method!r}: each rank skips steps locally"
        check.refuse(OWNER, "grad_scaler", "given", allowed)
