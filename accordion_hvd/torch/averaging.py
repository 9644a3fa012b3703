"""Optimizers whose models are averaged, not their gradients: `WAGMA`, `LocalSGD`, `DiLoCo`, ...

```python
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=WAGMA(),
)
for data, target in loader:  # as ever
    ...
optimizer.average_now(model)  # before evaluation and checkpoints
```
`step()` takes the wrapped optimizer's step with this rank's own gradients and then lets the method
average. Momentum and other state of optimizers stay local, and so do buffers (the statistics of
batch normalisation), which `average_now(model)` averages too.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.engine import WaitAvoiding, why_not
from accordion_hvd.averaging.wagma import WAGMA
from accordion_hvd.base import Allreduce, Conversation, Info, State
from accordion_hvd.guard import Guard, require_agreement
from accordion_hvd.ops import torch as xp
from accordion_hvd.torch.communicator import HorovodCommunicator
from accordion_hvd.traffic import Traffic

Named = Sequence[tuple[str, torch.Tensor]]
_HALF = (torch.float16, torch.bfloat16)
_number = 0  # of the next optimizer, in the names of its collectives


def wrap(
    optimizer: torch.optim.Optimizer,
    named: Named,
    method: Averaging,
    process_set: Any,
    guard: Guard,
) -> Any:
    """An instance of a subclass of the optimizer's class, with its state, that averages models.

    Raises:
        ValueError: the method does not suit so many ranks, or Horovod cannot add process sets.
        RuntimeError: averaging without waiting was asked for and is not possible here.
    """
    base = type(optimizer)
    methods = {k: v for k, v in vars(_Averaged).items() if k not in ("__dict__", "__weakref__")}
    methods |= {"__module__": "horovod.torch.optimizer", "_base": base}
    kind: Any = type(base.__name__, (base,), methods)
    wrapped = kind.__new__(kind)
    vars(wrapped).update(vars(optimizer))
    vars(wrapped).pop("step", None)  # an LR scheduler has put its own there
    wrapped._inner = weakref.ref(optimizer)
    wrapped._averager = Averager(named, method, process_set, guard)
    return wrapped


class _Averaged:
    """The methods of such an optimizer; `_base` is the class that is wrapped."""

    _base: Any
    _step_supports_amp_scaling = True  # a rank with infinite gradients must average as well

    def step(self: Any, closure: Any = None, **more: Any) -> Any:
        """The wrapped optimizer's step, then the method's averages.

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
        self._averager.average_now(model)

    def close(self: Any) -> None:
        """Average all models and end; for averaging without waiting, ends its thread.

        Processes that do not call it do so when they exit.
        """
        self._averager.close()

    @property
    def averaging(self: Any) -> Averager:
        """What averages: `stats()`, `state` and `load`."""
        return self._averager

    def synchronize(self: Any) -> None:
        """Nothing is under way between backward and `step()`: gradients stay this rank's own."""

    @property
    def process_set(self: Any) -> Any:
        """The ranks that average."""
        return self._averager.process_set

    @staticmethod
    def _inner() -> Any:
        """The optimizer that was wrapped, while it is alive."""
        return None


class Averager:
    """Averages the models of the ranks after each step.

    Args:
        named: names and parameters, equal on all ranks.
        method: how.
        process_set: who.
        guard: compares models when they should be equal.

    Attributes:
        steps: how many there have been.
        without_waiting: whether late ranks hold nobody up.
    """

    def __init__(self, named: Named, method: Averaging, process_set: Any, guard: Guard) -> None:
        global _number
        self.method, self.process_set, self.guard = method, process_set, guard
        self.steps = 0
        self.without_waiting = False
        self._traffic, self._seconds = Traffic(), 0.0
        self._named = [(n, p) for n, p in named if p.is_floating_point()]
        self._kinds: dict[Any, list[torch.Tensor]] = {}
        for _, parameter in self._named:
            dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
            self._kinds.setdefault((dtype, parameter.device), []).append(parameter)
        self._states: list[State] = []
        self._engine: WaitAvoiding | None = None
        self._name, _number = (
            f"accordion.averaging.{process_set.process_set_id}.{_number}",
            _number + 1,
        )
        self._alone = not process_set.included() or process_set.size() == 1
        if not self._alone:
            self.communicator = HorovodCommunicator(process_set)
            self._set_up()

    def _set_up(self) -> None:
        groups = self.method.groups(self.communicator.size)
        shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._named]
        text = "\n".join([f"averaging {self.method!r}", *shapes])
        require_agreement(self.communicator, text, self._device())
        self.without_waiting = isinstance(self.method, WAGMA) and self._choose(self.method)
        if not self.without_waiting and groups:
            able = torch.tensor([float(self.communicator.extensible)], device=self._device())
            self.communicator.extensible = self._all(able)
            self.communicator.register(groups)

    def _device(self) -> Any:
        return self._named[0][1].device if self._named else None

    def _all(self, flag: torch.Tensor) -> bool:
        return bool(-self.communicator.run("accordion.able", _largest(-flag)) > 0)

    def _choose(self, method: WAGMA) -> bool:
        """Whether to average without waiting; the same on all ranks."""
        if method.wait_avoiding is False:
            return False
        reason = why_not(self.communicator.size)
        if self.process_set.process_set_id != 0:
            reason = "the process set is not all ranks"
        elif method.compressor is not None:
            reason = "what groups send is compressed"
        able = self._all(torch.tensor([float(reason is None)], device=self._device()))
        reason = reason or "another rank cannot"
        if method.wait_avoiding is True and not able:
            raise RuntimeError(f"{method!r}: averaging without waiting is not possible: {reason}.")
        if hvd.rank() == 0:
            words = "without waiting, over MPI" if able else f"in groups that wait, as {reason}"
            print(f"accordion_hvd: {method!r} averages {words}", file=sys.stderr, flush=True)
        return able

    # ---------------------------------------------------------------------------------- each step
    @torch.no_grad()
    def prepare(self) -> None:
        """Before the first step: ranks' models are equal, as broadcasts have made them."""
        if self._alone or self._states or self._engine is not None:
            return
        self._compare(1)
        models = [self._model(kind) for kind in self._kinds]
        if isinstance(self.method, WAGMA) and self.without_waiting:
            self._engine = WaitAvoiding(
                [model.cpu().numpy() for model in models],
                group_size=self.method.schedule(self.communicator.size).group_size,
                period=self.method.period,
            )
            return
        self._states = [
            self.method.start(model, self._info(i, 0.0)) for i, model in enumerate(models)
        ]

    @torch.no_grad()
    def average(self, lr: float) -> None:
        """A step has been taken."""
        if self._alone:
            return
        began = time.perf_counter()
        if self._engine is not None:
            equal = self._over_mpi(self._engine.average)
        else:
            equal = self.method.equal(self.steps)
            self._hold(self.method.exchange, lr)
        self.steps += 1
        self._seconds += time.perf_counter() - began
        if equal and self.guard.due(self.steps):
            self._compare(self.steps)

    @torch.no_grad()
    def average_now(self, model: torch.nn.Module | None = None) -> None:
        """See the optimizer's."""
        if self._alone:
            return
        self.prepare()
        if self._engine is not None:
            self._over_mpi(self._engine.average_now)
        else:
            self._hold(self.method.settle, 0.0)
        buffers = [b for b in model.buffers() if b.is_floating_point()] if model else []
        if buffers:
            means = self.communicator.run(f"{self._name}.buffers", _means(buffers))
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean)

    def close(self) -> None:
        """See the optimizer's."""
        if self._engine is not None:
            self._over_mpi(self._engine.close)

    def _over_mpi(self, what: Any) -> Any:
        models = [self._model(kind) for kind in self._kinds]
        hosted = [model.cpu().numpy() for model in models]
        try:
            return what(hosted)
        finally:
            for kind, host in zip(self._kinds, hosted, strict=True):
                self._put(kind, torch.from_numpy(host))

    def _hold(self, what: Any, lr: float) -> None:
        """Conversations of all kinds of parameters, one after the other."""
        for i, kind in enumerate(self._kinds):
            talk = what(self._model(kind), self._states[i], self._info(i, lr))
            model, self._states[i] = self._run(f"{self._name}.{i}", talk)
            self._put(kind, model)

    def _run(self, name: str, talk: Conversation) -> Any:
        answer, round_ = None, 0
        while True:
            try:
                asked = talk.send(answer)
            except StopIteration as stop:
                return stop.value
            several = isinstance(asked, tuple)
            pending = self.communicator.launch(
                f"{name}.{round_}", asked if isinstance(asked, tuple) else (asked,)
            )
            answers = pending.result()
            self._traffic.add(pending.traffic)
            answer, round_ = (tuple(answers) if several else answers[0]), round_ + 1

    def _info(self, number: int, lr: float) -> Info:
        rank, size = self.communicator.rank, self.communicator.size
        return Info(step=self.steps, rank=rank, size=size, name=f"{self._name}.{number}", lr=lr)

    def _model(self, kind: Any) -> torch.Tensor:
        """All parameters of a kind, one after the other, in memory of their own."""
        return torch.cat([p.detach().reshape(-1).to(kind[0]) for p in self._kinds[kind]])

    def _put(self, kind: Any, model: torch.Tensor) -> None:
        parameters = self._kinds[kind]
        parts = model.to(kind[1]).split([p.numel() for p in parameters])
        shaped = [part.view(p.shape) for p, part in zip(parameters, parts, strict=True)]
        torch._foreach_copy_([p.data for p in parameters], shaped)

    def _compare(self, step: int) -> None:
        """Models should be equal now."""
        if self.guard.mode != "off":
            sums = torch.stack([xp.checksum(parameter) for _, parameter in self._named])
            self.guard.compare(self.communicator, step, [name for name, _ in self._named], sums)

    # ------------------------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        """Of this rank since the beginning.

        steps; sent: bytes (for averaging without waiting, those of its exchanges); seconds: in
        averages, waiting included; late, on_time, lag: see `WaitAvoiding`; reports: what the
        method says of itself.
        """
        found: dict[str, Any] = {"steps": self.steps, "seconds": self._seconds}
        found |= {"sent": self._traffic.sent, "reports": self._reports()}
        if self._engine is not None:
            engine = self._engine
            found |= {"late": engine.late, "on_time": engine.on_time, "lag": engine.lag}
            found["sent"] = engine.sent
        return found

    def _reports(self) -> list[dict[str, float]]:
        reports = [self.method.report(state) for state in self._states]
        return [{key: float(x.reshape(-1)[0]) for key, x in report.items()} for report in reports]

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and optimizer: steps, and the method's state.

        Save it on each rank, after `average_now`. Averaging without waiting needs none of it.
        """
        return {"steps": self.steps, "states": self._states}

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        """Go on where `state` was taken, with the model of then; for the rank that it is of."""
        self.prepare()
        self.steps = saved["steps"]
        for state, old in zip(self._states, saved["states"], strict=True):
            for key, value in old.items():
                state[key] = value.to(state[key].device)


def _largest(x: torch.Tensor) -> Conversation:
    return (yield Allreduce(x, op="max"))


def _means(parts: Sequence[torch.Tensor]) -> Conversation:
    wide = [part.to(torch.float32) if part.dtype in _HALF else part for part in parts]
    return (yield tuple(Allreduce(part) for part in wide))
