"""Optimizers that average models instead of gradients: `WAGMA`, `LocalSGD`, `DiLoCo`, ...

```python
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=WAGMA(),
)
for data, target in loader:  # unchanged
    ...
optimizer.average_now(model)  # before evaluation and checkpoints
```
`step()` takes the wrapped optimizer's step with local gradients, and then the method averages the
models. Momentum and other optimizer state remain local. Buffers, such as the statistics of batch
normalization, also remain local, until `average_now(model)` averages them together with the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.averages import ModelParameters
from accordion_hvd.engine.controls import Controls, ModelControls
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.model_averager import ModelAverager
from accordion_hvd.ops import torch as xp
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.torch import engines
from accordion_hvd.torch.reducer import number_of
from accordion_hvd.validate import OWNER

Named = Sequence[tuple[str, torch.Tensor]]


def wrap(
    optimizer: torch.optim.Optimizer,
    named: Named,
    method: Averaging,
    process_set: Any,
    guard: Guard,
) -> Any:
    """Return an optimizer of a subclass, with the same state, that averages models.

    Raises:
        ValueError: if the method does not suit the number of ranks, or Horovod cannot add process
            sets.
        RuntimeError: if wait-avoiding averaging was requested and is not possible in this job, or
            if the ranks have different settings.
    """
    parts = (Controls, ModelControls, _ModelAveraging)
    wrapped = new_instance(type(optimizer), vars(optimizer), *parts)
    wrapped._inner = weakref.ref(optimizer)
    wrapped._averager = wrapped._models = averager(method, named, process_set, guard)
    wrapped._members = members(wrapped)
    return wrapped


def new_instance(base: type, attributes: dict[str, Any], *parts: type) -> Any:
    """Return an instance of a new subclass of `base` with the methods of `parts`.

    Horovod's helpers recognize a distributed optimizer by its module and call `super()` of its
    class. Therefore the methods are copied into one direct subclass of `base`, as in Horovod.
    """
    left_out = ("__dict__", "__weakref__")
    methods = {k: v for part in parts for k, v in vars(part).items() if k not in left_out}
    methods |= {"__module__": "horovod.torch.optimizer", "_base": base}
    kind: Any = type(base.__name__, (base,), methods)
    instance = kind.__new__(kind)
    vars(instance).update(attributes)
    vars(instance).pop("step", None)  # an LR scheduler replaces it on the instance
    return instance


def load_in_place(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load a state into the groups and the state that the wrapped optimizer has, too.

    An LR scheduler that was made before `DistributedOptimizer` changes these groups.
    """
    groups, state = optimizer.param_groups, optimizer.state
    optimizer._base.load_state_dict(optimizer, state_dict)
    loaded, found = optimizer.param_groups, optimizer.state
    for group, other in zip(groups, loaded, strict=True):
        if other is not group:
            group.clear()
            group.update(other)
    loaded[:] = groups  # an optimizer within this one, as in SAM, may have taken the new list
    if found is not state:
        state.clear()
        state.update(found)
    optimizer.param_groups, optimizer.state = groups, state


def unscaled_step(optimizer: Any, *given: Any, **more: Any) -> Any:
    """Take the wrapped optimizer's step in a call of `GradScaler.step`; return its result.

    Gradients are unscaled first, and the step is skipped if they are not finite, which the scaler
    saw before they were averaged.
    """
    bad, scale = optimizer.found_inf, vars(optimizer).get("grad_scale")
    if not _unscale(optimizer, torch.ones_like(bad) if scale is None else scale):
        return None
    del optimizer.found_inf, optimizer.grad_scale  # else fused optimizers would unscale again
    try:
        return optimizer._base.step(optimizer, *given, **more)
    finally:
        optimizer.found_inf, optimizer.grad_scale = bad, scale


def _unscale(optimizer: Any, scale: torch.Tensor) -> bool:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for grad in (parameter.grad for parameter in group["params"]):
            if grad is not None:
                values = grad._values() if grad.is_sparse else grad
                found.setdefault(grad.device, []).append(values)
    # The kernel takes tensors of one device.
    bad = {device: torch.zeros((), device=device) for device in found}
    for device, grads in found.items():
        inverse = scale.to(device).double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, bad[device], inverse)
    return not any(map(bool, bad.values()))


def members(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def require_members(optimizer: Any, method: Averaging) -> None:
    """Raise RuntimeError if parameters were added since the optimizer was wrapped."""
    if members(optimizer) != optimizer._members:
        raise RuntimeError(
            f"{OWNER}: parameters were added to the optimizer after it was wrapped, but {method!r} "
            "averages only those that it had; pass all parameters from the start, frozen ones, "
            "too, or wrap a new optimizer."
        )


def averager(
    method: Averaging,
    named: Named,
    process_set: Any,
    guard: Guard,
    alternation: Alternation | None = None,
) -> ModelAverager:
    """Return a model averager of these parameters and register it for checkpoints.

    Raises the errors of `wrap`.
    """
    model = Tensors(named)
    result = ModelAverager(method, model, engines.connect, guard, process_set, alternation)
    result.set_up_early()
    checkpoint.register(result)
    return result


class _ModelAveraging:
    _base: Any
    _members: list[int]
    _step_supports_amp_scaling = True  # ranks with infinite gradients must average too

    def step(self: Any, closure: Any = None, **more: Any) -> Any:
        """Take the wrapped optimizer's step and average the models.

        Under a `GradScaler`, a rank with non-finite gradients skips its own step but takes part in
        the averaging.
        """
        require_members(self, self._averager.method)
        self._averager.prepare()
        given = () if closure is None else (closure,)  # some optimizers take none
        step = unscaled_step if vars(self).get("found_inf") is not None else self._base.step
        result = step(self, *given, **more)
        rates = [number_of(group["lr"]) for group in self.param_groups]
        self._averager.average(rates[0], rates=rates)
        inner = self._inner()
        if inner is not None:
            inner._opt_called = True  # an LR scheduler of the wrapped optimizer checks this
        return result

    load_state_dict = load_in_place

    def synchronize(self: Any) -> None:
        """Do nothing, because gradients are not averaged."""

    def _statistics(self: Any, model: torch.nn.Module) -> ModelParameters:
        return Tensors(list(model.named_buffers()))

    @staticmethod
    def _inner() -> Any:  # instances have a weak reference to the wrapped optimizer instead
        return None


class Tensors(ModelParameters):
    """The floating-point ones of these tensors."""

    def __init__(self, named: Named) -> None:
        self._named = [(name, x) for name, x in named if x.is_floating_point()]
        self.device = self._named[0][1].device if self._named else None

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo(n, tuple(x.shape), xp.dtype(x), str(x.device)) for n, x in self._named]

    def read(self) -> list[torch.Tensor]:
        return [x.detach() for _, x in self._named]

    def write(self, values: Sequence[torch.Tensor]) -> None:
        if self._named:
            torch._foreach_copy_([x.data for _, x in self._named], list(values))
