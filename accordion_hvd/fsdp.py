"""Compression between replicas of a sharded model (FSDP2, hybrid sharding).

```python
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from accordion_hvd import PowerSGD, fsdp

mesh = init_device_mesh("cuda", (hosts, ranks_per_host), mesh_dim_names=("replicas", "shards"))
for layer in model.layers:
    fully_shard(layer, mesh=mesh["shards"])
fully_shard(model, mesh=mesh["shards"])
state = fsdp.between(model, mesh["replicas"], PowerSGD(4))
```
FSDP shards parameters and averages gradients over the inner mesh, which normally is a host with
quick links. The averages between the replicas of a shard, over slower links, are compressed. The
training loop does not change: after `backward()`, the gradients are averaged over all ranks.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accordion_hvd import check
from accordion_hvd.comm.torch_distributed.process_sets import of_group
from accordion_hvd.core.base import ResidualDtype
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.ledger import LedgerOption
from accordion_hvd.ops import torch as xp
from accordion_hvd.resolve import Compression
from accordion_hvd.torch import validation
from accordion_hvd.torch.hooked import BackwardReducer, HookedState, suitable
from accordion_hvd.validate import check_passes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["State", "between"]

OWNER = "fsdp.between"

_reducers: Any = weakref.WeakKeyDictionary()
"""Reducers by model: they serve it even if the caller drops the state."""


def between(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    compression: Compression,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: Callable[[], float] | None = None,
    passes: int = 1,
    skip: Sequence[str] = (),
    guard: Mode | None = None,
    guard_every: int | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    ledger: LedgerOption = None,
    residual_dtype: ResidualDtype = "float32",
) -> State:
    """Average the gradients of a sharded model between its replicas, with compression.

    The shards of the first replica are broadcast to the others. Collective.

    Args:
        model: the model, all of whose parameters `fully_shard` has sharded.
        mesh: the device mesh of the replicas of this rank's shards. Of a mesh with two dimensions,
            the first one counts.
        compression: compressor, policy or spec string, as for `DistributedOptimizer`. Compressors
            see a shard of each parameter, some of its rows. A policy decides for these.
        optimizer: the optimizer, whose learning rates policies such as `Accordion` watch.
        lr: function that returns the learning rate, if there is no optimizer yet; `Displacement`
            and `Goodput` need the optimizer.
        passes: number of backward passes whose gradients are summed before replicas exchange them.
        skip: shell-style patterns of the names of parameters whose gradients are sent uncompressed.
        guard: reaction to replicas that differ, as for `DistributedOptimizer`.
        guard_every: number of steps between comparisons of the replicas.
        grad_scaler: the `GradScaler`, if there is one. Residuals are then stored in unscaled units.
        ledger: record of the steps, as for `DistributedOptimizer`.
        residual_dtype: dtype of stored residuals, as for `DistributedOptimizer`.

    Returns:
        The state, with `exchange.stats()`, `end_window()` and `state_dict()`.

    Raises:
        ValueError: if a parameter is not sharded, or `compression` does not suit.
        TypeError: if `compression` is no compressor, policy or spec string.
    """
    named = validation.plain_names(model.named_parameters())
    named = [(n, p) for n, p in named if p.requires_grad or hasattr(p, "to_local")]
    for name, parameter in named:
        if not hasattr(parameter, "to_local"):
            raise ValueError(
                f"{OWNER}: parameter {name!r} is not sharded; call fully_shard on the model first."
            )
    validation.check_not_averaged(named, OWNER)
    check_passes(passes)
    resolved = suitable(OWNER, compression, optimizer, skip, passes, lr, residual_dtype)
    group = mesh.get_group(0) if mesh.ndim > 1 else mesh.get_group()
    shards = [(name, p) for name, p in named if _local(p).numel()]  # small tensors have few rows
    reducer = ShardReducer(
        shards, resolved.serving, of_group(group), lambda: optimizer,
        lr=lr, passes=passes, skip=skip, scaler=grad_scaler, ledger=ledger,
        guard=Guard(guard, guard_every, resolved.guard), residual_dtype=residual_dtype,
    )  # fmt: skip
    _reducers[model], reducer.own = reducer, frozenset(map(id, model.parameters()))
    source = dist.get_process_group_ranks(group)[0]
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(_local(tensor), source, group)
    return State(reducer)


class State(HookedState):
    """State of the exchange between replicas; made by `between`.

    It can be part of a checkpoint of `torch.distributed.checkpoint`: `dcp.save({"model": ...,
    "compression": state})` saves the residuals of each rank. Load it on as many ranks.
    """

    def state_dict(self) -> dict[str, bytes]:
        """Return residuals, levels and policy of this rank, as bytes under the rank's name."""
        begun = self.exchange.steps > 0
        file = io.BytesIO()
        torch.save(checkpoint.snapshot(self.exchange) if begun else None, file)
        return {f"rank{dist.get_rank()}": file.getvalue()}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Load a `state_dict()` of this rank.

        Raises:
            ValueError: if the state is that of another rank, model or policy, or was cut short;
                nothing has changed then.
        """
        key = f"rank{dist.get_rank()}"
        check.has("fsdp.State", "state_dict", state_dict, (key,))
        try:
            saved = torch.load(io.BytesIO(state_dict[key]), weights_only=True)
        except Exception as error:  # of any kind: bytes may be anything
            raise ValueError(f"fsdp.State: {key!r} of the state_dict is no state.") from error
        self._reducer.adopt(saved)


class ShardReducer(BackwardReducer):
    """A reducer of this rank's shards, which exchanges them between the replicas of a shard.

    FSDP runs the hooks of a sharded parameter when its gradient has been reduced.
    """

    owner = OWNER

    def replicas(self) -> dict[str, torch.Tensor]:
        """Return the shards of all parameters."""
        return {name: _local(parameter) for parameter, name in self._names.items()}

    def _tensor_infos(self, parameters: Sequence[torch.Tensor]) -> dict[Any, TensorInfo]:
        return {
            p: TensorInfo(self._names[p], tuple(_local(p).shape), xp.dtype(p), str(p.device))
            for p in parameters
        }

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = parameter.grad
        return torch.zeros_like(_local(parameter)) if grad is None else _local(grad)

    def _put(
        self, parameters: list[torch.Tensor], means: list[torch.Tensor], exclusive: bool
    ) -> None:
        for parameter, mean in zip(parameters, means, strict=True):
            if parameter.grad is None:  # but another replica has one
                parameter.grad = torch.zeros_like(parameter)
            _local(parameter.grad).copy_(_local(mean))


def _local(tensor: Any) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached
