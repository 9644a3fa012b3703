"""The common part of `ddp`, `fsdp` and `torch.torchft`, which take no optimizer steps."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint

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
    partial = 0  # backward passes of an accumulation that has not ended
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

    def check_whole(self) -> None:
        """Raise ValueError within an accumulation: its gradients are not averaged yet."""
        if self.partial:
            raise ValueError(
                f"{self.owner}: passes is {self.passes}, but this step follows {self.partial} of "
                "these backward passes, so its gradients are not averaged. Drop the last batches "
                "of an epoch if they are too few."
            )

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
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    if torch.compiler.is_compiling():
        return
    partial = [x for x in _reducers if x.partial]
    unaware = [x for x in _reducers if x.scaler is None and x.agreed]
    unaware = unaware if unaware and _scaled_step() else []
    if not (partial or unaware):
        return
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = [x for x in _reducers if not members.isdisjoint(map(id, x._names))]
    for reducer in own:
        reducer.check_whole()
        if reducer in unaware and any(x.stored for x in reducer.exchange.bucket_states):
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


def _in_frames(file: str, function: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == file and frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


NO_TASK = -1  # no backward pass


class BackwardReducer(HookedReducer):
    """A hooked reducer that finishes the exchange at the end of the backward pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._task = NO_TASK  # the backward pass that runs
        super().__init__(*args, **options)

    def arrived(self, parameter: torch.Tensor) -> None:
        """Count a backward pass of `parameter`, and see to it that the exchange is finished.

        Raises:
            ValueError: within a reentrant checkpoint, whose backward pass is one of its own.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if _in_frames(checkpoint.__file__, "backward"):
                allowed = "use_reentrant=False, whose recomputation belongs to the backward pass"
                check.refuse(self.owner, "a checkpoint with use_reentrant", True, allowed)
            if self._task != NO_TASK:  # that pass has raised an error
                self.reset()
                self.partial = 0
            self._task = task
            # Callbacks run in the order in which they are queued. Those of other roots of FSDP,
            # which may bring gradients, are queued during the pass, so ours is queued once more.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end))
        super().arrived(parameter)

    def _end(self) -> None:
        self._task = NO_TASK
        self.partial += 1
        if self.partial < self.passes:
            return
        self.partial = 0
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
