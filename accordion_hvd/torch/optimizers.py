"""Compressed optimizers for PyTorch, such as `OnebitAdam`; used like `torch.optim.Adam`.

```python
import accordion_hvd.torch as hvd

optimizer = hvd.OnebitAdam(model.parameters(), lr=1e-3)
```
Do not wrap it in `DistributedOptimizer`. Gradients remain local until `step()`, so you can
accumulate, clip and unscale them as with any optimizer. All communication takes place in `step()`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias, TypedDict, cast

import torch

from accordion_hvd import check
from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.core.base import Allreduce, ExchangeGenerator
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.optimizers.base import give
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import staged
from accordion_hvd.torch import validation
from accordion_hvd.torch.engines import hvd
from accordion_hvd.torch.optimizer import _Distributed
from accordion_hvd.torch.reducer import Reducer, number_of

Parameters: TypeAlias = (
    Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
)


class Options(TypedDict, total=False):
    """The keyword arguments of all compressed optimizers."""

    decoupled_weight_decay: bool | None
    max_grad_norm: float | None
    policy: Policy | None
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    process_set: ProcessSet | None
    skip: Sequence[str]
    guard: Mode | None
    guard_every: int | None


class CompressedOptimizer(_Distributed, torch.optim.Optimizer):
    """Base class of optimizers whose ranks exchange quantities other than gradients.

    Each subclass, such as `OnebitAdam`, takes these arguments.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either. A group may set `lr`,
            `weight_decay` and the optimizer's own settings, such as `betas` and `eps`.
        lr: learning rate.
        betas: decay rates of the moments. Default: the values of the optimizer's paper.
        eps: constant that is added for numerical stability. Default: the value of the paper.
        weight_decay: coefficient of the weight decay in each step.
        decoupled_weight_decay: True subtracts the decay from the weights as in AdamW
            (x <- x - lr weight_decay x); False adds weight_decay x to the local gradients as in
            Adam. Default: as in the optimizer's paper (the rule's `decoupled_weight_decay`). A
            loaded `state_dict` retains the form with which it was saved.
        max_grad_norm: upper limit for the root mean square, over the ranks, of the norms of their
            gradients. All ranks scale their gradients by the same factor. The norm of the mean
            gradient never exceeds this root mean square. (`torch.nn.utils.clip_grad_norm_` before
            `step()` clips the gradients of each rank by their local norm instead.)
        policy: policy that switches between the stages of the optimizer, instead of the paper's
            rule: `Accordion(...)` without levels, or another policy whose levels are
            `accordion_hvd.optimizers`.
        named_parameters: `model.named_parameters()`, for the patterns in `skip` and for messages.
        process_set: the ranks that communicate. Other ranks take local steps.
        skip: shell-style patterns of the names of parameters that stay in the dense stage.
        guard: reaction to replicas that differ: "error", "warn" or "off". Default: the environment
            variable ACCORDION_HVD_GUARD, else "error".
        guard_every: number of steps between comparisons of the replicas. Default: the environment
            variable ACCORDION_HVD_GUARD_EVERY, else 100.
        settings: the other arguments of the optimizer of the same name in
            `accordion_hvd.optimizers`.

    Raises:
        ValueError: if an argument is invalid.
        TypeError: if the optimizer has no such argument.
    """

    _rule: ClassVar[type[UpdateRule]]
    _base: Any = torch.optim.Optimizer
    _step_supports_amp_scaling = True  # all ranks must skip the same steps; a GradScaler is local

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
        **settings: Any,
    ) -> None:
        if not (isinstance(lr, torch.Tensor) or (check.is_number(lr) and lr >= 0)):
            check.refuse(self, "lr", lr, "a number from 0 on, or a tensor")
        optional = {"betas": betas, "eps": eps}
        settings |= {name: value for name, value in optional.items() if value is not None}
        self.rule = self._rule(**settings)
        if decoupled_weight_decay is None:
            decoupled_weight_decay = self.rule.decoupled_weight_decay
        if max_grad_norm is not None and not (check.is_number(max_grad_norm) and max_grad_norm > 0):
            check.refuse(self, "max_grad_norm", max_grad_norm, "a number above 0, or None")
        self._max_norm = max_grad_norm
        process_set = hvd.global_process_set if process_set is None else process_set
        options = {
            "policy": staged(self.rule, policy), "process_set": process_set,
            "skip": check.patterns(skip), "guard": Guard(guard, guard_every), "passes": 1,
            "total": False, "sparse_as_dense": True, "scaler": None, "predivide": 1.0,
        }  # fmt: skip
        defaults = {
            "lr": lr, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        } | {name: getattr(self.rule, name) for name in self.rule.group_settings}  # fmt: skip
        torch.optim.Optimizer.__init__(self, params, defaults)
        given = list(named_parameters or ()) or self._own_names()
        names = validation.check_names(self.param_groups, given)
        validation.check_parameters(names)
        validation.check_not_averaged(names)
        self._set_up(names, options)
        self._averager.name_later(given)

    def __init_subclass__(cls, rule: type[UpdateRule] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if rule is not None:
            give(cls, rule, CompressedOptimizer.__init__)
        elif "__init__" in vars(cls):
            # So that `inspect.signature` reads this constructor, not the base class's signature.
            cls.__signature__ = None  # type: ignore[attr-defined]

    def _own_names(self) -> list[tuple[str, torch.Tensor]] | None:
        if any("param_names" not in group for group in self.param_groups):
            return None
        groups = self.param_groups
        return [x for g in groups for x in zip(g["param_names"], g["params"], strict=True)]

    def _make_averager(self, names: Sequence[tuple[str, torch.Tensor]]) -> Reducer:
        options = self._options
        reference: Any = weakref.ref(self)
        settings = (*self.rule.group_settings, "weight_decay", "decoupled_weight_decay")
        return LocalReducer(
            names, options["policy"], options["process_set"],
            reference, sparse_as_dense=True, skip=options["skip"],
            guard=options["guard"], settings=settings,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------- one step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Communicate and take a step; collective, even for ranks without gradients.

        If a gradient of any rank is not finite, or too large (`Exchange.skipped`), no rank takes
        the step, and all state remains as it was. After a step, `.grad` contains the direction u of
        the update x <- x - lr u.

        Args:
            closure: function that computes the loss and its gradients and returns the loss.

        Returns:
            The closure's loss, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        self._averager.finish()
        if self._averager.finite:
            self._apply_directions()
        self._averager.finished = False
        self._exchanged = True
        self._compare_replicas()
        return loss

    @torch.no_grad()
    def _prepare(self) -> None:
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler during its call
        self._averager._follow_groups()
        self._averager.watch([])  # layers may have been unfrozen
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            for p in params:
                p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            grads = [p.grad for p in params]
            if scale is not None and grads:
                torch._foreach_mul_(grads, scale.reciprocal())  # a power of two: exact
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                decaying = [p for p in params if not self._serving(p).decays(False)]
                if decaying:
                    grads = [p.grad for p in decaying]
                    torch._foreach_add_(grads, decaying, alpha=group["weight_decay"])
        if self._max_norm is not None:
            self._clip(self._max_norm)

    def _serving(self, parameter: torch.Tensor) -> UpdateRule:
        return cast(UpdateRule, self._averager.serving(parameter))

    def _clip(self, limit: float) -> None:
        """Scale gradients so that the root mean square of the ranks' norms is at most `limit`."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        grads = [grad for grad in grads if grad is not None]
        device = self.param_groups[0]["params"][0].device
        squares = torch.zeros((), device=device)
        for norm in torch._foreach_norm(grads) if grads else []:
            squares = squares + norm.to(device, torch.float32).square()
        communicator = self._averager.communicator
        mean = communicator.run("accordion.norm", _mean(squares.reshape(1)))
        factor = (limit / (mean[0].sqrt() + 1e-6)).clamp(max=1.0)
        if grads:
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def _apply_directions(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            lr, decay = number_of(group["lr"]), group["weight_decay"]
            decoupled = bool(decay and group["decoupled_weight_decay"])
            rules = [(p, self._serving(p)) for p in params]
            assigned = [p for p, rule in rules if rule.returns_weights]
            moved = [p for p, rule in rules if not rule.returns_weights]
            decaying = [p for p, rule in rules if decoupled and not rule.decays(True)]
            if assigned:
                torch._foreach_copy_(assigned, [p.grad for p in assigned])
            if decaying:
                torch._foreach_mul_(decaying, 1 - lr * decay)
            if moved:
                torch._foreach_add_(moved, [p.grad for p in moved], alpha=-lr)

    def synchronize(self) -> None:
        """Raise RuntimeError: a compressed optimizer has no averaged gradients to wait for."""
        raise RuntimeError(
            f"{type(self).__name__} averages no gradients, so there is nothing to synchronize. "
            "Clip gradients after backward(), or pass max_grad_norm=, and then call step()."
        )

    # ----------------------------------------------------------------------------- parameter groups
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which takes part from the next step on.

        Raises:
            ValueError: if a setting of the group is invalid.
        """
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        settings = {name: group[name] for name in self.rule.group_settings}
        dataclasses.replace(cast(Any, self.rule), **settings)
        for name in ("lr", "weight_decay"):
            check.at_least(self, name, float(group[name]), least=0)
        if "_averager" not in vars(self):
            return
        self._averager._follow_groups()

    # ---------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return the state, with this rank's moments, residuals and stage under "exchange".

        To resume exactly, each rank must save and load its own state. If all ranks load the state
        of one rank, residuals are reset. `hvd.save_state` and `hvd.load_state` preserve residuals,
        even if the number of ranks changes.
        """
        state = torch.optim.Optimizer.state_dict(self)
        begun = self._averager.exchange.steps > 0
        state["exchange"] = checkpoint.snapshot(self._averager.exchange) if begun else None
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`.

        Raises:
            ValueError: if the state belongs to another kind of optimizer or to another model, or
                lacks a key; nothing has changed then.
        """
        check.has(self, "state_dict", state_dict, ("exchange", "state", "param_groups"))
        for number, group in enumerate(state_dict["param_groups"]):
            check.has(self, f"parameter group {number}", group, ("params", *self.defaults))
        adopt = self._averager.adopting(state_dict["exchange"])
        plain = {key: value for key, value in state_dict.items() if key != "exchange"}
        torch.optim.Optimizer.load_state_dict(self, plain)  # which checks before it changes
        adopt()

    def doubt(self) -> None:
        """Have the ranks agree before the next step on whose state each of them has loaded."""
        self._averager.doubt()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied; use state_dict() and "
            "load_state_dict()."
        )

    def __repr__(self) -> str:
        return f"{self._options['policy']!r}: {torch.optim.Optimizer.__repr__(self)}"


class LocalReducer(Reducer):
    """A reducer of a compressed optimizer, which skips parameters without gradients, as others."""

    leaves_unused = True


def _mean(tensor: torch.Tensor) -> ExchangeGenerator:
    result = yield Allreduce(tensor)
    return result  # type: ignore[return-value]
