"""The common part of `ddp`, `fsdp` and `torch.torchft`, which take no optimizer steps."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.comm.torch_distributed.communicator import TorchCommunicator
from accordion_hvd.comm.torch_distributed.start import watch_ranks
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.ops import torch as xp
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import Resolved, resolve
from accordion_hvd.torch import validation
from accordion_hvd.torch.reducer import Reducer
from accordion_hvd.validate import Use, validate


class HookedReducer(Reducer):
    """A reducer over torch.distributed that averages gradients before the backward pass ends."""

    open = False
    leaves_unused = True
    owner = ""
    own: frozenset[int] = frozenset()  # ids of all parameters of the model

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _reducers.add(self)
        _watch_steps()

    def take_in(self, added: list[tuple[str, torch.Tensor]]) -> None:
        """Refuse parameters of the optimizer that are not the model's."""
        shapes = [tuple(parameter.shape) for _, parameter in added if id(parameter) not in self.own]
        if not shapes:
            return  # such as those of which this rank has no rows
        allowed = "one with parameters of the model only; others would differ between ranks"
        check.refuse(self.owner, "optimizer", f"one with other parameters of {shapes=}", allowed)

    def connect(self) -> Communicator:
        if self.process_set.size() == 1:
            return LocalCommunicator(xp)
        watch_ranks()
        return TorchCommunicator(self.process_set)

    def finish(self) -> None:
        super().finish()
        # The optimizer's step follows, so these are the weights of the step before.
        step = self.exchange.steps
        if not self.idle and self.comparison_due(step):
            self.compare(step, self.checksums())


_reducers: Any = weakref.WeakSet()  # all hooked reducers


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_scaler)


def _check_scaler(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    if torch.compiler.is_compiling():
        return
    unaware = [x for x in _reducers if x.scaler is None and x.agreed]
    if not unaware or not _scaled_step():
        return
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for reducer in unaware:
        own = not members.isdisjoint(map(id, reducer._names))
        if own and any(entry.stored for entry in reducer.exchange.bucket_states):
            allowed = "the GradScaler of this training: residuals would follow its scale"
            check.refuse(reducer.owner, "grad_scaler", None, allowed)


def _scaled_step() -> bool:
    frame = sys._getframe(2)
    # GradScaler tells nobody that it calls `step`, but is on the stack then.
    for _ in range(10):
        if frame.f_code.co_filename == grad_scaler.__file__:
            return frame.f_locals["self"].is_enabled()
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


class BackwardReducer(HookedReducer):
    """A hooked reducer that finishes the exchange at the end of the backward pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._queued, self._passed = False, 0
        super().__init__(*args, **options)

    def arrived(self, parameter: torch.Tensor) -> None:
        """Count a backward pass of `parameter`, and see to it that the exchange is finished."""
        if not self._queued:
            self._queued = True
            # Callbacks run in the order in which they are queued, and FSDP's comes first.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        super().arrived(parameter)

    def _end(self) -> None:
        self._queued = False
        self._passed += 1
        if self._passed < self.passes:
            return
        self._passed = 0
        self.finish()


class HookedState:
    """The user's access to the exchange of a hooked reducer."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    @property
    def exchange(self) -> Exchange:
        """Return the exchange, with `stats()` (bytes and times), `levels()` and the policy."""
        return self._reducer.exchange

    @property
    def policy(self) -> Policy:
        return self._reducer.policy

    def end_window(self) -> None:
        """End a window of the policy (normally an epoch); call it on every rank."""
        self.policy.end_window()


def suitable(
    owner: str,
    compression: Any,
    optimizer: torch.optim.Optimizer | None,
    skip: Sequence[str],
    passes: int = 1,
    lr: Callable[[], float] | None = None,
    residual_dtype: str = "float32",
) -> Resolved:
    """Return what `compression` means, after a check that a hook can serve it.

    Raises:
        TypeError: if `compression` is none of these.
        ValueError: if a hook cannot serve the policy, or there is no such dtype.
    """
    resolved = resolve(compression)
    plain = optimizer is not None and validation.is_plain(optimizer)
    use = Use(
        module="accordion_hvd.torch", ranks=1, members=1, optimizer=type(optimizer).__name__,
        plain=plain, skip=check.patterns(skip), passes=passes, owner=owner, takes_steps=False,
        knows_optimizer=optimizer is not None, knows_rate=lr is not None,
        residual_dtype=residual_dtype,
    )  # fmt: skip
    validate(resolved, use)
    policy = resolved.serving
    if isinstance(policy, Averaging) or policy.scope == "samples":
        allowed = "one that averages whole gradients; use DistributedOptimizer"
        check.refuse(owner, "compression", policy, allowed)
    return resolved
