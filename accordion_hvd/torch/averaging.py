"""Optimizers whose models are averaged, not their gradients: `WAGMA`, `LocalSGD`, `DiLoCo`, ...

```python
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=WAGMA(),
)
for data, target in loader:  # as before
    ...
optimizer.average_now(model)  # before evaluation and checkpoints
```
`step()` takes the wrapped optimizer's step with this rank's own gradients and then lets the method
average. Momentum and other state of optimizers stay local, and so do buffers (the statistics of
batch normalisation), which `average_now(model)` averages too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.horovod.torch import HorovodCommunicator
from accordion_hvd.comm.local import connect
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.buckets import TensorInfo
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.model_averager import ModelAverager, Parameters
from accordion_hvd.ops import torch as xp
from accordion_hvd.policies.alternation import Alternation

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
        ValueError: the method does not suit the number of ranks, or Horovod cannot add process
            sets.
        RuntimeError: averaging without waiting was asked for and is not possible here; or ranks
            were set up differently.
    """
    base = type(optimizer)
    methods = {
        k: v for k, v in vars(_ModelAveraging).items() if k not in ("__dict__", "__weakref__")
    }
    methods |= {"__module__": "horovod.torch.optimizer", "_base": base}
    kind: Any = type(base.__name__, (base,), methods)
    wrapped = kind.__new__(kind)
    vars(wrapped).update(vars(optimizer))
    vars(wrapped).pop("step", None)  # an LR scheduler has put its own there
    wrapped._inner = weakref.ref(optimizer)
    wrapped._process_set = process_set
    wrapped._averager = averager(method, named, process_set, guard)
    return wrapped


def averager(
    method: Averaging,
    named: Named,
    process_set: Any,
    guard: Guard,
    alternation: Alternation | None = None,
) -> ModelAverager:
    """Return the averager of these parameters, known to checkpoints; raises as `wrap` does."""
    link = connect(process_set, HorovodCommunicator, xp)
    made = ModelAverager(
        method, parameters(named), link, guard, process_set.process_set_id, alternation
    )
    made.set_up()
    checkpoint.register(made)
    return made


def parameters(named: Named) -> Parameters:
    """Return the floating-point tensors among these."""
    return _Tensors(named)


class _ModelAveraging:
    _base: Any
    _step_supports_amp_scaling = True  # a rank with infinite gradients must average as well

    def step(self: Any, closure: Any = None, **more: Any) -> Any:
        """Take the wrapped optimizer's step, then average.

        Under a `GradScaler`, a rank whose gradients are not finite takes no step of its own, but
        averages.
        """
        self._averager.prepare()
        result = self._own_step(closure, **more)
        self._averager.average(float(self.param_groups[0]["lr"]))
        inner = self._inner()
        if inner is not None:
            inner._opt_called = True  # what an LR scheduler made for it looks for
        return result

    def _own_step(self: Any, closure: Any, **more: Any) -> Any:
        bad, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        if bad is None:
            return self._base.step(self, closure, **more)
        if float(bad):
            return None
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        del self.found_inf, self.grad_scale  # fused optimizers would unscale once more
        try:
            return self._base.step(self, closure, **more)
        finally:
            self.found_inf, self.grad_scale = bad, scale

    def average_now(self: Any, model: torch.nn.Module | None = None) -> None:
        """Make all models equal: their average. All ranks call it after the same step.

        Args:
            model: whose buffers of floating-point numbers are averaged too (for averaging without
                waiting as well, they travel over Horovod).
        """
        self._averager.average_now(_Tensors(list(model.named_buffers())) if model else None)

    def close(self: Any) -> None:
        """Average all models and end; for averaging without waiting, ends its thread.

        Processes that do not call it do so when they exit.
        """
        self._averager.close()

    @property
    def averaging(self: Any) -> ModelAverager:
        """Return the averager: `stats()`, `state` and `load`."""
        return self._averager

    @property
    def exchange_owner(self: Any) -> ModelAverager:
        """Return the object that `save_state(only=[optimizer])` saves."""
        return self._averager

    def synchronize(self: Any) -> None:
        """Do nothing: gradients stay local between backward and `step()`."""

    @property
    def process_set(self: Any) -> Any:
        """Return the ranks that average."""
        return self._process_set

    @staticmethod
    def _inner() -> Any:
        """Return the wrapped optimizer, while it is alive."""
        return None


class _Tensors(Parameters):
    """Tensors of floating-point numbers and their names."""

    def __init__(self, named: Named) -> None:
        self._named = [(name, x) for name, x in named if x.is_floating_point()]
        self.device = self._named[0][1].device if self._named else None

    def tensors(self) -> list[TensorInfo]:
        """Names, shapes, dtypes and devices."""
        return [TensorInfo(n, tuple(x.shape), xp.dtype(x), str(x.device)) for n, x in self._named]

    def read(self) -> list[torch.Tensor]:
        """Return the tensors, detached."""
        return [x.detach() for _, x in self._named]

    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Copy them all at once."""
        if self._named:
            torch._foreach_copy_([x.data for _, x in self._named], list(values))
