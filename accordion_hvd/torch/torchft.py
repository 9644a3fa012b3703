"""Compression between the replicas of a torchft job, whose steps are transactions.

```python
import torchft
from accordion_hvd import PowerSGD
from accordion_hvd.torch import torchft as compressed

manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), min_replica_size=1, ...)
averager = compressed.average(manager, model, PowerSGD(4))
while manager.current_step() < steps:
    averager.start_quorum()
    optimizer.zero_grad()
    loss(model(x), y).backward()  # the gradients are averaged over the replicas
    if averager.should_commit():
        optimizer.step()
```
`torchft.Optimizer(averager, optimizer)` makes these calls as well, because the averager stands in
for the manager.

- **Commit**: residuals, levels, the policy's windows and the counts of steps are those after the
  step.
- **No commit**: all of them return to the state before the step, on this replica.
- **Another quorum**: the first exchange gives every replica the policy and levels of a replica that
  has committed all steps, and an equal share of all residuals. So the state of compression must not
  be in the manager's `state_dict` functions, which are for the model and the optimizer.
- **A replica that dies**: its residual at its last commit is lost, and one replica logs a warning.
  The same holds for a replica that does not commit a step that others commit: it heals as a new
  one.
- **A replica that leaves in order**: torchft does not tell the others. If all replicas call
  `hand_over()` after the same step, before some of them leave, then no residual is lost.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accordion_hvd import check
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.comm.torch_distributed.communicator import ConnectionLost, QuorumCommunicator
from accordion_hvd.core.base import Allgather, ExchangeGenerator
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.membership import Part, Regrouping
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.ops import torch as xp
from accordion_hvd.resolve import Compression
from accordion_hvd.torch import validation
from accordion_hvd.torch.hooked import NO_TASK, BackwardReducer, HookedState, suitable
from accordion_hvd.validate import check_passes

__all__ = ["Averager", "average"]

logger = logging.getLogger(__name__)

OWNER = "torchft.average"


def average(
    manager: Any,
    model: torch.nn.Module,
    compression: Compression,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: Callable[[], float] | None = None,
    passes: int = 1,
    skip: Sequence[str] = (),
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Averager:
    """Average the gradients of `model` over the replicas of a quorum, with compression.

    Args:
        manager: the `torchft.Manager`.
        model: the model. It must not be wrapped by torchft's `DistributedDataParallel`, which
            averages gradients without compression.
        compression: compressor, policy or spec string, as for `DistributedOptimizer`.
        optimizer: the optimizer, whose learning rates policies such as `Accordion` watch.
        lr: function that returns the learning rate, if there is no optimizer yet; `Displacement`
            and `Goodput` need the optimizer.
        passes: number of backward passes whose gradients are summed before replicas exchange them.
        skip: shell-style patterns of the names of parameters whose gradients are sent uncompressed.
        grad_scaler: the `GradScaler`, if there is one. Residuals are then stored in unscaled units.

    Returns:
        The averager, which stands in for the manager in the training loop.

    Raises:
        ValueError: if `compression` does not suit.
        TypeError: if `manager` is no torchft Manager, or `compression` is no compressor, policy or
            spec string.
    """
    if not hasattr(manager, "_pg") or not hasattr(manager, "_quorum_id"):
        raise TypeError(
            f"{OWNER}: manager is a {type(manager).__name__}, but must be a torchft.Manager."
        )
    check_passes(passes)
    resolved = suitable(OWNER, compression, optimizer, skip, passes, lr)
    policy: Any = resolved.serving
    if policy.topology_aware:
        check.refuse(OWNER, "compression", policy, "one that does not need to know hosts")
    named = validation.plain_names(model.named_parameters())
    validation.check_parameters(named)
    validation.check_not_averaged(named, OWNER)
    reducer = ReplicaReducer(
        manager, named, policy, None, lambda: optimizer,
        lr=lr, passes=passes, skip=skip, scaler=grad_scaler,
        guard=Guard(default=resolved.guard),
    )  # fmt: skip
    reducer.own = frozenset(map(id, model.parameters()))
    return Averager(manager, reducer)


class Averager(HookedState):
    """State of the exchange between replicas; made by `average`."""

    def __init__(self, manager: Any, reducer: ReplicaReducer) -> None:
        super().__init__(reducer)
        self._manager = manager

    def start_quorum(self, **options: Any) -> None:
        """Call the manager's `start_quorum`, before the forward pass."""
        self._manager.start_quorum(**options)

    def should_commit(self, **options: Any) -> bool:
        """Call the manager's `should_commit`, after the backward pass.

        Returns:
            Whether to take the optimizer step. If not, the state of compression has returned to
            that before the step.
        """
        if not self._manager.errored():
            self._reducer.check_whole()
        committed = self._manager.should_commit(**options)
        self._reducer.end(committed)
        return committed

    def end_window(self) -> None:
        """End a window of the policy (normally an epoch); call it on every replica."""
        super().end_window()
        self._reducer.commit()

    def hand_over(self) -> None:
        """Give every replica an equal part of all residuals, before some leave; collective.

        Call it on all replicas after the same step. Replicas that leave before the next step then
        leave no residual behind.
        """
        self._reducer.part_in_order()

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, levels and policy of the last commit; each replica must save its own.

        This is for checkpoints on a disk. Save and load the manager's state as well.
        """
        return {"exchange": self._reducer.committed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`, before the first step; the number of replicas may have changed.

        Raises:
            ValueError: if the state belongs to another model or policy, or lacks a key.
        """
        check.has("torchft.State", "state_dict", state_dict, ("exchange",))
        self._reducer.load(state_dict["exchange"])


class ReplicaReducer(BackwardReducer):
    """A reducer that exchanges gradients between the replicas of the present quorum."""

    owner = OWNER
    idle = False  # a single replica keeps up its state for those that join

    def __init__(self, manager: Any, *args: Any, **options: Any) -> None:
        self.manager = manager
        self._quorum: int | None = None  # the quorum that the communicator connects
        self._begun = False  # whether a step has begun that has not ended
        super().__init__(*args, **options)

    @property
    def committed(self) -> dict[str, Any] | None:
        return self._committed

    # ---------------------------------------------------------------------------------- one step
    def arrived(self, parameter: torch.Tensor) -> None:
        """Count a backward pass of `parameter`; before the first one of a step, join the quorum.

        Raises:
            RuntimeError: if the step before has not ended.
        """
        if self.finished and self._begun:
            raise RuntimeError(
                f"{OWNER}: a step has not ended: call should_commit() of the averager, not of the "
                "manager, after each exchange. If a step has several backward passes, pass passes=."
            )
        if not self._begun:
            self._begun = True
            self.manager.wait_quorum()
            self._attempt(self._join)
        self._attempt(lambda: super(ReplicaReducer, self).arrived(parameter))

    def finish(self) -> None:
        """Finish the exchange, unless the step has failed."""
        self._attempt(super().finish)
        self.finished = True

    def comparison_due(self, step: int) -> bool:
        """Return whether to compare replicas: not while one waits for its weights."""
        healing = not self.manager.is_participating()
        return super().comparison_due(step) and not self.on_any_rank([healing])[0]

    def end(self, committed: bool) -> None:
        """End the step: keep the new state, or return to the state of the last commit."""
        self._begun, self.partial, self._task, self.finished = False, 0, NO_TASK, False
        if committed:
            self.commit()
        else:
            self.roll_back()

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.manager.errored():
            return  # the step has failed: it will not be committed
        try:
            action()
        except ConnectionLost as error:
            self.manager.report_error(error)
            self.reset()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = super()._gradient(parameter)
        return grad if self.manager.is_participating() else torch.zeros_like(grad)

    def _put(
        self, parameters: list[torch.Tensor], means: list[torch.Tensor], exclusive: bool
    ) -> None:
        factor = self.communicator.size / self.manager.num_participants()  # others have sent zeros
        if factor != 1:
            means, exclusive = [mean * factor for mean in means], True
        super()._put(parameters, means, exclusive)

    # ---------------------------------------------------------------------------------- the quorum
    def connect(self) -> Communicator:
        """Connect to the replicas of the present quorum; before the first step, to none."""
        if not self._begun:
            return _absent(None)
        group, number = self.manager._pg, self.manager._quorum_id
        link = QuorumCommunicator(group, self.device) if group.size() > 1 else _absent(None)
        self._quorum = number
        return link

    def _join(self) -> None:
        if self._quorum == self.manager._quorum_id:
            self._handed_over = False  # nobody has left
            return
        # Policy and a share of the residuals come from a replica that has all commits.
        self.ranks_changed()
        steps = self._gather(0 if self._exchange is None else self._exchange.steps)
        group = self.regroup(self._gather, leader=steps.index(max(steps)))
        if group is not None and group.lost:
            norms = [norm for norm in self._gather(self.committed_norm()) if norm]
            if norms and self.communicator.rank == 0:
                _report(group, norms)

    def part_in_order(self) -> None:
        """Share all residuals, and commit; nothing changes if the replicas are not connected."""
        if self._quorum is None:
            return
        try:
            self.hand_over(self._gather)
        except ConnectionLost:
            self.roll_back()
        else:
            self.commit()

    def _gather(self, value: Any) -> list[Any]:
        return self.communicator.run("accordion.torchft", _gather_objects(value, self.device))

    # --------------------------------------------------------------------------------- the commits
    def commit(self) -> None:
        """Copy the state, and whether it has been handed over."""
        super().commit()
        if self._committed is not None:
            self._committed["handed_over"] = self._handed_over

    def roll_back(self) -> None:
        """Return to the last commit, made as one of the replicas of that time."""
        self.reset()
        self._stand_in_for(self._committed)
        super().roll_back()
        self._handed_over = bool(self._committed and self._committed["handed_over"])

    def load(self, saved: dict[str, Any] | None) -> None:
        """Continue from the `committed` state of this replica in an earlier job."""
        before = self._quorum, self.communicator
        if saved is not None:
            check.has("torchft.State", "state", saved, ("rank", "ranks"))
        self._stand_in_for(saved)
        try:
            self.adopt(saved)
        except ValueError:  # as if nothing had been loaded
            self._quorum, self.communicator = before
            self.exchange.communicator = self.communicator
            raise
        self.commit()

    def _stand_in_for(self, saved: dict[str, Any] | None) -> None:
        self._quorum = None
        self.communicator = _absent(saved)
        if self._exchange is not None:
            self._exchange.communicator = self.communicator


def _absent(saved: dict[str, Any] | None) -> Communicator:
    link = LocalCommunicator(xp, 1 if saved is None else saved["ranks"])
    link.rank = 0 if saved is None else saved["rank"]
    return link


def _report(group: Regrouping, norms: list[float]) -> None:
    others = ", ".join(f"{norm:.3g}" for norm in norms)
    logger.warning(
        "accordion_hvd: replicas %s of %d ended without a handover or missed a commit. Their "
        "residuals are lost; those of the others have norms %s.",
        group.lost, group.lead.ranks, others,
    )  # fmt: skip


def _gather_objects(value: Any, device: Any) -> ExchangeGenerator:
    file = io.BytesIO()
    # Without pickles: other replicas load with `weights_only`.
    torch.save(_plain(value), file)
    sent = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    parts = yield Allgather(sent.to(device), uneven=True)
    files = [io.BytesIO(xp.to_numpy(part).tobytes()) for part in parts]
    return [_read(*torch.load(file, weights_only=True)) for file in files]  # type: ignore[return-value]


def _plain(value: Any) -> tuple[str, Any]:
    if isinstance(value, Part):
        return "part", vars(value)
    if isinstance(value, SavedState):
        return "state", (value.level, value.map(torch.tensor).tensors())
    return "value", value


def _read(kind: str, value: Any) -> Any:
    if kind == "part":
        return Part(**value)
    return SavedState.read(*value).map(xp.to_numpy) if kind == "state" else value
