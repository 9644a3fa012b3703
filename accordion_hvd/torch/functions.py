"""Initialization of the engine, and broadcasts before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from accordion_hvd import check
from accordion_hvd.comm import timeouts
from accordion_hvd.torch import engines
from accordion_hvd.torch.engines import hvd


def init(*args: Any, engine: str | None = None, **kwargs: Any) -> Any:
    """Connect the ranks; takes the arguments of `horovod.torch.init`, and `engine`.

    Ranks that horovodrun or mpirun has started are connected by Horovod. If MPI started them,
    process sets can be added later. Ranks that torchrun has started, or for which the script has
    called `torch.distributed.init_process_group`, are connected by torch.distributed; Horovod is
    not needed then.

    Args:
        args: positional arguments of `horovod.torch.init`.
        engine: engine that carries compressed gradients, "horovod" or "torch". With "torch",
            Horovod starts and coordinates the ranks of horovodrun and mpirun, but
            torch.distributed carries their gradients. Default: the environment variable
            ACCORDION_HVD_ENGINE if set, else the engine that connects the ranks.
        kwargs: keyword arguments of `horovod.torch.init`.

    Raises:
        ValueError: if `engine` is unknown or does not suit the launcher, or if the environment
            variable ACCORDION_HVD_TIMEOUT is no number of seconds.
        RuntimeError: if Horovod is needed and not installed.
    """
    timeouts.seconds()  # before anything starts
    engines.choose(engine)
    return engines.init(*args, **kwargs)


def shutdown() -> None:
    """Disconnect the ranks."""
    hvd.shutdown()
    engines.forget()


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcast parameters from `root_rank` to all ranks.

    Unlike Horovod's function, this one accepts any iterable.

    Args:
        params: a dict such as `model.state_dict()`, or an iterable of tensors or of (name, tensor)
            pairs, such as `model.named_parameters()`. Entries of a dict that are no tensors are
            skipped.
        root_rank: the rank that sends its values.

    Raises:
        ValueError: if `params` is neither a dict nor an iterable.
    """
    if not isinstance(params, (dict, list)):
        try:
            params = list(params)
        except TypeError:
            raise ValueError(f"invalid params of type: {type(params)}") from None
    if isinstance(params, dict):
        params = {name: value for name, value in params.items() if isinstance(value, torch.Tensor)}
        hvd.broadcast_parameters({k: _supported_view(v) for k, v in params.items()}, root_rank)
        return
    pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    hvd.broadcast_parameters([(name, _supported_view(p)) for name, p in pairs], root_rank)


def _supported_view(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bfloat16:  # which Horovod does not support
        return tensor.detach().view(torch.int16)
    return tensor


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Broadcast optimizer state and settings from `root_rank` to all ranks.

    The weights do not change. (Horovod's function first takes an optimizer step with zero
    gradients, which changes the weights if there is weight decay.) As with Horovod's function, the
    gradients of an optimizer without state are zeros afterwards, not None.

    Args:
        optimizer: plain or distributed optimizer.
        root_rank: the rank that sends its state.
        model: accepted for compatibility with Horovod; not used.

    Raises:
        ValueError: if the optimizer is an LBFGS, whose state cannot be broadcast.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    tensors: list[torch.Tensor] = []
    state_dict = optimizer.state_dict()
    if not state_dict["state"]:  # scripts written for Horovod rely on gradients that are zeros then
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    # Objects travel pickled, tensors in broadcasts of their own.
    outline = _outline(state_dict, tensors)
    outline = hvd.broadcast_object(outline, root_rank, name="accordion.optimizer_state")
    is_root = hvd.rank() == root_rank
    state = _fill(outline, tensors if is_root else None, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)
    elif hasattr(optimizer, "doubt"):
        optimizer.doubt()  # the other ranks loaded this rank's state, so ranks must agree again


class _Placeholder:
    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number, self.shape, self.dtype = number, tuple(tensor.shape), tensor.dtype
        self.device = tensor.device.type


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Placeholder(len(tensors) - 1, value)
    if isinstance(value, dict):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _fill(value: Any, tensors: list[torch.Tensor] | None, root: int) -> Any:
    if isinstance(value, _Placeholder):
        empty = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        tensor = empty if tensors is None else tensors[value.number]
        name = f"accordion.optimizer_state.{value.number}"
        return hvd.broadcast(_supported_view(tensor), root, name=name).view(value.dtype)
    if isinstance(value, dict):
        return {key: _fill(item, tensors, root) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(item, tensors, root) for item in value)
    return value


# -------------------------------------------------------------------------------- batches that grow
class AccordionBatchSampler:
    """Batch sampler for `DataLoader` with the batch sizes that `Accordion(batch_size=...)` chooses.

    ```python
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
    batches = hvd.AccordionBatchSampler(sampler, optimizer)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    ```
    With this sampler, each batch is one step and no gradients are accumulated. The batch size
    changes only between epochs: at the beginning of an epoch, the policy takes a decision that is
    due, and all batches of the epoch have the resulting size. Call `end_window()` and learning rate
    schedulers before the next epoch begins.

    Args:
        sampler: iterable of this rank's indices; the same number on all ranks.
        optimizer: the result of `DistributedOptimizer`.
        drop_last: whether to drop the last, incomplete batch of an epoch. If False, the last batch
            is smaller and counts like the others.

    Raises:
        ValueError: if the optimizer's policy does not choose batch sizes.
    """

    def __init__(self, sampler: Iterable[int], optimizer: Any, drop_last: bool = False) -> None:
        growth: Any = getattr(optimizer, "growth", None)
        if growth is None:
            allowed = "a DistributedOptimizer with compression=Accordion(batch_size=(small, large))"
            check.refuse(self, "optimizer", type(optimizer).__name__, allowed)
        self.sampler, self.optimizer, self.drop_last = sampler, optimizer, drop_last
        self._growth = growth
        self._growth.loader = True

    @property
    def batch_size(self) -> int:
        """Return the present number of examples per batch on this rank."""
        ranks = self.optimizer.process_set.size()
        return self._growth.share(ranks) * self._growth.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Take a decision that is due, and iterate over the batches of one epoch."""
        self.optimizer.resize()
        size, batch = self.batch_size, []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def __len__(self) -> int:
        """Return the number of batches per epoch at the present batch size."""
        count, size = len(self.sampler), self.batch_size  # type: ignore[arg-type]
        return count // size if self.drop_last else -(-count // size)
