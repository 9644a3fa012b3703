"""Compressed optimizers for PyTorch: `OnebitAdam` and its kin, used as `torch.optim.Adam` is.

```python
import accordion_hvd.torch as hvd

optimizer = hvd.OnebitAdam(model.parameters(), lr=1e-3)
```
No `DistributedOptimizer` around it. Gradients are read in `step()`: until then they are this
rank's own, so accumulating, clipping and unscaling them is as with any optimizer, and nothing is
exchanged before.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import torch

from accordion_hvd import check, optimizers
from accordion_hvd.comm.horovod.torch import hvd
from accordion_hvd.core.base import Allreduce, ExchangeGenerator
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.guard import Guard
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import staged
from accordion_hvd.torch import validation
from accordion_hvd.torch.optimizer import _Distributed
from accordion_hvd.torch.reducer import Reducer


class CompressedOptimizer(_Distributed, torch.optim.Optimizer):
    """An optimizer whose ranks exchange what its paper says, instead of gradients.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either; a group may set `lr`,
            `weight_decay` and what the optimizer's paper calls betas, eps and so on.
        lr: the learning rate.
        betas: decay rates of the moments; None: the paper's.
        eps: None: the paper's.
        weight_decay: of weights, in each step.
        decoupled_weight_decay: whether it is taken off the weights (x <- x - lr weight_decay x,
            as in AdamW) or added to this rank's gradients (x's share of the loss, as in Adam).
            None: as in the optimizer's paper (the rule's `decoupled_weight_decay`). A loaded
            `state_dict` keeps the form that it was saved with.
        max_grad_norm: all ranks scale their gradients by one factor, so that the root mean square
            over the ranks of their norms, which the mean gradient's does not exceed, is at most
            this. (`torch.nn.utils.clip_grad_norm_` before `step()` clips each rank's by its own.)
        policy: what moves it between its stages, instead of the paper's rule: `Accordion(...)`
            without levels, or any policy over `accordion_hvd.optimizers`.
        named_parameters: `model.named_parameters()`, for the patterns in `skip` and messages.
        process_set: the ranks that exchange; others take steps of their own.
        skip: patterns (as of file names) of parameters that stay in the dense stage.
        guard: what to do when replicas differ: "error" (the default), "warn" or "off".
        guard_every: steps between comparisons of the replicas, by default 100.
        settings: the other arguments of the optimizer in `accordion_hvd.optimizers`.

    Raises:
        ValueError: an argument is not what it must be; the sentence says which.
        TypeError: an argument that it does not have.
    """

    _rule: ClassVar[type[UpdateRule]]
    _base: Any = torch.optim.Optimizer
    _step_supports_amp_scaling = True  # all ranks skip alike, which a GradScaler cannot see to

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Any = None,
        process_set: Any = hvd.global_process_set,
        skip: Sequence[str] = (),
        guard: str | None = None,
        guard_every: int | None = None,
        **settings: Any,
    ) -> None:
        given = {"betas": betas, "eps": eps}
        settings |= {name: value for name, value in given.items() if value is not None}
        self.rule = self._rule(**settings)
        if decoupled_weight_decay is None:
            decoupled_weight_decay = self.rule.decoupled_weight_decay
        if max_grad_norm is not None and not (check.is_number(max_grad_norm) and max_grad_norm > 0):
            check.refuse(self, "max_grad_norm", max_grad_norm, "a number above 0, or None")
        self._max_norm = max_grad_norm
        options = {
            "policy": staged(self.rule, policy), "process_set": process_set,
            "skip": tuple(skip), "guard": Guard(guard, guard_every), "passes": 1, "total": False,
            "sparse_as_dense": True, "scaler": None, "predivide": 1.0,
        }  # fmt: skip
        defaults = {
            "lr": lr, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        } | {name: getattr(self.rule, name) for name in self.rule.group_settings}  # fmt: skip
        torch.optim.Optimizer.__init__(self, params, defaults)
        names = validation.check_names(self.param_groups, named_parameters or self._own_names())
        validation.check_parameters(names)
        self._set_up(names, options)

    def _own_names(self) -> list[tuple[str, torch.Tensor]] | None:
        if any("param_names" not in group for group in self.param_groups):
            return None
        groups = self.param_groups
        return [x for g in groups for x in zip(g["param_names"], g["params"], strict=True)]

    def _make_averager(self) -> Reducer:
        chosen = self._options
        mine: Any = weakref.ref(self)
        settings = (*self.rule.group_settings, "weight_decay", "decoupled_weight_decay")
        return Reducer(
            self._names, chosen["policy"], chosen["process_set"], lambda: mine().param_groups,
            sparse_as_dense=True, skip=chosen["skip"], guard=chosen["guard"], settings=settings,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------- one step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange, and take the step; all ranks, whether they have gradients or not.

        If a gradient of some rank is not finite, no rank takes it, and nothing is forgotten.
        Afterwards `.grad` holds the directions that were taken.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        self._averager.finish()
        if self._averager.finite:
            self._take()
        self._forget()
        self._exchanged = True
        self._compare_replicas()
        return loss

    @torch.no_grad()
    def _prepare(self) -> None:
        """Unscale, decay, clip: this rank's gradients as the rule wants them."""
        scale = getattr(self, "grad_scale", None)  # a GradScaler's, while it calls
        self._averager.watch([])  # layers may have been unfrozen
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            for p in chosen:
                p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            grads = [p.grad for p in chosen]
            if scale is not None and grads:
                torch._foreach_mul_(grads, scale.reciprocal())  # a power of two: exact
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                for p in chosen:
                    if not self._serving(p).decays(False):
                        p.grad.add_(p, alpha=group["weight_decay"])
        if self._max_norm is not None:
            self._clip(self._max_norm)

    def _serving(self, parameter: torch.Tensor) -> UpdateRule:
        return cast(UpdateRule, self._averager.serving(parameter))

    def _clip(self, limit: float) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        grads = [grad for grad in grads if grad is not None]
        device = self.param_groups[0]["params"][0].device
        squares = torch.zeros((), device=device)
        for norm in torch._foreach_norm(grads) if grads else []:
            squares = squares + norm.to(device, torch.float32).square()
        link = self._averager.communicator
        mean = link.run("accordion.norm", _mean(squares.reshape(1)))
        factor = (limit / (mean[0].sqrt() + 1e-6)).clamp(max=1.0)
        if grads:
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def _take(self) -> None:
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            lr, decay = float(group["lr"]), group["weight_decay"]
            decoupled, moved = bool(decay and group["decoupled_weight_decay"]), []
            for p, rule in ((p, self._serving(p)) for p in chosen):
                if rule.returns_weights:
                    p.copy_(p.grad)
                    continue
                moved.append(p)
                if decoupled and not rule.decays(True):
                    p.mul_(1 - lr * decay)
            if moved:
                torch._foreach_add_(moved, [p.grad for p in moved], alpha=-lr)

    def synchronize(self) -> None:
        """Refuse: there are no averaged gradients.

        Raises: RuntimeError, as there are no averaged gradients to wait for.
        """
        raise RuntimeError(
            f"{type(self).__name__} averages no gradients, so there is nothing to synchronize: "
            "clip gradients after backward() (or pass max_grad_norm=), then call step()."
        )

    # ----------------------------------------------------------------------------- parameter groups
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are exchanged from the next step on.

        Raises:
            ValueError: a setting of the group is not what it must be.
        """
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        dataclasses.replace(
            cast(Any, self.rule), **{name: group[name] for name in self.rule.group_settings}
        )
        for name in ("lr", "weight_decay"):
            check.at_least(self, name, float(group[name]), least=0)
        if "_averager" not in vars(self):
            return
        index = len(self.param_groups) - 1
        numbered = [f"group.{index}.{i}" for i in range(len(group["params"]))]
        names = group.get("param_names", numbered)
        fresh = list(zip(names, group["params"], strict=True))
        validation.check_parameters(fresh)
        self._names += fresh
        self._averager.watch(fresh)

    # ---------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and "exchange": moments, errors and stage of this rank.

        Each rank must save its own to resume exactly; where all load one rank's, errors begin
        anew. `hvd.save_state` and `hvd.load_state` keep them on any number of ranks.
        """
        found = torch.optim.Optimizer.state_dict(self)
        begun = self._averager.exchange.steps > 0
        found["exchange"] = checkpoint.snapshot(self._averager.exchange) if begun else None
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`; what an older version's groups did not know is as set here.

        Raises:
            ValueError: it is that of another optimizer, or of another model.
        """
        if "exchange" not in state_dict:
            raise ValueError(
                f"{type(self).__name__}: the state_dict has no 'exchange', so it is none of this "
                "kind of optimizer."
            )
        rest = {key: value for key, value in state_dict.items() if key != "exchange"}
        torch.optim.Optimizer.load_state_dict(self, rest)
        for group in self.param_groups:
            group.update(self.defaults | group)
        self._averager.adopt(state_dict["exchange"])

    def doubt(self) -> None:
        """Another rank has been given this one's state: see before the next step who has what."""
        self._averager.doubt()

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises: TypeError, since process sets and policies belong to one process.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied; use state_dict() and "
            "load_state_dict()."
        )

    def __repr__(self) -> str:
        """Return the rule, and the groups as PyTorch shows them."""
        return f"{self._options['policy']!r}: {torch.optim.Optimizer.__repr__(self)}"


def _mean(tensor: torch.Tensor) -> ExchangeGenerator:
    result = yield Allreduce(tensor)
    return result  # type: ignore[return-value]


def _native(name: str) -> type[CompressedOptimizer]:
    rule = getattr(optimizers, name)
    text = f"{rule.__doc__}\n\nSee `CompressedOptimizer` for what all of them take."
    contents = {"_rule": rule, "__doc__": text, "__module__": __name__}
    return type(name, (CompressedOptimizer,), contents)


NATIVE = {name: _native(name) for name in optimizers.NATIVE}
NATIVE |= {alias: NATIVE[name] for alias, name in optimizers.ALIASES.items()}
