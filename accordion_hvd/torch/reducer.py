"""From parameters' gradients to buckets and back: hooks, accumulation, sparse gradients."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import accordion_hvd
from accordion_hvd import checkpoint, halves, machines, simulate
from accordion_hvd.base import Allgather, Allreduce, Compressor, Conversation
from accordion_hvd.buckets import TensorInfo
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.communicator import Communicator
from accordion_hvd.exchange import Exchange
from accordion_hvd.ops import torch as xp
from accordion_hvd.policy import Policy
from accordion_hvd.torch.communicator import HorovodCommunicator

_numbers: Counter[int] = Counter()  # by process set: members count alike, others do not count
_listening: Any = WeakTensorKeyDictionary()  # parameter -> its hook's handle


@dataclass(slots=True)
class Watched:
    """A parameter whose gradient is exchanged.

    Attributes:
        parameter: itself.
        name: unique, and equal on all ranks.
        delay: backward passes to come before its gradient may leave.
        number: of the exchange's tensor; None as long as that is open, or if it is sparse.
    """

    parameter: torch.Tensor
    name: str
    delay: int
    number: int | None = None


class Reducer:
    """Averages the gradients of parameters over the ranks, starting while backward still runs.

    Args:
        named: names and parameters; names are unique and equal on all ranks.
        policy: decides which compressor serves which tensor.
        process_set: who exchanges.
        groups: gives the optimizer's parameter groups, for their learning rates.
        passes: backward passes that add up to one exchange.
        total: whether the result is the sum instead of the average.
        sparse_as_dense: whether sparse gradients are exchanged like dense ones.
        skip: patterns of names that travel dense.
        scaler: the GradScaler in use, so that errors are kept unscaled.
        settings: names of the groups' settings that conversations are told (`Info.hyper`); then
            tensors of different groups never share one. None: conversations are told none.
        alone: whether this process is outside the process set, and exchanges with itself.

    Attributes:
        finite: whether the last exchange counted.
        listening: whether exchanges start while backward runs; else all do in `finish`.
    """

    listening = True
    finite = True

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        policy: Policy,
        process_set: Any,
        groups: Callable[[], list[dict[str, Any]]],
        *,
        passes: int = 1,
        total: bool = False,
        sparse_as_dense: bool = False,
        skip: Sequence[str] = (),
        scaler: Any = None,
        settings: Sequence[str] | None = None,
        alone: bool = False,
    ) -> None:
        self.settings, self.listening = settings, settings is None
        self.policy, self.skip, self.scaler, self.groups = policy, tuple(skip), scaler, groups
        self._unused = copy.deepcopy(policy.state_dict())
        self.passes, self.total, self.sparse_as_dense = passes, total, sparse_as_dense
        self.communicator: Communicator = (
            simulate.SimulatedCommunicator(simulate.Hub(1), 0, xp)
            if alone
            else HorovodCommunicator(process_set)
        )
        number = process_set.process_set_id
        self.name = f"accordion.{number}.{_numbers[number]}"
        _numbers[number] += 1
        self.pending = False  # some gradient is there that has not been exchanged
        self.finished = False  # gradients are averaged, and none has come since
        self._exchange: Exchange | None = None
        self._agreed = False
        self._names: dict[torch.Tensor, str] = {}
        self._watched: dict[torch.Tensor, Watched] = {}  # those that need a gradient
        self._dense: list[torch.Tensor] = []  # by number of the exchange's tensor
        self._sparse: list[torch.Tensor] = []
        self._ready: Counter[int] = Counter()  # by unit: members that are ready
        self.watch(named)
        checkpoint.register(self)

    # ------------------------------------------------------------------------------- parameters
    def watch(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Exchange the gradients of these parameters too, as soon as they need one."""
        self._names |= {parameter: name for name, parameter in named}
        self._look_for_new()

    def serving(self, parameter: torch.Tensor) -> Compressor:
        """What serves a parameter now, which needed a gradient at the last look (`watch`)."""
        slots, number = self.exchange.slot_of, self._watched[parameter].number
        assert number is not None
        return slots[number].compressor

    def _look_for_new(self) -> None:
        """Layers may be unfrozen at any time."""
        known = self._watched
        fresh = [(p, n) for p, n in self._names.items() if p.requires_grad and p not in known]
        for parameter, name in reversed(fresh):
            known[parameter] = Watched(parameter, name, self.passes * self.batches)
            if self.listening:
                _listen(parameter, weakref.ref(self))
        if self._exchange is not None and fresh:
            parameters = [parameter for parameter, _ in reversed(fresh)]
            self._exchange.extend(self._described(parameters))
            self._place(parameters)

    @property
    def exchange(self) -> Exchange:
        """What runs the conversations; made at the first use."""
        if self._exchange is None:
            sparse = set(self._sparse)
            tensors = [p for p in self._watched if p not in sparse]
            self._exchange = Exchange(
                self.communicator,
                self.policy,
                self._described(tensors),
                skip=self.skip,
                name=self.name,
            )
            self._exchange.keep_buffers = True
            self._place(tensors)
        return self._exchange

    def expect(self, names: Sequence[str]) -> None:
        """Before a restore: these tensors were exchanged densely, others were sparse."""
        known = set(names)
        if self._exchange is None:
            self._sparse = [w.parameter for w in self._watched.values() if w.name not in known]

    def _place(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            self._watched[parameter].number = len(self._dense)
            self._dense.append(parameter)

    def _described(self, parameters: Sequence[torch.Tensor]) -> list[TensorInfo]:
        group_of = dict.fromkeys(parameters, "")
        if self.settings is not None:
            group_of = {p: str(i) for i, group in enumerate(self.groups()) for p in group["params"]}
        return [
            TensorInfo(self._names[p], tuple(p.shape), xp.dtype(p), str(p.device), group_of[p])
            for p in parameters
        ]

    # ---------------------------------------------------------------------------------- one step
    def arrived(self, parameter: torch.Tensor) -> None:
        """Autograd has added to `parameter.grad`."""
        watched = self._watched[parameter]
        if watched.delay <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                f"step() (parameter {watched.name!r}). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.pending, self.finished = True, False
        watched.delay -= 1
        if watched.delay == 0 and self._agreed:
            self._count(watched)

    @property
    def batches(self) -> int:
        """Batches that add up, each of `passes` backward passes, to one exchange."""
        return self.policy.accumulated

    def decide(self) -> None:
        """Before a batch is taken as the last one of an exchange: a decision may ask for more.

        Collective, if one is due.
        """
        if self.in_flight:
            return  # then this has been seen to
        if not self._agreed:
            self._look_for_new()
            self._agree()
        before = self.batches
        self.exchange.decide(self._rates())
        for watched in self._watched.values():
            watched.delay += self.passes * (self.batches - before)

    @torch.no_grad()
    def keep(self) -> None:
        """Instead of `finish`: gradients stay this rank's, averaged over accumulated batches."""
        if self.batches > 1:
            for parameter in self._watched:
                if parameter.grad is not None:
                    parameter.grad.div_(self.batches)
        grads = [self._gradient(parameter) for parameter in self._dense]
        self.exchange.observe(grads, self._rates())
        self.finished = True
        self.reset()

    def finish(self) -> None:
        """Exchange what is not under way yet, wait for everything and write the means.

        Raises:
            RanksDisagree: at the first call, ranks were set up differently.
        """
        try:
            if not self._agreed:
                self._look_for_new()
                self._agree()
            self._begin()
            self._start_missing()
            self.finite = self.exchange.finish()
            self._write(self.finite)
            self._exchange_sparse()
            self.finished = True
        finally:
            self.reset()

    @property
    def in_flight(self) -> bool:
        """Whether some gradient has left already."""
        return self._exchange is not None and self._exchange.running is not None

    def adopt(self, saved: dict[str, Any] | None) -> None:
        """Go on from a `checkpoint.snapshot`, before the next exchange (None: from the beginning).

        Ranks see then whether each had its own: else all forget what was of use to one alone.

        Raises:
            ValueError: it does not fit.
        """
        self.reset()
        if saved is None:
            self._exchange, self._dense = None, []
            self.policy._bound = None
            self.policy.load_state_dict(copy.deepcopy(self._unused))
        else:
            self._own = checkpoint.adopt(self.exchange, saved)
        self.doubt()

    def doubt(self) -> None:
        """Before the next exchange, ranks see again whether they mean the same."""
        self._agreed = False

    _own = True  # what was adopted was this rank's

    def reset(self) -> None:
        """Forget what is under way."""
        if self._exchange is not None:
            self._exchange.abort()
        self.pending = False
        self._ready.clear()
        for watched in self._watched.values():
            watched.delay = self.passes * self.batches

    def _begin(self) -> None:
        if self.exchange.running is None:
            self._look_for_new()
            if self.settings is not None:
                self.exchange.hyper = {
                    str(i): {name: group[name] for name in self.settings}
                    for i, group in enumerate(self.groups())
                }
            self.exchange.begin(self._rates())

    def _rates(self) -> dict[str, float]:
        rate = {p: float(group["lr"]) for group in self.groups() for p in group["params"]}
        told = self.settings is not None or self.policy.whole
        slots = [slot for slot in self.exchange.slots if slot.bucket.compress or told]
        return {s.bucket.name: rate.get(self._dense[s.bucket.members[0]], 0.0) for s in slots}

    def _count(self, watched: Watched) -> None:
        """One more member of its unit is ready; start the unit with its last."""
        if watched.number is None or self.policy.several:
            return  # gradients of single contributors come in their own time
        if not self.in_flight:
            if self.policy.whole:
                self.decide()
                if watched.delay > 0 or self.policy.apart:
                    return  # more batches are to come, or nothing is exchanged
            self._begin()
        plan = self.exchange.plan
        unit = plan.unit_of[watched.number]
        self._ready[unit] += 1
        if self._ready[unit] == len(plan.units[unit].members):
            self._start(unit)

    def _start_missing(self) -> None:
        running = self.exchange.running
        assert running is not None
        for unit in range(len(self.exchange.plan.units)):
            if not running.started(unit):
                self._start(unit)

    def _start(self, unit: int) -> None:
        parameters = [self._dense[m] for m in self.exchange.plan.units[unit].members]
        given = _samples if self.policy.several else self._gradients
        grad = self.exchange.pack(unit, given(parameters))
        with torch.no_grad():
            if self.scaler is not None:
                grad = grad.div_(self._scale())
            if self.batches > 1:
                grad = grad.div_(self.batches)
            weights = None
            if self.exchange.reads(unit):
                weights = self.exchange.pack_weights(unit, [p.detach() for p in parameters])
            self.exchange.start(unit, grad, weights)

    def _gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._gradient(parameter) for parameter in parameters]

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return grad.to_dense() if grad.is_sparse else grad.detach()

    def _scale(self) -> Any:
        """The loss scale; as a tensor where it is one, since reading it would wait for a GPU."""
        lazily = getattr(self.scaler, "_get_scale_async", None)
        scale = lazily() if lazily is not None else None
        return self.scaler.get_scale() if scale is None else scale

    @torch.no_grad()
    def _write(self, finite: bool) -> None:
        factor: Any = self.communicator.size if self.total else 1
        if self.scaler is not None:
            factor = factor * self._scale()
        for index, unit in enumerate(self.exchange.plan.units):
            parameters = [self._dense[m] for m in unit.members]
            if not finite:
                for parameter in parameters:
                    _put(parameter, torch.full_like(parameter, float("nan")), own=True)
                continue
            means = self.exchange.unpack(index)
            if self.total or self.scaler is not None:
                means = [mean.mul_(factor) for mean in means]
            own = not self.exchange.shares(index)
            if own or not _put_together(parameters, means):
                for parameter, mean in zip(parameters, means, strict=True):
                    _put(parameter, mean, own)
        self.exchange.release()

    # ----------------------------------------------------------------------------- sparse gradients
    def _exchange_sparse(self) -> None:
        if not self._sparse:
            return
        grads = [self._sparse_gradient(p) for p in self._sparse]
        name = f"{self.name}.sparse"
        parts = self.communicator.run(name, _gather_sparse(grads))
        factor = (1.0 if self.total else 1.0 / self.communicator.size) / self.batches
        for parameter, indices, values in zip(self._sparse, *parts, strict=True):
            mean = torch.sparse_coo_tensor(
                torch.cat([i.t() for i in indices], 1),
                torch.cat(values) * factor,
                parameter.shape,
                check_invariants=True,
            )
            parameter.grad = mean.coalesce()

    def _sparse_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter).to_sparse(1)
        return (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()

    # ---------------------------------------------------------------------------------- agreement
    def _agree(self) -> None:
        """Before the first exchange: do all ranks mean the same? Whose gradients are sparse?"""
        order = list(self._watched)
        known = [f"{self._names[p]} {tuple(p.shape)} {p.dtype}" for p in order]
        described = [f"accordion_hvd {accordion_hvd.__version__}, torch", repr(self.policy)]
        settings = f"passes={self.passes} sum={self.total} skip={self.skip}"
        settings += " loaders give large batches" if self.policy.loader else ""
        text = "\n".join([*described, settings, *known])
        device = order[0].device if order else None
        require_agreement(self.communicator, text, device)
        machines.meet(self.communicator, self.policy.by_machine, device)
        halves.meet(self.communicator, self.policy, device)
        if self.settings is not None:
            checkpoint.agree_on_origin(self.exchange, self._own, device)
            self._own = True
        if not self.sparse_as_dense and order:
            flags = [p.grad is not None and p.grad.is_sparse for p in order]
            mine = torch.tensor(flags, dtype=torch.int32, device=device)
            sparse = self.communicator.run("accordion.sparse", _any(mine))
            found = [p for p, flag in zip(order, sparse.tolist(), strict=True) if flag]
            if self._exchange is not None and set(found) != set(self._sparse):
                raise RuntimeError(
                    "sparse gradients appeared after optimizer.exchange had been read; read it "
                    "after the first step, or pass sparse_as_dense=True."
                )
            self._sparse = found
        self._agreed = True


class Idle:
    """Stands in for a `Reducer` where there is nobody to exchange with: alone, or outside."""

    passes = batches = 1
    in_flight = pending = finished = False

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], policy: Policy) -> None:
        named = [(name, p) for name, p in named if p.is_floating_point()]
        tensors = [TensorInfo(n, tuple(p.shape), xp.dtype(p), str(p.device)) for n, p in named]
        self.communicator = simulate.SimulatedCommunicator(simulate.Hub(1), 0, xp)
        self._make = lambda: Exchange(self.communicator, policy, list(reversed(tensors)))
        checkpoint.register(self)  # what a larger job still owed waits here for the next one

    @functools.cached_property
    def exchange(self) -> Exchange:
        """An exchange that never exchanges anything."""
        return self._make()

    def expect(self, names: Sequence[str]) -> None:
        """Nothing to expect."""

    def watch(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Nothing to hear."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self) -> None:
        """Nothing to decide."""

    def keep(self) -> None:
        """Gradients are this rank's own in any case."""


def _listen(parameter: torch.Tensor, reducer: weakref.ref[Reducer]) -> None:
    """Tell `reducer` of the parameter's gradients; whoever wrapped it before hears no more."""
    if parameter in _listening:
        _listening[parameter].remove()
    handle = parameter.register_post_accumulate_grad_hook(lambda p: _arrived(reducer, p))
    _listening[parameter] = handle


def _arrived(reducer: weakref.ref[Reducer], parameter: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(parameter)


def _samples(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of single contributors, taken from `grad_sample`; zeros where a parameter has none.

    Raises:
        ValueError: no parameter has any, or their numbers differ.
    """
    samples = [getattr(parameter, "grad_sample", None) for parameter in parameters]
    counts = {len(sample) for sample in samples if sample is not None}
    if len(counts) != 1:
        found = f"found were {sorted(counts)}" if counts else "there are none"
        raise ValueError(
            "gradients of single contributors are wanted in every parameter's grad_sample "
            f"(accordion_hvd.privacy.torch.backward puts them there), equally many; {found}."
        )
    count = counts.pop()
    for parameter in parameters:
        parameter.grad_sample = None  # type: ignore[attr-defined]  # not to be used twice
    return [
        torch.zeros((count, *p.shape), dtype=p.dtype, device=p.device) if s is None else s.detach()
        for p, s in zip(parameters, samples, strict=True)
    ]


def _put(parameter: torch.Tensor, mean: torch.Tensor, own: bool) -> None:
    """Make `mean` the gradient; without a copy where its memory is nobody else's."""
    grad = parameter.grad
    if not parameter.requires_grad:
        return  # frozen since: it must not move
    if grad is None:
        parameter.grad = mean if own else mean.clone()
    elif grad.is_sparse:
        parameter.grad = mean.to_sparse(grad.sparse_dim())
    elif grad.data_ptr() != mean.data_ptr():
        if own and grad.dtype == mean.dtype and grad.is_contiguous() and mean.is_contiguous():
            grad.set_(mean)
        else:
            grad.copy_(mean)


def _put_together(parameters: list[torch.Tensor], means: list[torch.Tensor]) -> bool:
    """Copy all `means` into gradients in one call; False where that cannot be."""
    grads = [parameter.grad for parameter in parameters]
    for parameter, grad, mean in zip(parameters, grads, means, strict=True):
        if grad is None or grad.is_sparse or grad.dtype != mean.dtype:
            return False
        if not parameter.requires_grad:
            return False
    torch._foreach_copy_(grads, means)
    return True


def _gather_sparse(grads: list[torch.Tensor]) -> Conversation:
    indices = [Allgather(g.indices().t().contiguous(), uneven=True) for g in grads]
    values = [Allgather(g.values(), uneven=True) for g in grads]
    parts = yield tuple(indices + values)
    return parts[: len(grads)], parts[len(grads) :]


def _any(flags: torch.Tensor) -> Conversation:
    result = yield Allreduce(flags, op="max")
    return result  # type: ignore[return-value]
