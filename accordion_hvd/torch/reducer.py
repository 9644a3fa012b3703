"""Exchange of PyTorch gradients during the backward pass: hooks, accumulation, sparse gradients."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from accordion_hvd import check
from accordion_hvd.comm.agreement import largest
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allgather, ExchangeGenerator
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.gradient_averager import GradientAverager
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops import on_cpu
from accordion_hvd.ops import torch as xp
from accordion_hvd.policies import Policy
from accordion_hvd.policies.displacement import USUAL_GAIN, gain_of_adam, gain_of_sgd
from accordion_hvd.torch import engines, validation
from accordion_hvd.validate import OWNER, not_plain

_hooks: Any = WeakTensorKeyDictionary()  # from parameters to the handles of their hooks


@dataclass(slots=True)
class Watched:
    """A parameter whose gradient is exchanged.

    Attributes:
        name: its name; unique, and equal on all ranks.
        delay: number of backward passes until its gradient is exchanged.
        mark: what `_mark` returned when the exchange of its gradient could begin.
        checksum: that of its gradient then, before the first exchange.
    """

    parameter: torch.Tensor
    name: str
    delay: int
    mark: tuple[int, int, int] | None = None
    checksum: torch.Tensor | None = None


class Reducer(GradientAverager[Exchange]):
    """Average gradients over the ranks, starting while the backward pass still runs.

    Its other arguments are those of `GradientAverager`.

    Args:
        named: (name, parameter) pairs; names are unique and equal on all ranks.
        optimizer: function that returns the optimizer, for its learning rates; None if unknown.
        lr: function that returns the learning rate if the optimizer is unknown; None: 0.
        passes: number of backward passes whose gradients are summed before an exchange.
        scaler: the GradScaler of the training, so that residuals are stored unscaled.
        settings: names of the group settings that exchange generators receive in `Info.hyper`;
            tensors of different groups then never share a bucket. None: no settings.

    Attributes:
        hooked: whether hooks of the parameters announce gradients.
        open: whether a script can change gradients between the backward pass and `finish`.
        finite: whether the gradients of the last exchange were finite on all ranks.
        leaves_unused: whether a parameter that no rank has used stays as it is, as in DDP. Horovod
            applies a gradient of zeros instead.
        loss_scale: the loss scale of this step, if only the step knows it. Exchanges then wait for
            the step (`deferred`).
        listening: whether exchanges start during the backward pass. If False, `finish` starts them.
        pending: whether some gradient has not been exchanged yet.
        finished: whether all gradients are averaged and no backward pass has followed.
    """

    framework = "torch"
    hooked = open = True
    leaves_unused = False
    finite = True
    deferred = False
    loss_scale: torch.Tensor | None = None
    pending = finished = False

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        policy: Policy,
        process_set: Any,
        optimizer: Callable[[], torch.optim.Optimizer | None],
        *,
        lr: Callable[[], float] | None = None,
        passes: int = 1,
        total: bool = False,
        sparse_as_dense: bool = False,
        skip: Sequence[str] = (),
        guard: Guard | None = None,
        ledger: Any = None,
        scaler: Any = None,
        settings: Sequence[str] | None = None,
        residual_dtype: str = "float32",
    ) -> None:
        self.settings, self.listening = settings, settings is None and self.hooked
        self.scaler, self.optimizer, self.lr = scaler, optimizer, lr
        self.passes = policy.passes = passes
        self.per_sample = policy.scope == "samples"
        self._names: dict[torch.Tensor, str] = {}
        self._watched: dict[torch.Tensor, Watched] = {}  # parameters that need a gradient
        self._group_of: dict[torch.Tensor, str] = {}  # numbers of groups with settings
        self._given: dict[torch.Tensor, str] = {}  # names of these and of other parameters
        self._members: list[int] = []  # ids of the parameters in the optimizer's groups
        self._ready: Counter[int] = Counter()  # number of ready members by bucket batch
        super().__init__(
            policy, process_set, total=total, sparse_as_dense=sparse_as_dense, skip=skip,
            guard=guard, ledger=ledger, with_settings=settings is not None,
            residual_dtype=residual_dtype,
        )  # fmt: skip
        self.watch(named)
        self.check_patterns()
        checkpoint.register(self)

    # ------------------------------------------------------------------------------- parameters
    def watch(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Exchange the gradients of these parameters as well, as soon as they require gradients."""
        self._names |= {parameter: name for name, parameter in named}
        self._watch_unfrozen()

    def _follow_groups(self) -> None:
        groups = self.groups()
        members = [id(parameter) for group in groups for parameter in group["params"]]
        if members == self._members:
            return
        self._members = members
        used, added = set(self._names.values()), []
        for i, group in enumerate(groups):
            for j, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    name = self._given.get(parameter) or _name_in(group, i, j)
                    # A group that has left may have had the place of a new one.
                    names = itertools.chain([name], (f"{name}.{k}" for k in itertools.count(2)))
                    added.append((next(x for x in names if x not in used), parameter))
                    used.add(added[-1][0])
        if added:
            self.take_in(added)

    def name_later(self, named: Sequence[tuple[str, torch.Tensor]] | None) -> None:
        """Keep the names of parameters that may join the optimizer's groups later."""
        self._given = {p: name for name, p in validation.plain_names(named or ())}

    def take_in(self, added: list[tuple[str, torch.Tensor]]) -> None:
        """Exchange the gradients of parameters that were added to the optimizer's groups.

        Raises:
            RuntimeError: if the exchange of this step has begun without them.
        """
        if self.in_flight:
            raise RuntimeError(
                f"{OWNER}: parameter group {added[0][0]!r} was added between backward() and "
                "step(), so its gradient was not averaged; add it before the backward pass."
            )
        validation.check_parameters(added)
        self.watch(added)

    def _watch_unfrozen(self) -> None:
        known = self._watched
        new = [(p, n) for p, n in self._names.items() if p.requires_grad and p not in known]
        # The order in which the backward pass reaches them: last layers first.
        for parameter, name in reversed(new):
            known[parameter] = Watched(parameter, name, self.passes * self.batches)
            self.device = parameter.device
            if self.listening and not self.idle:
                _add_hook(parameter, weakref.ref(self))
        self.extend(self._tensor_infos([parameter for parameter, _ in reversed(new)]))

    def ranks_changed(self) -> None:
        self.reset()
        idle = self.idle
        super().ranks_changed()
        if idle and self.listening and not self.idle:
            for parameter in self._watched:
                _add_hook(parameter, weakref.ref(self))

    def connect(self) -> Communicator:
        return engines.connect(self.process_set)

    def make_exchange(self, tensors: Sequence[TensorInfo]) -> Exchange:
        exchange = Exchange(
            self.communicator, self.policy, tensors, skip=self.skip, name=self.name,
            ledger=self.ledger, residual_dtype=self.residual_dtype,
        )  # fmt: skip
        exchange.notes_absence = self.leaves_unused
        if self.scaler is not None:  # scales that only steps know may differ between ranks
            reference = weakref.ref(self)
            exchange.loss_scale = lambda: reference()._scale()  # type: ignore[union-attr]
        return exchange

    def tensors(self) -> dict[Any, TensorInfo]:
        """Return the parameters that require gradients, those of the last layers first."""
        return self._tensor_infos(list(self._watched))

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for parameter, name in self._names.items()]

    def replicas(self) -> dict[str, torch.Tensor]:
        """Return all parameters, including frozen ones."""
        return {name: parameter for parameter, name in self._names.items()}

    def _tensor_infos(self, parameters: Sequence[torch.Tensor]) -> dict[Any, TensorInfo]:
        if self.settings is not None:
            self._number_groups()
        names, group_of = self._names, self._group_of
        return {
            p: TensorInfo(names[p], tuple(p.shape), xp.dtype(p), str(p.device), group_of.get(p, ""))
            for p in parameters
        }

    def _number_groups(self) -> None:
        # A group keeps its number when others before it leave the optimizer.
        for group in self.groups():
            known = [self._group_of[p] for p in group["params"] if p in self._group_of]
            number = known[0] if known else str(len(set(self._group_of.values())))
            for parameter in group["params"]:
                self._group_of.setdefault(parameter, number)

    # ---------------------------------------------------------------------------------- one step
    def arrived(self, parameter: torch.Tensor) -> None:
        """Count a backward pass of `parameter`, and start its bucket batch if it is complete."""
        watched = self._watched[parameter]
        if watched.delay <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                f"step() (parameter {watched.name!r}). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.pending, self.finished = True, False
        watched.delay -= 1
        if watched.delay == 0:
            # A later change would be lost: the exchange may have begun (`_check_unchanged`).
            if self.open:
                watched.mark, watched.checksum = _mark(parameter.grad), None
                if watched.mark is not None and not self.agreed:  # `.grad.data` counts no changes
                    watched.checksum = xp.checksum(parameter.grad)
            if self.agreed and not self.deferred:
                self._count_ready(watched)

    @property
    def batches(self) -> int:
        """Return the number of batches, each of `passes` backward passes, per exchange."""
        observers = self.policy.observers
        return observers.accumulated if observers else 1

    def decide(self) -> None:
        """Take a decision that is due, before the last batch of an exchange; collective.

        The decision may ask for more batches before the exchange.
        """
        if self.in_flight or self.idle:
            return
        self._set_up()
        before = self.batches
        self.exchange.decide(self._rates())
        for watched in self._watched.values():
            watched.delay += self.passes * (self.batches - before)

    @torch.no_grad()
    def keep(self) -> None:
        """Keep gradients local, averaged over accumulated batches; call it instead of `finish`."""
        if self.idle:
            return
        if self.batches > 1:
            for parameter in self._watched:
                if parameter.grad is not None:
                    parameter.grad.div_(self.batches)
        grads = [self._gradient(parameter) for parameter in self.keys]
        self.exchange.observe(grads, self._rates())
        self.finished = True
        self.reset()

    def finish(self) -> None:
        """Exchange the remaining gradients, wait for all exchanges and write the averages.

        Raises:
            RanksDisagree: at the first call, if the ranks have different settings.
            RuntimeError: if a script has changed gradients, or added parameters, too early.
        """
        if self.idle:
            return
        try:
            self._check_unchanged()
            self._follow_groups()
            if not self.agreed:
                self._set_up()
            if self.scaler is None:
                self.exchange.loss_scale = self._smallest_scale()
            exchange = self._begin()
            assert exchange.running is not None
            for index in exchange.running.missing():
                self._start(exchange, index)
            self.finite = exchange.finish()
            self._write(exchange)
            if self.sparse:
                self._exchange_sparse()
            self.finished = True
        finally:
            self.reset()

    def _smallest_scale(self) -> Callable[[], Any] | None:
        # fp16 values are rounded in units that all ranks share; a rank whose last gradients were
        # not finite has a smaller scale than the others.
        if self.loss_scale is None or not self.policy.fp16_reduction:
            return None
        number = self.loss_scale.detach().reshape(1).to(self.device, torch.float32)
        found = -self.communicator.run(f"{self.name}.scale", largest(-number))
        return lambda: found

    def _check_unchanged(self) -> None:
        full = self.passes * self.batches
        frozen = [w for w in self._watched.values() if w.delay < full]
        for watched in frozen:
            if not watched.parameter.requires_grad:
                raise RuntimeError(
                    f"{OWNER}: {watched.name!r} was frozen between backward() and step(), but "
                    "optimizers apply a gradient that is there. Freeze it before backward() or "
                    "after step()."
                )
        marked = [watched for watched in self._watched.values() if watched.mark is not None]
        newest: dict[int, int] = {}  # views of one buffer count their changes together
        for watched in marked:
            _, buffer, version = watched.mark or (0, 0, 0)
            newest[buffer] = max(version, newest.get(buffer, 0))
        for watched in marked:
            place, buffer, _ = watched.mark or (0, 0, 0)
            grad, known = watched.parameter.grad, watched.checksum
            changed = _mark(grad) != (place, buffer, newest[buffer])
            if changed or (known is not None and not torch.equal(xp.checksum(grad), known)):
                raise RuntimeError(
                    f"{OWNER}: the gradient of {watched.name!r} was changed between backward() and "
                    "step() (by clipping, or by scaler.unscale_), but gradients are averaged "
                    "meanwhile. Call optimizer.synchronize() before the change, and step() within "
                    "`with optimizer.skip_synchronize():`; or pass grad_scaler=."
                )

    @property
    def in_flight(self) -> bool:
        return self._exchange is not None and self._exchange.running is not None

    def adopting(self, saved: dict[str, Any] | None) -> checkpoint.Restore:
        restore = super().adopting(saved)

        def adopt() -> None:
            self.reset()
            restore()

        return adopt

    def reset(self) -> None:
        if self._exchange is not None:
            self._exchange.abort()
        self.pending = False
        self._ready.clear()
        delay = self.passes * self.batches
        for watched in self._watched.values():
            watched.delay, watched.mark, watched.checksum = delay, None, None
        self.loss_scale = None

    def _begin(self) -> Exchange:
        exchange = self.exchange
        if exchange.running is None:
            self._follow_groups()
            self._watch_unfrozen()
            if self.settings is not None:
                exchange.hyper = {**exchange.hyper, **self._settings(self.settings)}
            elif self.policy.output == "update" and (optimizer := self.optimizer()) is not None:
                if not validation.is_plain(optimizer):  # a scheduler may have set a momentum
                    raise not_plain(self.policy, type(optimizer).__name__)
            exchange.begin(self._rates())
        return exchange

    def _settings(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for group in self.groups():
            settings = {name: group[name] for name in names}
            for number in {self._group_of[p] for p in group["params"] if p in self._group_of}:
                if found.setdefault(number, settings) != settings:
                    allowed = f"one whose {', '.join(names)} are equal for these parameters"
                    check.refuse(OWNER, "param_groups", "parameters moved to another", allowed)
        return found

    def groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def rates(self) -> torch.Tensor | None:
        found = [number_of(group["lr"]) for group in self.groups() if "lr" in group]
        return torch.tensor(found, device=self.device) if found else None

    def gains(self, names: Sequence[str]) -> dict[str, float]:
        gains, optimizer = super().gains(names), self.optimizer()
        if optimizer is None:
            return gains
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (name := self._names.get(parameter)) in gains:
                    gains[name] = gain_of(group, optimizer.state.get(parameter, {}))
        return gains

    def _rates(self) -> dict[str, float]:
        follows = self.exchange.sync is not None or self.settings is not None
        read = number_of if follows else _number_or_tensor
        groups = [(read(g["lr"]), g["params"]) for g in self.groups() if "lr" in g]
        rate = {parameter: lr for lr, parameters in groups for parameter in parameters}
        usual = 0.0 if self.lr is None else read(self.lr())
        observers = self.policy.observers
        for_all = self.settings is not None or (observers and observers.any("decides_ahead"))
        entries = [s for s in self.exchange.bucket_states if s.bucket.compress or for_all]
        return {s.bucket.name: rate.get(self.keys[s.bucket.members[0]], usual) for s in entries}

    def _count_ready(self, watched: Watched) -> None:
        number = self.number.get(watched.parameter)
        if number is None or self.per_sample:
            return  # `finish` exchanges sparse gradients and gradients of single contributors
        exchange = self._exchange
        if exchange is None or exchange.running is None:
            observers = self.policy.observers
            if observers and observers.any("decides_ahead"):
                self.decide()
                if watched.delay > 0 or observers.any("withholds"):
                    return  # more batches follow, or models are averaged instead
            exchange = self._begin()
        assert exchange.running is not None
        layout = exchange.running.layout
        batch = layout.batch_of[number]
        self._ready[batch] += 1
        if self._ready[batch] == len(layout.batches[batch].members):
            self._start(exchange, batch)

    def _start(self, exchange: Exchange, index: int) -> None:
        assert exchange.running is not None
        batch = exchange.running.layout.batches[index]
        parameters = [self.keys[m] for m in batch.members]
        began = perf_counter()
        taken = _samples(parameters) if self.per_sample else [self._gradient(p) for p in parameters]
        grad = batch.pack(taken, keep=True)
        with torch.no_grad():
            if self._scaled:
                grad = grad.div_(self._scale())
            if self.batches > 1:
                grad = grad.div_(self.batches)
            weights = None
            if batch.first.needs_weights:
                weights = batch.pack([parameter.detach() for parameter in parameters])
            present = None
            if not all(there := self._are_present(parameters)):
                present = torch.tensor(there, dtype=torch.float32, device=grad.device)
            self.ledger.add("encode", perf_counter() - began)
            exchange.start(index, grad, weights, present)

    def _are_present(self, parameters: list[torch.Tensor]) -> list[bool]:
        # Whether the mean is applied here, whatever gradients other ranks have.
        leaves = self.leaves_unused
        return [p.requires_grad and not (leaves and p.grad is None) for p in parameters]

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return grad.to_dense() if grad.is_sparse else grad.data  # which counts its own changes

    @property
    def _scaled(self) -> bool:
        return self.scaler is not None or self.loss_scale is not None

    def _scale(self) -> Any:
        if self.scaler is None:
            return self.loss_scale
        # As a tensor if possible: reading the number would wait for the GPU.
        lazily = getattr(self.scaler, "_get_scale_async", None)
        scale = lazily() if lazily is not None else None
        return self.scaler.get_scale() if scale is None else scale

    @torch.no_grad()
    def _write(self, exchange: Exchange) -> None:
        began = perf_counter()
        factor: Any = self.communicator.size if self.total else 1
        if self._scaled:
            factor = factor * self._scale()
        absent, finite = exchange.absent, self.finite
        for batch in exchange.layout.batches:
            kept = [i for i, m in enumerate(batch.members) if m not in absent]
            parameters = [self.keys[batch.members[i]] for i in kept]
            if finite:
                means = batch.unpack()
                means = [means[i] for i in kept]
                if self.total or self._scaled:
                    means = [mean.mul_(factor) for mean in means]
            else:
                means = [torch.full_like(p, exchange.lost) for p in parameters]
            if parameters:
                # Exclusive: no other tensor shares the memory of a mean.
                self._put(parameters, means, not finite or not batch.shares)
            batch.mean = None  # free the memory before the next step
        self.ledger.add("decode", perf_counter() - began)

    def _put(
        self, parameters: list[torch.Tensor], means: list[torch.Tensor], exclusive: bool
    ) -> None:
        if exclusive or not _copy_all(parameters, means):
            for parameter, mean in zip(parameters, means, strict=True):
                _set_gradient(parameter, mean, exclusive)

    # ----------------------------------------------------------------------------- sparse gradients
    def _exchange_sparse(self) -> None:
        grads = [self._sparse_gradient(p) for p in self.sparse]
        parts = self.communicator.run(f"{self.name}.sparse", _gather_sparse(grads))
        factor = (1.0 if self.total else 1.0 / self.communicator.size) / self.batches
        for parameter, indices, values in zip(self.sparse, *parts, strict=True):
            index, mean = torch.cat([i.t() for i in indices], 1), torch.cat(values) * factor
            grad = torch.sparse_coo_tensor(index, mean, parameter.shape, check_invariants=True)
            parameter.grad = grad.coalesce()

    def _sparse_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter).to_sparse(1)
        return (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()

    # ---------------------------------------------------------------------------------- agreement
    def _set_up(self) -> None:
        if self.agreed:
            return
        self._watch_unfrozen()
        self.agree(f"passes={self.passes}")
        order = list(self._watched)
        if not self.sparse_as_dense and order:
            # A rank without such a gradient in this step must gather with the others.
            flags = self.on_any_rank([p.grad is not None and p.grad.is_sparse for p in order])
            self.expect_sparse([p for p, flag in zip(order, flags, strict=True) if flag])


def _add_hook(parameter: torch.Tensor, reducer: weakref.ref[Reducer]) -> None:
    if parameter in _hooks:
        _hooks[parameter].remove()
    notify = functools.partial(_notify, reducer)
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(notify)


def _notify(reducer: weakref.ref[Reducer], parameter: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(parameter)


def _samples(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    samples = [getattr(parameter, "grad_sample", None) for parameter in parameters]
    counts = {len(sample) for sample in samples if sample is not None}
    if len(counts) != 1:
        found = f"their numbers are {sorted(counts)}" if counts else "there are none"
        raise ValueError(
            "the grad_sample of each parameter must contain the gradients of single contributors "
            f"(accordion_hvd.privacy.torch.backward stores them), the same number each; {found}."
        )
    count = counts.pop()
    for parameter in parameters:
        parameter.grad_sample = None  # type: ignore[attr-defined]  # do not use them twice
    return [
        torch.zeros((count, *p.shape), dtype=p.dtype, device=p.device) if s is None else s.detach()
        for p, s in zip(parameters, samples, strict=True)
    ]


def _name_in(group: dict[str, Any], number: int, index: int) -> str:
    names = group.get("param_names", [])
    return names[index] if index < len(names) else f"group.{number}.{index}"


def _mark(grad: torch.Tensor | None) -> tuple[int, int, int] | None:
    if grad is None or grad.is_sparse:
        return None
    # Views share a count of changes with their buffer.
    buffer = grad if grad._base is None else grad._base
    return grad.data_ptr(), buffer.data_ptr(), grad._version


def _set_gradient(parameter: torch.Tensor, mean: torch.Tensor, exclusive: bool) -> None:
    grad = parameter.grad
    if not parameter.requires_grad:
        return  # the parameter has been frozen and must not change
    if grad is None:
        parameter.grad = mean if exclusive else mean.clone()
    elif grad.is_sparse:
        parameter.grad = mean.to_sparse(grad.sparse_dim())
    elif grad.data_ptr() != mean.data_ptr():
        same_layout = grad.is_contiguous() and mean.is_contiguous()
        alone = grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
        if exclusive and grad.dtype == mean.dtype and same_layout and alone:
            grad.set_(mean)  # a view of a larger buffer stays one
        else:
            grad.copy_(mean)


def _copy_all(parameters: list[torch.Tensor], means: list[torch.Tensor]) -> bool:
    grads = [parameter.grad for parameter in parameters]
    for parameter, grad, mean in zip(parameters, grads, means, strict=True):
        if grad is None or grad.is_sparse or grad.dtype != mean.dtype:
            return False
        if not parameter.requires_grad:
            return False
    torch._foreach_copy_(grads, means)
    return True


def _gather_sparse(grads: list[torch.Tensor]) -> ExchangeGenerator:
    indices = [Allgather(g.indices().t().contiguous(), uneven=True) for g in grads]
    values = [Allgather(g.values(), uneven=True) for g in grads]
    parts = yield tuple(indices + values)
    return parts[: len(grads)], parts[len(grads) :]


def _number_or_tensor(lr: Any) -> Any:
    # Not from an accelerator, for which the host would wait in each step.
    return lr if isinstance(lr, torch.Tensor) and not on_cpu(lr.device) else float(lr)


def number_of(lr: Any) -> float:
    """Return a learning rate as a number; one on an accelerator is read after each change.

    A graph of an accelerator that changes it is not noticed.
    """
    lr = _number_or_tensor(lr)
    if isinstance(lr, float):
        return lr
    version, number = _numbers.get(lr, (None, 0.0))
    if version != lr._version:
        number = float(lr)
        _numbers[lr] = lr._version, number
    return number


_numbers: Any = WeakTensorKeyDictionary()  # learning rate -> version and value


MOMENTS = "exp_avg_sq", "square_avg", "sum"
"""Names of second moments in the states of Adam, RMSprop and Adagrad."""


def gain_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    momentum = group.get("momentum")
    moments = next((state[name] for name in MOMENTS if name in state), None)
    if moments is None or "acc_delta" in state:  # Adadelta has no learning rate in this sense
        if momentum is None:
            return USUAL_GAIN
        return gain_of_sgd(float(momentum)) * (1 - (group.get("dampening", 0) if momentum else 0))
    local: torch.Tensor = moments.to_local() if hasattr(moments, "to_local") else moments
    beta = group.get("betas", (0.0, 0.0))[1]  # optimizers of other packages may lack some entries
    steps = float(state.get("step", math.inf))
    return gain_of_sgd(momentum or 0.0) * gain_of_adam(float(local.float().mean()), beta, steps)
