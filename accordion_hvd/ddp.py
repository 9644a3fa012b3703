"""A communication hook for `DistributedDataParallel`, with every compressor and policy.

```python
import torch
from accordion_hvd import Accordion, PowerSGD, ddp

torch.distributed.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(network)
policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader))
state = ddp.register(model, policy, optimizer=optimizer)
```
The training loop does not change: DDP averages gradients during the backward pass, so they can be
clipped right after it, and `no_sync()` accumulates them.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from accordion_hvd import check
from accordion_hvd.comm.agreement import largest
from accordion_hvd.comm.torch_distributed.process_sets import of_group
from accordion_hvd.core.base import ResidualDtype
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.engine.ledger import LedgerOption, as_ledger
from accordion_hvd.resolve import Compression
from accordion_hvd.torch import validation
from accordion_hvd.torch.hooked import HookedReducer, suitable

__all__ = ["State", "hook", "register"]

OWNER = "ddp.register"

Future: TypeAlias = Any  # torch.futures.Future[torch.Tensor]
Named: TypeAlias = Sequence[tuple[str, torch.Tensor]]


def register(
    model: torch.nn.parallel.DistributedDataParallel,
    compression: Compression,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: Callable[[], float] | None = None,
    skip: Sequence[str] = (),
    guard: Mode | None = None,
    guard_every: int | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    ledger: LedgerOption = None,
    residual_dtype: ResidualDtype = "float32",
) -> State:
    """Register a hook that averages the gradients of `model` with compression.

    Args:
        model: the `DistributedDataParallel`. It must not have a hook yet.
        compression: compressor, policy or spec string, as for `DistributedOptimizer`.
        optimizer: the optimizer, whose learning rates policies such as `Accordion` watch.
        lr: function that returns the learning rate, if there is no optimizer yet; `Displacement`
            and `Goodput` need the optimizer.
        skip: shell-style patterns of the names of parameters whose gradients are sent uncompressed.
        guard: reaction to replicas that differ, as for `DistributedOptimizer`.
        guard_every: number of steps between comparisons of the replicas.
        grad_scaler: the `GradScaler`, if there is one. Residuals are then stored in unscaled units.
        ledger: record of the steps, as for `DistributedOptimizer`.
        residual_dtype: dtype of stored residuals, as for `DistributedOptimizer`.

    Returns:
        The state of the hook, with `exchange.stats()`, `end_window()` and `state_dict()`.

    Raises:
        TypeError: if `model` is not a `DistributedDataParallel`.
        ValueError: if `compression` does not suit a hook.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"{OWNER}: model is a {type(model).__name__}, but must be a DistributedDataParallel."
        )
    state = State(
        compression, model.module, optimizer=optimizer, lr=lr, skip=skip, guard=guard,
        guard_every=guard_every, grad_scaler=grad_scaler, ledger=ledger,
        process_group=model.process_group, residual_dtype=residual_dtype,
    )  # fmt: skip
    state._finds_unused = model.find_unused_parameters or model.static_graph
    state.connect()
    model.register_comm_hook(state, hook)
    return state


def hook(state: State, bucket: Any) -> Future:
    """Average the gradients of one of DDP's buckets; pass it to DDP together with a `State`.

    Args:
        state: the state.
        bucket: the `torch.distributed.GradBucket`.

    Returns:
        A future of the bucket's buffer, with the averages. Futures complete with the last bucket.
    """
    return state.connect().average(bucket)


# DDP compares the annotations, which must not be strings.
hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


class State:
    """State of the hook: policy, compressors, residuals.

    `register` makes one. Frameworks that register hooks themselves take a state and `hook`. Its
    collectives begin with the first backward pass, so it can be made before
    `init_process_group`.

    Its other arguments are those of `register`.

    Args:
        compression: compressor, policy or spec string, as for `DistributedOptimizer`.
        model: the module that is, or will be, wrapped; it names the parameters.
        process_group: ranks that average. Default: all ranks.

    Raises:
        ValueError: if `compression` does not suit a hook.
        TypeError: if `compression` is no compressor, policy or spec string.
    """

    def __init__(
        self,
        compression: Compression,
        model: torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr: Callable[[], float] | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        ledger: LedgerOption = None,
        residual_dtype: ResidualDtype = "float32",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        resolved = suitable(
            OWNER, compression, optimizer, skip, lr=lr, residual_dtype=residual_dtype
        )
        self.policy: Any = resolved.serving
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        named = [(name, p) for name, p in model.named_parameters() if name not in ignored]
        self._named = validation.plain_names(named)
        self._own = frozenset(map(id, model.parameters()))
        validation.check_parameters(self._named)
        self._group, self._optimizer = process_group, optimizer
        self._options = {
            "skip": skip, "scaler": grad_scaler, "ledger": as_ledger(ledger), "lr": lr,
            "guard": Guard(guard, guard_every, resolved.guard), "residual_dtype": residual_dtype,
        }  # fmt: skip
        self._finds_unused = True  # unless `register` knows better
        self._passes = Passes([parameter for _, parameter in self._named])
        self._reducer: BucketReducer | None = None
        self._loaded: dict[str, Any] | None = None

    def connect(self) -> BucketReducer:
        """Return the reducer; the first call, after `init_process_group`, makes it."""
        if self._reducer is None:
            optimizer = self._optimizer
            reducer = BucketReducer(
                self._named, self.policy, of_group(self._group),
                lambda: optimizer, counted=self._passes, **self._options,
            )  # fmt: skip
            reducer.own, reducer.finds_unused = self._own, self._finds_unused
            if self._loaded is not None:
                reducer.adopt(self._loaded)
            self._reducer = reducer
        return self._reducer

    @property
    def exchange(self) -> Exchange:
        """Return the exchange, with `stats()` (bytes and times), `levels()` and the policy."""
        return self.connect().exchange

    @property
    def exchange_owner(self) -> Any:
        """Return the object that `hvd.save_state(only=[state])` saves."""
        return self.connect()

    def end_window(self) -> None:
        """End a window of the policy (normally an epoch); call it on every rank."""
        self.policy.end_window()

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, levels and policy of this rank; each rank must save its own.

        `hvd.save_state` saves all ranks' states, for any number of ranks.
        """
        begun = self._reducer is not None and self._reducer.exchange.steps > 0
        return {"exchange": checkpoint.snapshot(self.exchange) if begun else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()` of this rank.

        If ranks load the state of another rank, all ranks discard their residuals.

        Raises:
            ValueError: if the state belongs to another model or policy, or lacks a key; nothing has
                changed then. Before `init_process_group`, the first step raises it.
        """
        check.has("ddp.State", "state_dict", state_dict, ("exchange",))
        if self._reducer is not None:
            self._reducer.adopt(state_dict["exchange"])
        self._loaded = state_dict["exchange"]


class BucketReducer(HookedReducer):
    """A reducer whose gradients are in DDP's buckets.

    DDP hands over bucket after bucket during the backward pass. The exchange of a bucket batch
    starts as soon as its gradients are there; the last bucket waits for all of them. The bucket
    batches do not depend on DDP's buckets, which DDP arranges anew after the first step.
    """

    hooked = False
    owner = OWNER
    finds_unused = True  # whether parameters may have no gradient in a step

    def __init__(
        self, named: Named, *args: Any, counted: Passes | None = None, **more: Any
    ) -> None:
        self.counted = counted or Passes([parameter for _, parameter in named])
        self._bucketed = set[torch.Tensor]()  # parameters in DDP's buckets
        super().__init__(named, *args, **more)
        self._views: dict[torch.Tensor, torch.Tensor] = {}  # gradients in DDP's buckets
        self._futures: list[tuple[Future, torch.Tensor]] = []

    def average(self, bucket: Any) -> Future:
        """Start the exchange of a bucket's gradients; with the last bucket, finish the exchange.

        Raises:
            ValueError: if a gradient is sparse.
        """
        buffer = bucket.buffer()  # a future of a GPU's tensor remembers the GPU's streams
        future: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self.idle:
            future.set_result(buffer)
            return future
        if buffer.is_sparse:
            raise ValueError(f"{OWNER}: a gradient is sparse, but must be dense; set sparse=False.")
        self._futures.append((future, buffer))
        parameters = bucket.parameters()
        self._views |= dict(zip(parameters, bucket.gradients(), strict=True))
        self._bucketed.update(parameters)
        for parameter in parameters:
            if parameter in self._watched:  # not if it is frozen since DDP was made
                self.arrived(parameter)
        if bucket.is_last():
            self._close()
        return future

    def _set_up(self) -> None:
        # DDP does not tell how many backward passes (`no_sync`) precede an exchange: count, once.
        first = not self.agreed
        super()._set_up()
        if first:
            passes = max(self.counted.numbers.values(), default=0)
            most = torch.tensor([passes], dtype=torch.int32, device=self.device)
            found = int(self.communicator.run(f"{self.name}.passes", largest(most)))
            self.policy.passes = found or self.policy.passes
            # From now on, counts only tell which parameters are unused.
            if not self.finds_unused:
                self.counted.end()

    def _watch_unfrozen(self) -> None:
        known = set(self._watched)
        new = [p for p in self._names if p.requires_grad and p not in known] if known else []
        late = [self._names[p] for p in new if p not in self._bucketed]
        if late:
            raise RuntimeError(
                f"{OWNER}: parameter {late[0]!r} requires a gradient now, but did not when the "
                "DistributedDataParallel was made, which does not average it; make a new one, and "
                "register again."
            )
        super()._watch_unfrozen()
        for parameter in new if self.finds_unused else ():
            self.counted.follow(parameter)
            self.counted.numbers[parameter] += 1  # in this pass, which began before

    def _close(self) -> None:
        try:
            self.finish()
        finally:
            futures, self._futures = self._futures, []
            self._views.clear()
            self.counted.numbers.clear()
        # All at the end, because a batch may have gradients of several of DDP's buckets.
        for future, buffer in futures:
            future.set_result(buffer)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._views[parameter]

    def _are_present(self, parameters: list[torch.Tensor]) -> list[bool]:
        # DDP does not tell hooks which parameters a backward pass has reached.
        return [not self.finds_unused or self.counted.numbers[p] > 0 for p in parameters]

    def _put(
        self, parameters: list[torch.Tensor], means: list[torch.Tensor], exclusive: bool
    ) -> None:
        pairs = [(self._views[p], mean) for p, mean in zip(parameters, means, strict=True)]
        if moved := [(view, mean) for view, mean in pairs if not view.is_set_to(mean)]:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))  # others are in place


class Passes:
    """Counts backward passes of parameters.

    Attributes:
        numbers: numbers of passes since the last exchange, by parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.numbers: Counter[torch.Tensor] = Counter()
        self._handles: list[Any] = []
        for parameter in parameters:
            self.follow(parameter)

    def follow(self, parameter: torch.Tensor) -> None:
        """Count the passes of a parameter, if it requires gradients."""
        if parameter.requires_grad:
            count = functools.partial(_count, weakref.ref(self))
            self._handles.append(parameter.register_post_accumulate_grad_hook(count))
            weakref.finalize(self, self._handles[-1].remove)

    def end(self) -> None:
        """Stop counting."""
        while self._handles:
            self._handles.pop().remove()


def _count(passes: weakref.ref[Passes], parameter: torch.Tensor) -> None:
    alive = passes()
    if alive is not None:
        alive.numbers[parameter] += 1
