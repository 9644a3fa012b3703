"""`DistributedOptimizer`: a PyTorch optimizer whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.core.base import ResidualDtype
from accordion_hvd.engine.controls import Controls
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.engine.ledger import LedgerOption, as_ledger
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.resolve import Compression, Resolved, is_ours, resolve
from accordion_hvd.torch import averaging, engines, validation
from accordion_hvd.torch.engines import hvd
from accordion_hvd.torch.reducer import Reducer, number_of
from accordion_hvd.validate import OWNER, check_adasum, check_arguments, check_passes, validate

Named = Sequence[tuple[str, torch.Tensor]]


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compression | None = None,
    backward_passes_per_step: int = 1,
    op: int | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
    *,
    skip: Sequence[str] = (),
    guard: Mode | None = None,
    guard_every: int | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    ledger: LedgerOption = None,
    residual_dtype: ResidualDtype = "float32",
) -> WrappedOptimizer:
    """Wrap `optimizer` so that each step uses gradients that are averaged over all ranks.

    The signature is Horovod's, with a few more keyword arguments; None means Horovod's default.
    Gradients are compressed and exchanged while the backward pass still runs, and `step()` waits
    for the averages before it updates the parameters.

    ```python
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader)),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for data, target in loader:
        optimizer.zero_grad()
        loss_function(model(data), target).backward()
        optimizer.step()
    ```

    Args:
        optimizer: any PyTorch optimizer whose parameters are dense, real tensors, not sharded.
        named_parameters: (name, parameter) pairs, normally `model.named_parameters()`. Names must
            be unique. Default: parameters are named by their positions in the parameter groups.
        compression: how gradients are compressed. One of

            - a compressor, such as `TopK(0.01)`;
            - a policy that switches between compressors, such as
              `Accordion(low=PowerSGD(4), high=PowerSGD(1))`;
            - a method that averages models instead of gradients, such as `WAGMA(8)` (see
              docs/averaging.md);
            - a spec string for one of these, such as `"topk:0.01"`;
            - one of Horovod's compression objects, such as `hvd.Compression.fp16`.

            Default: the spec string in the environment variable ACCORDION_HVD_COMPRESSION, or no
            compression if the variable is not set.
        backward_passes_per_step: number of backward passes whose gradients are summed locally
            before each exchange.
        op: `hvd.Average` or `hvd.Sum`. `hvd.Adasum` returns Horovod's own wrapper, which accepts
            only Horovod's compression.
        gradient_predivide_factor: accepted for compatibility with Horovod; has no effect. Values
            other than 1 require `op=hvd.Average`.
        num_groups: deprecated by Horovod in favor of `groups`; has no effect.
        groups: accepted for compatibility with Horovod; has no effect, because tensors are grouped
            by their shapes.
        sparse_as_dense: whether to convert sparse gradients to dense ones and compress them. If
            False, sparse gradients are gathered from all ranks without compression.
        process_set: the ranks that average their gradients. Other ranks take steps with their
            local gradients.
        skip: shell-style patterns (such as `"*.bias"`) of the names of parameters whose gradients
            are exchanged uncompressed.
        guard: reaction to replicas that differ between ranks: `"error"` raises `ReplicasDiffer`,
            `"warn"` warns once, `"off"` disables the comparison. Default: the environment variable
            ACCORDION_HVD_GUARD if set, else `"warn"` with Horovod's own compression and `"error"`
            with the compression of this package.
        guard_every: number of steps between comparisons of the replicas; steps 1, 2 and 10 are
            always compared. Default: the environment variable ACCORDION_HVD_GUARD_EVERY, else 100.
        grad_scaler: the `GradScaler` of mixed-precision training, if there is one. Residuals are
            then stored in unscaled units, and `scaler.step(optimizer)` needs no preceding call of
            `synchronize()`.
        ledger: record of the time and bytes of each step: a `Ledger`; a folder, where rank 0 writes
            `ledger.json` during the training and `receipt.html` at its end; or False for none.
            Default: the folder in the environment variable ACCORDION_HVD_LEDGER ("off": none), else
            a ledger in memory (`exchange.ledger`).
        residual_dtype: dtype in which the residuals of error feedback are stored between steps,
            `"float32"` or `"bfloat16"`. The latter halves their memory: they are rounded
            stochastically, without bias (docs/methods.md). Compressors without residuals ignore it.

    Returns:
        An instance of a subclass of `type(optimizer)` with the same state, defaults and parameter
        groups. It has Horovod's methods `synchronize()`, `skip_synchronize()` and
        `set_backward_passes_per_step()`. In addition, `exchange.stats()` returns the bytes and
        times of all exchanges, and `end_window()` ends a window (an epoch) of the policy. If models
        are averaged, `average_now(model)` makes all models equal.

    Raises:
        ValueError: if an argument is invalid, does not suit the optimizer, or if the optimizer is
            already distributed.
        TypeError: if `compression` is none of the above.
        RuntimeError: if `compression` needs wait-avoiding averaging and this job cannot provide it.
    """
    op = hvd.Average if op is None else op
    compression = hvd.Compression.none if compression is None else compression
    process_set = hvd.global_process_set if process_set is None else process_set
    check_arguments(op, (hvd.Average, hvd.Sum, hvd.Adasum), gradient_predivide_factor, groups)
    check_passes(backward_passes_per_step)
    validation.check_groups(groups)
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, 2
        )
    if op == hvd.Adasum:
        check_adasum(compression)
        return engines.adasum()(
            optimizer, named_parameters, compression, backward_passes_per_step, op,
            gradient_predivide_factor, 0, groups, sparse_as_dense, process_set,
        )  # fmt: skip
    if hasattr(optimizer, "exchange_owner"):
        name = type(optimizer).__name__
        raise ValueError(f"{name} is already distributed; do not wrap it in DistributedOptimizer.")
    if is_ours(named_parameters):
        allowed = "(name, parameter) pairs; pass compression= by keyword"
        check.refuse(OWNER, "named_parameters", named_parameters, allowed)
    given = None if named_parameters is None else list(named_parameters)
    names = validation.check_names(optimizer.param_groups, given)
    validation.check_parameters(names)
    validation.check_not_averaged(names)
    resolved, passes, skip = resolve(compression), backward_passes_per_step, check.patterns(skip)
    use = validation.use_of(optimizer, process_set, op == hvd.Sum, skip, passes)
    validate(resolved, replace(use, residual_dtype=residual_dtype))
    validation.check_optimizer(resolved, optimizer, grad_scaler is not None)
    serving = resolved.serving
    if isinstance(serving, Averaging):
        return averaging.wrap(optimizer, names, serving, process_set, Guard(guard, guard_every))
    options = {
        "policy": serving, "passes": passes, "total": op == hvd.Sum,
        "sparse_as_dense": sparse_as_dense, "process_set": process_set, "skip": skip,
        "guard": Guard(guard, guard_every, resolved.guard), "scaler": grad_scaler,
        "predivide": gradient_predivide_factor, "ledger": as_ledger(ledger),
        "residual_dtype": residual_dtype,
    }  # fmt: skip
    wrapped: Any = _wrap(type(optimizer), optimizer.__dict__, names, options)
    wrapped._averager.name_later(given)
    wrapped._inner = weakref.ref(optimizer)
    return wrapped


def _wrap(  # which unpickling calls, too
    base: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    names: Named,
    options: dict[str, Any],
) -> Any:
    wrapped = averaging.new_instance(base, attributes, Controls, _Distributed)
    wrapped._set_up(names, options)
    return wrapped


class _Distributed(Controls):
    """Methods of a distributed optimizer; `_base` is the class of the wrapped optimizer."""

    _base: Any

    def _set_up(self: Any, names: Named, options: dict[str, Any]) -> None:
        self._options = options
        self._should_synchronize = True
        self._exchanged = False
        self._accumulated, self._batch_counted = 0, False
        self._averager = self._make_averager(names)
        self._step_supports_amp_scaling = options["scaler"] is None  # see averaging.unscaled_step
        policy, named = options["policy"], self._averager.named
        self._models: Any = None  # the ModelAverager of a policy that alternates
        alternation = policy.observers.find(Alternation)
        if alternation is not None:
            self._members = averaging.members(self)
            guard, process_set = options["guard"], options["process_set"]
            self._models = averaging.averager(
                alternation.method, named, process_set, guard, alternation
            )
        if options["scaler"] is not None:
            _synchronize_before_unscaling(options["scaler"], self)

    def _make_averager(self: Any, names: Named) -> Reducer:
        given = ("policy", "process_set", "predivide")  # which are no keywords of a Reducer
        options = {key: x for key, x in self._options.items() if key not in given}
        reference: Any = weakref.ref(self)
        process_set = self._options["process_set"]
        return Reducer(names, self._policy, process_set, reference, **options)

    # ------------------------------------------------------------------------ Horovod's interface
    @property
    def backward_passes_per_step(self: Any) -> int:
        return self._options["passes"]

    @property
    def op(self: Any) -> Any:
        return hvd.Sum if self._options["total"] else hvd.Average

    @property
    def sparse_as_dense(self: Any) -> bool:
        return self._options["sparse_as_dense"]

    @property
    def gradient_predivide_factor(self: Any) -> float:
        return self._options["predivide"]

    @property
    def _parameter_names(self: Any) -> dict[torch.Tensor, str]:  # scripts read it
        return {parameter: name for name, parameter in self._averager.named}

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        check_passes(passes, self._policy)
        self._options["passes"] = self._averager.passes = self._policy.passes = passes
        self._averager.reset()

    def synchronize(self: Any) -> None:
        """Wait until all gradients are averaged.

        Call it to clip or read gradients between the backward pass and `step()`, and call `step()`
        within `skip_synchronize()` afterwards. While a batch is accumulated and not yet full (see
        `full`), this method does nothing. While models are averaged, gradients remain local.
        """
        if self._averager.finished or not self.full:
            return
        if self._models is not None and self.averaging_models:
            self._averager.keep()
        else:
            self._averager.finish()
            self._exchanged = True

    @contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """Return a context in which `step()` does not call `synchronize()` once more."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self: Any, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Average the gradients and take the wrapped optimizer's step.

        With a closure, gradients are averaged after each call of the closure. If the policy
        accumulates batches (`Accordion(batch_size=...)`), the step is taken only when the batch is
        full. If the policy averages models at present (`Accordion(high=WAGMA())`), the step uses
        local gradients, and models are averaged after it.

        Args:
            closure: function that clears the gradients, computes the loss and returns it.
            more: further arguments of the wrapped optimizer's `step`.

        Returns:
            The closure's loss, or None without a closure.
        """
        result, observers = None, self._policy.observers
        if closure is not None and observers.any("decides_ahead"):
            with torch.enable_grad():
                result, closure = closure(), None
        if not self.full:
            self._batch_counted = False
            return result
        if "found_inf" in vars(self):
            self._heed_scaler()
        if self._should_synchronize:
            self._synchronize_for_step(closure)
        elif self._averager.pending:
            raise RuntimeError(
                f"{OWNER}: step() within skip_synchronize() found gradients that are not averaged; "
                "call optimizer.synchronize() before it."
            )
        self._accumulated, self._batch_counted = 0, False
        if self._models is not None:
            self._prepare_models()
        given = () if closure is None else (self._averaging(closure),)  # some optimizers take none
        bad = vars(self).get("found_inf")
        step = self._base.step if bad is None else averaging.unscaled_step
        with _scaled_rates(self.param_groups, observers.weight) if observers else nullcontext():
            taken = step(self, *given, **more)
            result = taken if result is None else result
        if self._models is not None and self.averaging_models:
            self._average_models()
        self._averager.finished = False
        inner = self._inner()
        if inner is not None:
            inner._opt_called = True  # an LR scheduler of the wrapped optimizer checks this
        self._compare_replicas()
        return result

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients.

        This method does nothing while a batch is accumulated, so that a training loop may call it
        before each backward pass. (`model.zero_grad()` would discard the accumulated gradients.)

        Raises:
            AssertionError: if gradients are being exchanged, that is, between the backward pass
                and `step()` or `synchronize()`.
        """
        if self._averager.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition."
            )
        if self._averager.finished:  # the script discards gradients that are averaged already
            self._accumulated, self._batch_counted = 0, False
        if self._accumulated:
            return
        self._averager.finished = False
        self._base.zero_grad(self, *args, **kwargs)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        self._base.add_param_group(self, param_group)
        self._averager._follow_groups()

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer's state in place; pending gradients are discarded."""
        self._averager.reset()
        self._should_synchronize = True
        self._accumulated, self._batch_counted = 0, False
        averaging.load_in_place(self, state_dict)

    # ------------------------------------------------------------------------- accumulated batches
    @property
    def full(self: Any) -> bool:
        """Return whether the batch is full, so that the next `step()` takes a step; collective.

        With `Accordion(batch_size=...)`, read this property on every rank between the backward pass
        and `step()` before you read or clip gradients. With other policies, it is always True.
        """
        observers = self._policy.observers
        if not observers or not observers.any("decides_ahead"):
            return True
        if not self._batch_counted:
            self._accumulated, self._batch_counted = self._accumulated + 1, True
            self._averager.decide()
        return self._accumulated >= self._averager.batches

    def resize(self: Any) -> None:
        """Take a decision that is due and set the batch size of the next epoch; collective.

        A data loader calls this method on every rank before each epoch. Gradients that have been
        accumulated go into the next step.
        """
        self.growth.loader = True
        self._averager.decide()
        self.growth.resize()
        self._averager.reset()

    def _statistics(self: Any, model: torch.nn.Module) -> Any:
        return averaging.Tensors(list(model.named_buffers()))

    # --------------------------------------------------------------------------------- internals
    @property
    def _policy(self: Any) -> Any:
        return self._options["policy"]

    def _prepare_models(self: Any) -> None:
        averaging.require_members(self, self._models.method)
        if self._models.follow_mode():
            self._models.level(averaging.Tensors(self._optimizer_state()))
        if self.averaging_models:
            self._models.prepare()

    def _average_models(self: Any) -> None:
        rates = [number_of(group["lr"]) for group in self.param_groups]
        self._models.average(rates[0] * self._policy.observers.weight, rates=rates)

    def _optimizer_state(self: Any) -> Named:
        tensors = [
            (f"{name}/{key}", self.state[p][key])
            for name, p in self._averager.named
            for key in sorted(self.state.get(p, {}))
            if key != "step" and isinstance(self.state[p][key], torch.Tensor)
        ]
        lines = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors]
        device = self._averager.device
        require_agreement(self._averager.communicator, "\n".join(lines), device)
        return tensors

    def _heed_scaler(self: Any) -> None:
        validation.check_optimizer(Resolved(self._policy), self, True)
        averager = self._averager
        begun = averager.finished or averager.in_flight
        # Residuals of this exchange would be in scaled units.
        keeps = begun and any(entry.stored for entry in averager.exchange.bucket_states)
        if keeps or (averager.in_flight and self.grad_scale is None):
            averager.reset()
            allowed = "the GradScaler of this training: its gradients are averaged in scaled units"
            check.refuse(OWNER, "grad_scaler", None, allowed)
        averager.deferred = True  # exchanges wait for step(), because only step() knows the scale
        averager.loss_scale = self.grad_scale

    def _synchronize_for_step(self: Any, closure: Any) -> None:
        if self._averager.finished:
            if not self._synchronized_by_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). Gradients are already averaged and are not "
                    "exchanged again; use skip_synchronize() to avoid this warning.",
                    stacklevel=3,
                )
        elif closure is None or self._averager.pending:
            self.synchronize()
        self._synchronized_by_scaler = False

    _synchronized_by_scaler = False  # whether the GradScaler has called synchronize()

    @staticmethod
    def _inner() -> Any:  # instances have a weak reference to the wrapped optimizer instead
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
                )  # the line search must take the same branches on every rank  # fmt: skip
            return loss

        return averaged

    def _compare_replicas(self: Any) -> None:
        exchanged, self._exchanged = self._exchanged, False
        step = self._averager.exchange.steps if exchanged else 0
        if step and self._averager.comparison_due(step):
            self._averager.compare(step, self._averager.checksums())

    def __reduce__(self: Any) -> Any:
        rebuilt: tuple[str, ...] = ("_inner", "_options", "_averager")
        rebuilt += ("_should_synchronize", "_exchanged", "_accumulated", "_batch_counted", "step")
        rebuilt += ("_models", "_members")
        attributes = {k: v for k, v in vars(self).items() if k not in rebuilt}
        # These belong to this process, or to this optimizer.
        local = ("process_set", "scaler", "ledger")
        options = {k: v for k, v in self._options.items() if k not in local}
        ranks = self._options["process_set"].ranks
        return _rebuild, (self._base, attributes, self._averager.named, options, ranks)


if TYPE_CHECKING:

    class WrappedOptimizer(_Distributed, torch.optim.Optimizer):
        """The type of a `DistributedOptimizer`, whose class is made when it wraps an optimizer."""

        def close(self) -> None:
            """Stop averaging; of methods that always average models."""


def _rebuild(
    base: Any, attributes: dict[str, Any], names: Named, options: dict[str, Any], ranks: Any
) -> Any:
    options = {**options, "policy": copy.deepcopy(options["policy"]), "scaler": None}
    options["ledger"] = as_ledger(None)
    return _wrap(base, attributes, names, {**options, "process_set": engines.process_set_of(ranks)})


@contextmanager
def _scaled_rates(groups: list[dict[str, Any]], factor: int) -> Iterator[None]:
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
    original = scaler.unscale_

    def unscale_(target: Any) -> Any:
        if target is optimizer:
            optimizer.synchronize()
            optimizer._synchronized_by_scaler = True
        return original(target)

    scaler.unscale_ = unscale_
