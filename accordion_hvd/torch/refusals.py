"""What `DistributedOptimizer` cannot do, said in a sentence before anything has happened."""

from __future__ import annotations

from collections import Counter
from typing import Any

import horovod.torch as hvd
import torch

from accordion_hvd import check
from accordion_hvd.averaging.base import check_use, need_plain
from accordion_hvd.optimizers import refuse_rules
from accordion_hvd.policy import Policy, levers

WHO = "DistributedOptimizer"


def check_arguments(op: Any, predivide: float, passes: int, groups: Any) -> None:
    """Raise ValueError for arguments that make no sense."""
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        check.refuse(WHO, "op", op, "hvd.Average, hvd.Sum or hvd.Adasum")
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    check_passes(passes)
    _check_groups(groups)


def check_passes(passes: int) -> None:
    """Raise ValueError unless backward_passes_per_step is a positive integer."""
    if not check.is_integer(passes) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0 and an integer, but is {passes!r}")


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not (isinstance(groups, list) or (check.is_integer(groups) and groups >= 0)):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of torch.Tensor."
        )
    members = [p for group in groups for p in group] if isinstance(groups, list) else []
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(p) for p in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")


def check_adasum(ours: bool, compression: Any) -> None:
    """Raise ValueError for Adasum with our compression."""
    if ours:
        raise ValueError(
            f"{WHO}: op=hvd.Adasum cannot be combined with compression={compression!r}: Adasum is "
            "not an average. Use op=hvd.Average, or Adasum with hvd.Compression."
        )


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
                f"{WHO}: parameter {name!r} is sharded ({kind}: FSDP or DTensor). Its framework "
                "exchanges gradients itself; accordion_hvd needs whole tensors on every rank."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # frozen for ever, as quantised weights are
        if not (parameter.is_floating_point() and parameter.layout == torch.strided):
            raise ValueError(
                f"{WHO}: parameter {name!r} is a {parameter.dtype} tensor of layout "
                f"{parameter.layout}, but must be a dense tensor of real floating-point numbers."
            )


def check_output(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where a finished direction would get momentum a second time."""
    if policy.target != "gradient":
        check.refuse(WHO, "compression", policy, "one whose target is the gradient")
    if policy.output != "update":
        return
    refuse_rules(policy, "accordion_hvd.torch")
    for group in optimizer.param_groups:
        if group.get("momentum") or not _OF_OWN_RULES.isdisjoint(group):
            raise ValueError(
                f"{WHO}: {policy!r} returns finished updates, momentum included, but "
                f"{type(optimizer).__name__} has momentum or step sizes of its own; use plain SGD, "
                "without momentum, inside."
            )


_OF_OWN_RULES = {"betas", "eps", "rho", "alpha", "etas", "lambd", "max_iter", "lr_decay"}
"""Settings of optimizers that do more than to take lr times what they are given."""


def check_batches(policy: Policy, optimizer: Any, ranks: int, scaled: bool) -> None:
    """Raise ValueError for what does not go with batches that grow, or models that differ."""
    if policy.whole and isinstance(optimizer, torch.optim.LBFGS):
        allowed = "one that looks at each batch once, where Accordion decides for the whole model"
        check.refuse(WHO, "optimizer", "LBFGS", allowed)
    if policy.batch_size is None:
        return
    levers.share(policy, policy.batch_size, ranks)
    if scaled:
        allowed = f"left out with batch_size={policy.batch_size}: it unscales gradients that have "
        check.refuse(WHO, "grad_scaler", "given", allowed + "yet to be added to; use bfloat16")


def check_averaging(
    method: Any, optimizer: torch.optim.Optimizer, total: bool, scaled: bool, skip: tuple[str, ...]
) -> None:
    """Raise ValueError for what does not go with a method that averages models."""
    check_use(WHO, method, total, skip)
    if scaled:
        allowed = f"left out with {method!r}: each rank skips its own steps"
        check.refuse(WHO, "grad_scaler", "given", allowed)
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    more = any(g.get("momentum") or not _OF_OWN_RULES.isdisjoint(g) for g in optimizer.param_groups)
    need_plain(WHO, method, type(optimizer).__name__, not more and len(rates) == 1)
