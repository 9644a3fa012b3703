"""Broadcasts at the start of training."""

from __future__ import annotations

from typing import Any

import torch

from accordion_hvd.comm.horovod import process_sets
from accordion_hvd.comm.horovod.torch import hvd


def init(*args: Any, **kwargs: Any) -> Any:
    """Start Horovod; over MPI so that process sets can be added later. Arguments are Horovod's."""
    process_sets.let_add()
    return hvd.init(*args, **kwargs)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give every rank the parameters of `root_rank`; Horovod's, but takes any iterable.

    Args:
        params: a dict such as `model.state_dict()`, or tensors or (name, tensor) pairs such as
            `model.named_parameters()`.
        root_rank: the rank whose values are taken.

    Raises:
        ValueError: `params` is none of these.
    """
    if not isinstance(params, (dict, list)):
        try:
            params = list(params)
        except TypeError:
            raise ValueError(f"invalid params of type: {type(params)}") from None
    if isinstance(params, dict):
        params = {name: value for name, value in params.items() if isinstance(value, torch.Tensor)}
        hvd.broadcast_parameters({k: _carried(v) for k, v in params.items()}, root_rank)
        return
    pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    hvd.broadcast_parameters([(name, _carried(p)) for name, p in pairs], root_rank)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a dtype that Horovod carries (it has no bfloat16)."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16)
    return tensor


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Give every rank the optimizer state and settings of `root_rank`; weights are left alone.

    (Horovod's own takes an optimizer step with zero gradients first, which changes weights where
    there is weight decay.)

    Args:
        optimizer: a plain or distributed optimizer.
        root_rank: the rank whose state is taken.
        model: accepted for compatibility.

    Raises:
        ValueError: the optimizer is an LBFGS, whose state is no set of tensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    tensors: list[torch.Tensor] = []
    outline = _outline(optimizer.state_dict(), tensors)
    outline = hvd.broadcast_object(outline, root_rank, name="accordion.optimizer_state")
    mine = hvd.rank() == root_rank
    state = _fill(outline, tensors if mine else None, root_rank)
    if not mine:
        optimizer.load_state_dict(state)
    elif hasattr(optimizer, "doubt"):
        optimizer.doubt()  # others may have to be told that all was theirs


class _Place:
    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number, self.shape, self.dtype = number, tuple(tensor.shape), tensor.dtype
        self.device = tensor.device.type


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with its tensors taken out."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1, value)
    if isinstance(value, dict):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _fill(value: Any, tensors: list[torch.Tensor] | None, root: int) -> Any:
    if isinstance(value, _Place):
        empty = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        tensor = empty if tensors is None else tensors[value.number]
        name = f"accordion.optimizer_state.{value.number}"
        return hvd.broadcast(_carried(tensor), root, name=name).view(value.dtype)
    if isinstance(value, dict):
        return {key: _fill(item, tensors, root) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(item, tensors, root) for item in value)
    return value
