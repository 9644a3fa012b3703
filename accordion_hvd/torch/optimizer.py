"""`DistributedOptimizer`: a PyTorch optimizer whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.horovod import process_sets
from accordion_hvd.comm.horovod.torch import hvd
from accordion_hvd.core.observer import Observers
from accordion_hvd.engine.controls import Controls
from accordion_hvd.engine.guard import Guard
from accordion_hvd.policies.alternation import Alternation
from accordion_hvd.resolve import default_guard, resolve
from accordion_hvd.torch import averaging, validation
from accordion_hvd.torch.reducer import Reducer
from accordion_hvd.validate import check_adasum, check_arguments, check_passes, validate

Named = Sequence[tuple[str, torch.Tensor]]


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    skip: Sequence[str] = (),
    guard: str | None = None,
    guard_every: int | None = None,
    grad_scaler: Any = None,
) -> Any:
    """Average `optimizer`'s gradients over the ranks before each step; Horovod's signature.

    The result is an instance of a subclass of `optimizer`'s class, with its state, its defaults
    and its parameter groups. Exchanges start while backward still runs; `step()` waits for them.
    `synchronize()`, `skip_synchronize()`, `set_backward_passes_per_step()` are Horovod's.

    Args:
        optimizer: any PyTorch optimizer over plain tensors.
        named_parameters: `model.named_parameters()`; names must be unique.
        compression: a compressor (`TopK(0.01)`), a policy (`Accordion(...)`), a word for one
            ("topk:0.01"), a method that averages models (`WAGMA(8)`; see `torch.averaging`), or
            one of Horovod's compression objects. Left at its default, the environment variable
            ACCORDION_HVD_COMPRESSION may name one.
        backward_passes_per_step: backward passes that add up (are summed) before an exchange.
        op: `Average` or `Sum`; `Adasum` only without our compression (Horovod's own wrapper).
        gradient_predivide_factor: accepted; sums are formed so that it changes nothing.
        num_groups: accepted; what leaves together is planned from shapes.
        groups: accepted, like num_groups.
        sparse_as_dense: exchange sparse gradients like dense ones; otherwise they are gathered,
            beside any compression.
        process_set: the ranks that average; others take plain steps.
        skip: patterns (as of file names) of parameters that travel uncompressed.
        guard: what to do when replicas differ: "error", "warn" (once) or "off". None: "warn" with
            Horovod's own compression, else "error", unless ACCORDION_HVD_GUARD says otherwise.
        guard_every: steps between comparisons of the replicas, by default 100.
        grad_scaler: the `GradScaler` in use: errors are then kept in unscaled units, and
            `scaler.step(optimizer)` may be called without `synchronize()`.

    Returns:
        The wrapped optimizer; `exchange.stats()` has bytes and times, `end_window()` ends a
        window of `Accordion`'s.

    Raises:
        ValueError: an argument is not what it must be; the sentence says which.
        TypeError: `compression` is nothing known.
    """
    check_arguments(op, (hvd.Average, hvd.Sum, hvd.Adasum), gradient_predivide_factor, groups)
    check_passes(backward_passes_per_step)
    validation.check_groups(groups)
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, 2
        )
    if op == hvd.Adasum:
        check_adasum(compression)
        return hvd.DistributedOptimizer(
            optimizer, named_parameters, compression, backward_passes_per_step, op,
            gradient_predivide_factor, 0, groups, sparse_as_dense, process_set,
        )  # fmt: skip
    if hasattr(optimizer, "exchange_owner"):
        raise ValueError(f"{type(optimizer).__name__} is distributed already; wrap nothing twice.")
    names = validation.check_names(optimizer.param_groups, named_parameters)
    validation.check_parameters(names)
    serving, passes = resolve(compression), backward_passes_per_step
    validate(serving, validation.use_of(optimizer, process_set, op == hvd.Sum, skip, passes))
    validation.check_optimizer(serving, optimizer, grad_scaler is not None)
    if isinstance(serving, Averaging):
        return averaging.wrap(optimizer, names, serving, process_set, Guard(guard, guard_every))
    options = {
        "policy": serving, "passes": passes, "total": op == hvd.Sum,
        "sparse_as_dense": sparse_as_dense, "process_set": process_set, "skip": tuple(skip),
        "guard": Guard(guard, guard_every, default_guard(compression)), "scaler": grad_scaler,
        "predivide": gradient_predivide_factor,
    }  # fmt: skip
    wrapped = _wrap(type(optimizer), optimizer.__dict__, names, options)
    wrapped._inner = weakref.ref(optimizer)
    return wrapped


def _wrap(
    base: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    names: Named,
    options: dict[str, Any],
) -> Any:
    """Return an instance of a subclass of `base` with these attributes; also used by unpickling.

    Horovod's helpers know a distributed optimizer by its module and call `super()` of its class,
    so the methods are copied into one class directly below `base`, as Horovod does.
    """
    methods = {**vars(Controls), **vars(_Distributed)}
    methods = {k: v for k, v in methods.items() if k not in ("__dict__", "__weakref__")}
    methods |= {"__module__": "horovod.torch.optimizer", "_base": base}
    kind: Any = type(base.__name__, (base,), methods)
    wrapped = kind.__new__(kind)
    vars(wrapped).update(attributes)
    vars(wrapped).pop("step", None)  # an LR scheduler has put its own there
    wrapped._set_up(names, options)
    return wrapped


class _Distributed(Controls):
    """The methods of a distributed optimizer; `_base` is the class that is wrapped."""

    _base: Any

    def _set_up(self: Any, names: Named, options: dict[str, Any]) -> None:
        self._names, self._options = list(names), options
        self._passes = options["passes"]
        self._should_synchronize = True
        self._exchanged = False
        self._filled, self._counted = 0, False
        self._averager = self._make_averager()
        policy, named = options["policy"], self._names
        self._models: Any = None  # what averages these, at times
        alternation = policy.observers.find(Alternation)
        if alternation is not None:
            guard, process_set = options["guard"], options["process_set"]
            self._models = averaging.averager(
                alternation.method, named, process_set, guard, alternation
            )
        if options["scaler"] is not None:
            _synchronize_before_unscaling(options["scaler"], self)

    def _make_averager(self: Any) -> Reducer:
        wanted = ("total", "sparse_as_dense", "skip", "scaler", "passes", "guard")
        chosen = {key: self._options[key] for key in wanted}
        mine: Any = weakref.ref(self)
        process_set = self._options["process_set"]
        return Reducer(
            self._names, self._policy, process_set, lambda: mine().param_groups, **chosen
        )

    # ------------------------------------------------------------------------ Horovod's interface
    @property
    def backward_passes_per_step(self: Any) -> int:
        """Backward passes that add up before an exchange."""
        return self._passes

    @property
    def op(self: Any) -> Any:
        """`Average` or `Sum`."""
        return hvd.Sum if self._options["total"] else hvd.Average

    @property
    def sparse_as_dense(self: Any) -> bool:
        """Return whether sparse gradients are exchanged like dense ones."""
        return self._options["sparse_as_dense"]

    @property
    def gradient_predivide_factor(self: Any) -> float:
        """Return the factor that was given."""
        return self._options["predivide"]

    @property
    def _parameter_names(self: Any) -> dict[torch.Tensor, str]:
        """Read by scripts, though not public in Horovod either."""
        return {parameter: name for name, parameter in self._names}

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """Change how many backward passes add up, from the next exchange on."""
        check_passes(passes, self._policy)
        self._passes = self._options["passes"] = passes
        self._averager.passes = passes
        self._averager.reset()

    def synchronize(self: Any) -> None:
        """Wait until all gradients are averaged; for clipping between backward and `step()`.

        Where batches are accumulated, nothing happens until one is full (see `full`). Where models
        are averaged now, gradients stay this rank's own.
        """
        if self._averager.finished or not self.full:
            return
        if self.averaging_models:
            self._averager.keep()
        else:
            self._averager.finish()
            self._exchanged = True

    @contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """Within it, `step()` does not exchange: `synchronize()` has been called already."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self: Any, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Average the gradients, then take the wrapped optimizer's step.

        A closure's gradients are averaged after each of its calls. Where batches are accumulated
        (`Accordion(batch_size=...)`), nothing more happens until one is full. Where models are
        averaged instead (`Accordion(high=WAGMA())`), that is done after the step.
        """
        result = None
        if self._observers.any("decides_ahead") and closure is not None:
            with torch.enable_grad():
                result, closure = closure(), None
        if not self.full:
            self._counted = False
            return result
        if self._should_synchronize:
            self._synchronize_for_step(closure)
        self._filled, self._counted = 0, False
        self._before_models()
        with _scaled_rates(self.param_groups, self._observers.weight):
            if closure is not None:
                result = self._base.step(self, self._averaging(closure), **more)
            else:
                taken = self._base.step(self, **more)
                result = taken if result is None else result
        self._average_models()
        self._forget()
        inner = self._inner()
        if inner is not None:
            inner._opt_called = True  # what an LR scheduler made for it looks for
        self._compare_replicas()
        return result

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clear gradients; refused while they are being exchanged.

        Nothing happens while a batch is accumulated (`model.zero_grad()` would forget its part).

        Raises:
            AssertionError: between backward and `step()` or `synchronize()`.
        """
        if self._averager.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition."
            )
        if self._filled:
            return
        self._forget()
        self._base.zero_grad(self, *args, **kwargs)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are then averaged, too."""
        self._base.add_param_group(self, param_group)
        index = len(self.param_groups) - 1
        fresh = [
            (f"group.{index}.{i}", p) for i, p in enumerate(self.param_groups[index]["params"])
        ]
        validation.check_parameters(fresh)
        self._names += fresh
        self._averager.watch(fresh)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer; pending gradients are forgotten."""
        self._averager.reset()
        self._should_synchronize = True
        self._filled, self._counted = 0, False
        self._base.load_state_dict(self, state_dict)

    # ------------------------------------------------------------------------------------- ours
    @property
    def full(self: Any) -> bool:
        """Return whether the batch is full, so that the next `step()` takes a step; collective.

        To be asked on every rank between backward and `step()`, where batches are accumulated and
        gradients are looked at or clipped before a step; else it always is.
        """
        if not self._observers.any("decides_ahead"):
            return True
        if not self._counted:
            self._filled, self._counted = self._filled + 1, True
            self._averager.decide()
        return self._filled >= self._averager.batches

    def resize(self: Any) -> None:
        """Give batches their present size; a loader calls it on every rank before an epoch.

        Takes the decision that is due. What has been accumulated goes into the next step.
        """
        self.growth.loader = True
        self._averager.decide()
        self.growth.resize()
        self._averager.reset()

    def _statistics(self: Any, model: torch.nn.Module) -> Any:
        return averaging.parameters(list(model.named_buffers()))

    # ----------------------------------------------------------------------------------- within
    @property
    def _policy(self: Any) -> Any:
        return self._options["policy"]

    @property
    def _observers(self: Any) -> Observers:
        return self._policy.observers

    def _before_models(self: Any) -> None:
        if self._models is None:
            return
        if self._models.follow_mode():
            self._models.level(averaging.parameters(self._slots()))
        if self.averaging_models:
            self._models.prepare()

    def _average_models(self: Any) -> None:
        if self._models is None or not self.averaging_models:
            return
        lr = float(self.param_groups[0]["lr"]) * self._observers.weight
        self._models.average(lr)

    def _slots(self: Any) -> Named:
        """Return the wrapped optimizer's state of each parameter, without its counts of steps.

        Raises:
            RanksDisagree: ranks keep different things; on all of them.
        """
        found = [
            (f"{name}/{key}", self.state[p][key])
            for name, p in self._names
            for key in sorted(self.state.get(p, {}))
            if key != "step" and isinstance(self.state[p][key], torch.Tensor)
        ]
        lines = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in found]
        device = self._names[0][1].device if self._names else None
        require_agreement(self._averager.communicator, "\n".join(lines), device)
        return found

    def _synchronize_for_step(self: Any, closure: Any) -> None:
        if self._averager.finished:
            if not self._by_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). Gradients are averaged already and are not "
                    "exchanged again; you may want to use skip_synchronize() to say so.",
                    stacklevel=3,
                )
        elif closure is None or self._averager.pending:
            self.synchronize()
        self._by_scaler = False

    def _forget(self: Any) -> None:
        self._averager.finished = False

    _by_scaler = False  # the GradScaler has made us synchronize

    @staticmethod
    def _inner() -> Any:
        """Return the wrapped optimizer, while it is alive."""
        return None

    def _averaging(self: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            if self._should_synchronize:
                self.synchronize()
            if isinstance(self, torch.optim.LBFGS) and self._averager.communicator.size > 1:
                loss = hvd.allreduce(
                    torch.as_tensor(loss).detach(), name="accordion.loss",
                    process_set=self._options["process_set"],
                )  # its line search must take the same turns on every rank  # fmt: skip
            return loss

        return averaged

    def _compare_replicas(self: Any) -> None:
        exchanged, self._exchanged = self._exchanged, False
        step = self._averager.exchange.steps if exchanged else 0
        if step and self._averager.comparison_due(step):
            self._averager.compare(step, self._averager.checksums())

    def __reduce__(self: Any) -> Any:
        """Pickled and copied with its policy; the copy exchanges its own gradients."""
        ours: tuple[str, ...] = ("_inner", "_names", "_options", "_passes", "_averager")
        ours += ("_should_synchronize", "_exchanged", "_filled", "_counted", "step")
        ours += ("_models",)
        attributes = {k: v for k, v in vars(self).items() if k not in ours}
        options = {k: v for k, v in self._options.items() if k not in ("process_set", "scaler")}
        ranks = self._options["process_set"].ranks
        return _rebuild, (self._base, attributes, self._names, options, ranks)


def _rebuild(
    base: Any, attributes: dict[str, Any], names: Named, options: dict[str, Any], ranks: Any
) -> Any:
    options = {**options, "policy": copy.deepcopy(options["policy"]), "scaler": None}
    return _wrap(base, attributes, names, {**options, "process_set": process_sets.of_ranks(ranks)})


@contextmanager
def _scaled_rates(groups: list[dict[str, Any]], factor: int) -> Iterator[None]:
    """Within it, learning rates are `factor` times what they are."""
    rates = [group["lr"] for group in groups]
    if factor != 1:
        for group in groups:
            group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        if factor != 1:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _synchronize_before_unscaling(scaler: Any, optimizer: Any) -> None:
    """Let `scaler.step(optimizer)` and `scaler.unscale_(optimizer)` see averaged gradients."""
    plain = scaler.unscale_

    def unscale_(which: Any) -> Any:
        if which is optimizer:
            optimizer.synchronize()
            optimizer._by_scaler = True
        return plain(which)

    scaler.unscale_ = unscale_
