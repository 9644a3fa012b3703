"""`DistributedOptimizer`: a Keras 3 optimizer whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.core.base import ResidualDtype
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.controls import Controls, ModelControls
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.engine.ledger import LedgerOption, as_ledger
from accordion_hvd.policies import Policy
from accordion_hvd.policies.accordion import Alternation, ByteBudget
from accordion_hvd.policies.displacement import USUAL_GAIN, gain_of_adam, gain_of_sgd
from accordion_hvd.resolve import Compression, resolve
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.averager import TensorFlowGradientAverager
from accordion_hvd.tensorflow.averaging import TensorFlowModelAverager, Variables
from accordion_hvd.tensorflow.variables import (
    call_back,
    create,
    key_of,
    multiplied,
    weights_of,
    when,
)
from accordion_hvd.validate import OWNER, check_adasum, check_arguments, check_passes, validate


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    skip: Sequence[str] = (),
    guard: Mode | None = None,
    guard_every: int | None = None,
    ledger: LedgerOption = None,
    residual_dtype: ResidualDtype = "float32",
) -> WrappedOptimizer:
    """Wrap `optimizer` so that each step uses gradients that are averaged over all ranks.

    The signature is Horovod's, with a few more keyword arguments. The result works in `fit` and in
    custom training loops.

    ```python
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        compression=Accordion(low=PowerSGD(4), high=PowerSGD(1)),
    )
    model.compile(optimizer, loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    ```

    Args:
        optimizer: any Keras 3 optimizer.
        name: accepted for compatibility with Horovod; not used.
        device_dense: accepted for compatibility with Horovod; gradients stay on their devices.
        device_sparse: accepted for compatibility with Horovod; not used.
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
        sparse_as_dense: whether to convert `tf.IndexedSlices` to dense gradients and compress them.
            If False, they are gathered from all ranks without compression.
        gradient_predivide_factor: accepted for compatibility with Horovod; has no effect. Values
            other than 1 require `op=hvd.Average`.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: number of calls of `apply` whose gradients are summed locally
            before each exchange.
        average_aggregated_gradients: whether to divide these sums by `backward_passes_per_step`.
        num_groups: deprecated by Horovod in favor of `groups`; has no effect.
        groups: accepted for compatibility with Horovod; has no effect, because tensors are grouped
            by their shapes.
        process_set: the ranks that average their gradients. Other ranks take steps with their
            local gradients.
        scale_local_gradients: whether to divide the gradients of local variables (see
            `register_local_var`) by the number of ranks.
        skip: shell-style patterns (such as `"*/bias"`) of the paths of variables whose gradients
            are exchanged uncompressed.
        guard: reaction to replicas that differ between ranks: `"error"` raises `ReplicasDiffer`,
            `"warn"` warns once, `"off"` disables the comparison. Default: the environment variable
            ACCORDION_HVD_GUARD if set, else `"warn"` with Horovod's own compression and `"error"`
            with the compression of this package.
        guard_every: number of steps between comparisons of the replicas; steps 1, 2 and 10 are
            always compared. Default: the environment variable ACCORDION_HVD_GUARD_EVERY, else 100.
        ledger: record of the time and bytes of each step: a `Ledger`; a folder, where rank 0 writes
            `ledger.json` during the training and `receipt.html` at its end; or False for none.
            Default: the folder in the environment variable ACCORDION_HVD_LEDGER ("off": none), else
            a ledger in memory (`exchange.ledger`).
        residual_dtype: dtype in which the residuals of error feedback are stored between steps,
            `"float32"` or `"bfloat16"`. The latter halves their memory: they are rounded
            stochastically, without bias (docs/methods.md). Compressors without residuals ignore it.

    Returns:
        An optimizer of a subclass of `type(optimizer)` with the same name, so that Keras loads
        saved models without Horovod. If `optimizer` was built, the result has its state.
        `exchange.stats()` returns the bytes of all exchanges, and `end_window()` ends a window (an
        epoch) of the policy; in `fit`, BroadcastGlobalVariablesCallback calls it for policies
        without a fixed window. If models are averaged, always or at times, `average_now(model)`
        makes all models equal, and `averaging.stats()` describes the averaging. With a method that
        always averages models, the result has `close()`, and no `exchange`.

    Raises:
        ValueError: if an argument is invalid, does not suit the optimizer, or if the optimizer is
            already distributed.
        TypeError: if `compression` is none of the above or `optimizer` is not a Keras 3 optimizer.
        RuntimeError: within a `tf.distribute` strategy, or if `compression` needs wait-avoiding
            averaging and this job cannot provide it.
    """
    check_arguments(op, (hvd.Average, hvd.Sum, hvd.Adasum), gradient_predivide_factor, groups)
    if op == hvd.Adasum:
        check_adasum(compression)
        raise ValueError("op is hvd.Adasum, which is not supported with Keras; use hvd.Average.")
    validation.check_strategy()
    check_passes(backward_passes_per_step)
    validation.check_positions(
        OWNER, name=name, device_dense=device_dense, device_sparse=device_sparse
    )
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, 2
        )
    resolved, passes, skip = resolve(compression), backward_passes_per_step, check.patterns(skip)
    use = validation.use_of(optimizer, process_set, op == hvd.Sum, skip, passes)
    validate(resolved, replace(use, residual_dtype=residual_dtype))
    validation.check_optimizer(resolved, optimizer, passes)
    serving = resolved.serving
    if isinstance(serving, Averaging):
        averaging_settings = AveragingSettings(
            serving, process_set, Guard(guard, guard_every), passes, average_aggregated_gradients
        )
        wrapped = wrap(optimizer, averaging_settings, _ModelAveraging)
        wrapped.averaging.set_up_early()
        return wrapped
    mode = Guard(guard, guard_every, resolved.guard).mode
    settings = Settings(
        serving, process_set, op == hvd.Sum, sparse_as_dense, skip, mode, guard_every,
        scale_local_gradients, passes, average_aggregated_gradients, ledger=as_ledger(ledger),
        residual_dtype=residual_dtype,
    )  # fmt: skip
    wrapped = wrap(optimizer, settings)
    if wrapped.averaging is not None:
        wrapped.averaging.set_up_early()
    return wrapped


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """Return a `DistributedOptimizer` that does not average the gradients of `local_layers`.

    Args:
        optimizer: the Keras optimizer.
        args: further arguments of `DistributedOptimizer`.
        local_layers: a layer or several layers, which are built.
        kwargs: further arguments of `DistributedOptimizer`.

    Raises:
        ValueError: if `local_layers` contains an object that is not a layer; also the errors of
            `DistributedOptimizer`.
    """
    local = weights_of(local_layers)
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in local:
        wrapped.register_local_var(variable)
    return wrapped


@dataclass
class Settings:
    """The arguments of `DistributedOptimizer`."""

    policy: Policy
    process_set: Any
    total: bool
    sparse_as_dense: bool
    skip: tuple[str, ...]
    guard: str | None
    guard_every: int | None
    scale_local: bool
    passes: int
    average_passes: bool
    hyper: Any = None  # settings for exchange generators (`Info.hyper`)
    ledger: Any = None
    residual_dtype: str = "float32"
    used: bool = False

    def averager(self, variables: Callable[[], Sequence[Any]]) -> TensorFlowGradientAverager:
        """Return a new gradient averager.

        All but the first one get copies of the policy and ledgers of their own.
        """
        policy = copy.deepcopy(self.policy) if self.used else self.policy
        ledger = None if self.used else self.ledger
        self.used, policy.passes = True, self.passes
        return TensorFlowGradientAverager(
            policy,
            self.process_set,
            variables,
            total=self.total,
            sparse_as_dense=self.sparse_as_dense,
            skip=self.skip,
            guard=Guard(self.guard, self.guard_every),
            ledger=ledger,
            scale_local=self.scale_local,
            hyper=self.hyper,
            residual_dtype=self.residual_dtype,
        )

    def models(self, averager: TensorFlowGradientAverager) -> TensorFlowModelAverager | None:
        """Return a model averager if the policy averages models at times, else None."""
        alternation = averager.policy.observers.find(Alternation)
        if alternation is None:
            return None
        guard = Guard(self.guard, self.guard_every)
        models = TensorFlowModelAverager(
            alternation.method, self.process_set, averager.variables, guard, alternation
        )
        models.local = averager.local
        return models


@dataclass
class AveragingSettings:
    """The arguments of `DistributedOptimizer` that apply to methods that average models."""

    method: Averaging
    process_set: Any
    guard: Guard
    passes: int
    average_passes: bool

    def averager(self, variables: Callable[[], Sequence[Any]]) -> TensorFlowModelAverager:
        """Return a new model averager."""
        return TensorFlowModelAverager(self.method, self.process_set, variables, self.guard)

    def models(self, averager: TensorFlowModelAverager) -> TensorFlowModelAverager:
        """Return `averager`, which is the model averager itself."""
        return averager


def wrap(optimizer: Any, settings: Any, methods: type | None = None) -> Any:
    """Return an optimizer of a subclass, with the same settings and state, that averages.

    Raises:
        ValueError: if the optimizer is already distributed.
        TypeError: if `optimizer` is not a Keras 3 optimizer, or contains a distributed one.
    """
    if is_distributed(optimizer):
        name = type(optimizer).__name__
        raise ValueError(f"{name} is already distributed; do not wrap it in DistributedOptimizer.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{OWNER}: optimizer is {optimizer!r}, but must be a Keras 3 optimizer.")
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise TypeError(
            "the optimizer in LossScaleOptimizer is already distributed; do not wrap it again."
        )
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # Else compile() would add loss scaling around this wrapper, and an overflow on one rank
        # would make all ranks hang.
        optimizer, scaled = keras.optimizers.LossScaleOptimizer(optimizer), True
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "_settings": settings, "__doc__": base.__doc__}
    kind: Any = type(base.__name__, (methods or _Distributed, base), namespace)
    if scaled:
        scale, growth = optimizer.initial_scale, optimizer.dynamic_growth_steps
        wrapped = kind(optimizer.inner_optimizer, scale, growth, name=optimizer.name)
    else:
        config, rate = optimizer.get_config(), optimizer._learning_rate
        # A schedule or function serves as it is: it may be of a class that Keras does not know.
        wrapped = kind.from_config(config | ({"learning_rate": rate} if callable(rate) else {}))
        for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
            if hasattr(optimizer, name):
                setattr(wrapped, name, getattr(optimizer, name))
    if optimizer.built:
        wrapped.build(optimizer._trainable_variables)
        for new, old in zip(wrapped.variables, optimizer.variables, strict=True):
            new.assign(old)
    return wrapped


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer` is a result of `DistributedOptimizer`."""
    return isinstance(optimizer, _Distributed)


def averages_models(optimizer: Any) -> bool:
    """Return whether `optimizer` is distributed by a method that always averages models."""
    return isinstance(optimizer, _ModelAveraging)


class _Distributed(Controls):
    """Methods of a distributed optimizer; all updates of Keras 3 call `apply`."""

    _settings: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        reference = weakref.ref(self)
        self._averager = self._settings.averager(lambda: _exchanged(reference()))
        self._averager.gain = lambda variable: gain_of(reference(), variable)
        self._averager.rate = lambda: reference()._rate()  # type: ignore[union-attr]
        if self._is_scaled():
            self._averager.scaler = lambda: reference()._loss_scale()  # type: ignore[union-attr]
        self._models = self._settings.models(self._averager)  # the model averager, or None
        self._sums: dict[int, tf.Variable] = {}  # by keys of variables
        self._summed: set[int] = set()  # keys of those with a gradient in this step
        self._passes: tf.Variable | None = None
        self._small: tf.Variable | None = None  # number of small batches per batch, for graphs
        self._factor: Any = None  # factor of the learning rate within a step

    # ------------------------------------------------------------------------- methods for users
    def average_now(self: Any, model: Any = None) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError("average_now() must be called outside of tf.function.")
        if self._models is not None:
            self._models.directly(False)
        super().average_now(model)

    def _statistics(self: Any, model: Any) -> Variables:
        return Variables(lambda: _statistics(model))

    def resize(self: Any) -> None:
        """Take a decision that is due and set the batch size of the next epoch; collective.

        A dataset calls this method on every rank before each epoch.
        """
        self.growth.loader = True
        self._averager.decide(float(self.learning_rate))
        self.growth.resize()
        self._update_batch_count()

    def register_local_var(self: Any, var: Any) -> None:
        """Do not average the gradient of this variable; `scale_local_gradients` still applies.

        Raises:
            ValueError: if a local gradient would change what the other variables receive.
        """
        if hasattr(self, "inner_optimizer"):
            allowed = (
                "one without loss scaling, which skips steps by all gradients; use mixed_bfloat16"
            )
            check.refuse("register_local_var", "optimizer", type(self).__name__, allowed)
        if self.global_clipnorm is not None:
            allowed = "None, since local gradients are part of this norm"
            check.refuse("register_local_var", "global_clipnorm", self.global_clipnorm, allowed)
        self._averager.local.add(key_of(var))

    def exclude_from_weight_decay(self: Any, *args: Any, **options: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        given: Any = super() if inner is None else inner
        given.exclude_from_weight_decay(*args, **options)

    # --------------------------------------------------------------------- methods that Keras calls
    def build(self: Any, variables: Any) -> None:
        # Keras builds before it traces a graph, so that this can still turn off XLA.
        validation.check_keras_caller(self)
        super().build(variables)  # type: ignore[misc]
        checkpoint.register(self._averager)
        if self._models is not None:
            checkpoint.register(self._models)

    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:
            return
        explicit = trainable_variables is not None
        variables = list(trainable_variables) if explicit else list(self._trainable_variables)
        if explicit and not self.built:
            with tf.init_scope():
                self.build(variables)
        if len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables.")
        grads = self._times(grads, variables, lambda scale: 1.0 / scale)  # a power of 2: exact
        batches = self._batches() if self._resizes else 1
        if self._settings.passes == 1 and (not self._resizes or self.growth.loader):
            self._step(grads, variables, batches)
        else:
            self._accumulate(grads, variables, batches)

    def _step(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        averaged = [i for i, v in enumerate(variables) if not _overwritten(v)]
        means = self._averager.average(
            [grads[i] for i in averaged], [variables[i] for i in averaged], self._rate
        )
        for i, mean in zip(averaged, means, strict=True):
            grads[i] = mean
        models, rate = self._models, self._rate()  # before the step, which advances a schedule
        if self._resizes:
            rate = multiplied(tf.convert_to_tensor(rate), batches)
        averaging_models: Any = False
        if models is not None:
            averaging_models = models.follow(Variables(lambda: _optimizer_state(self)))
        when(averaging_models, lambda: models.before())
        self._factor = batches if self._resizes else None
        try:
            super().apply(self._scaled(grads, variables), variables)  # type: ignore[misc]
        finally:
            self._factor = None
        when(averaging_models, lambda: models.after(rate))
        if self._resizes and self.growth.loader:
            self._iterations.assign_add(batches - 1)

    def _get_current_learning_rate(self: Any) -> Any:
        rate = super()._get_current_learning_rate()  # type: ignore[misc]
        if self._factor is None:  # not within a step of several small batches
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(self._factor, rate.dtype)

    # ------------------------------------------------------------------------- batches that grow
    @property
    def _resizes(self: Any) -> bool:
        return self.growth is not None

    def _batches(self: Any) -> Any:
        averager = self._averager
        if averager.policy.observers.find(ByteBudget) is not None and not averager.idle:
            assert averager.exchange  # creates the exchange, which computes the byte budget
        if tf.executing_eagerly():
            averager.decide(self._rate())
            return self.growth.micro_batches
        with tf.init_scope():
            self._update_batch_count()
        if averager.managed:  # the callback takes decisions between steps
            return self._small.read_value()

        def decided(lr: Any) -> Any:
            averager.decide(float(lr))
            return tf.constant(self.growth.micro_batches, tf.int64)

        found = call_back(decided, [tf.cast(self._rate(), tf.float32)], [tf.int64])
        return tf.ensure_shape(found[0], ())

    def _update_batch_count(self: Any) -> None:
        if not self._resizes:
            return
        if self._small is None:
            self._small = create(1, tf.int64)
        self._small.assign(self.growth.micro_batches)

    def _rate(self: Any) -> Any:
        rate = self.learning_rate
        return float(rate) if tf.executing_eagerly() else tf.convert_to_tensor(rate)

    # -------------------------------------------------------------------------------- loss scaling
    def _is_scaled(self: Any) -> bool:
        dynamic = isinstance(self, keras.optimizers.LossScaleOptimizer)
        return dynamic or getattr(self, "loss_scale_factor", None) is not None

    def _loss_scale(self: Any) -> Any:
        dynamic = isinstance(self, keras.optimizers.LossScaleOptimizer)
        scale = self.dynamic_scale if dynamic else self.loss_scale_factor
        return tf.cast(tf.convert_to_tensor(scale), tf.float32)

    def _scaled(self: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
        return self._times(grads, variables, lambda scale: scale)

    def _times(self: Any, grads: list[Any], variables: list[Any], factor: Any) -> list[Any]:
        if not self._is_scaled():
            return grads
        scale = factor(self._loss_scale())
        pairs = zip(grads, variables, strict=True)
        return [g if g is None or _overwritten(v) else multiplied(g, scale) for g, v in pairs]

    # ------------------------------------------------------------------ several backward passes
    def _accumulate(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        self._make_sums(variables)
        # If batches grow, a step follows every `count * passes` calls and divides by `count`.
        count = batches if self._resizes and not self.growth.loader else 1
        if set(map(key_of, variables)) != self._sums.keys():
            allowed = "the same in each pass, since gradients are summed"
            check.refuse(OWNER, "trainable_variables", [v.path for v in variables], allowed)
        if not tf.executing_eagerly():
            there = {key_of(v) for v, g in zip(variables, grads, strict=True) if g is not None}
            if self._summed and there != self._summed:
                absent = [v.path for v in variables if key_of(v) in there ^ self._summed]
                allowed = (
                    "there in all graphs or in none, since a step takes the sums of all passes"
                )
                check.refuse(OWNER, "the gradients", absent, allowed)
        for key, grad in zip(map(key_of, variables), grads, strict=True):
            if grad is not None:
                self._summed.add(key)
                total = self._sums[key]
                total.assign_add(tf.cast(tf.convert_to_tensor(grad), total.dtype))
        passes = self._settings.passes
        divisor = count * (passes if self._settings.average_passes else 1)
        self._passes.assign_add(1)

        def step() -> None:
            self._passes.assign(0)
            sums = [
                self._sums[key] / tf.cast(divisor, self._sums[key].dtype)
                if key in self._summed else None
                for key in map(key_of, variables)
            ]  # fmt: skip
            if tf.executing_eagerly():  # a graph has the same gradients in each pass
                self._summed.clear()
            for total in self._sums.values():
                total.assign(tf.zeros_like(total))
            self._step(sums, variables, batches)

        def wait() -> None:
            getattr(self, "inner_optimizer", self)._iterations.assign_add(1)

        last = self._passes >= passes * count
        if not tf.executing_eagerly():
            tf.cond(last, step, wait)
        elif last:
            step()
        else:
            wait()

    def _make_sums(self: Any, variables: list[Any]) -> None:
        if self._passes is not None:
            return
        with tf.init_scope():
            self._passes = create(0, tf.int64)
            zeros = {key_of(v): tf.zeros(tuple(v.shape), v.dtype) for v in variables}
            self._sums = {key: create(zero) for key, zero in zeros.items()}


if TYPE_CHECKING:

    class WrappedOptimizer(_Distributed):
        """The type of a `DistributedOptimizer`, whose class is made when it wraps an optimizer."""

        name: str
        learning_rate: Any
        iterations: Any
        variables: Any
        dynamic_scale: Any
        apply_gradients: Any
        get_config: Any
        scale_loss: Any

        def close(self) -> None:
            """Stop averaging; of methods that always average models."""


class _ModelAveraging(ModelControls, _Distributed):
    """Optimizer that takes steps with local gradients, after which a method averages the models.

    Momentum and other state remain local. The loss scale is local as well: a rank with non-finite
    gradients skips its own step but takes part in the averaging. Variables that are not trainable,
    such as the statistics of batch normalization, remain local until `average_now(model)` averages
    them. Each rank clips its gradients by their local norm. In `fit`,
    BroadcastGlobalVariablesCallback averages before each validation and at the end of each epoch.
    """

    _averager: TensorFlowModelAverager

    def register_local_var(self, var: Any) -> None:
        self._averager.leave_alone(var)

    @property
    def _resizes(self) -> bool:
        return False

    def _step(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        rate = self._rate()  # before the step, which advances a schedule
        self._averager.before()
        super(_Distributed, self).apply(self._scaled(grads, variables), variables)  # type: ignore[misc]
        self._averager.after(rate)


def _optimizer_state(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = {key_of(v) for v in (inner._iterations, inner._learning_rate) if hasattr(v, "dtype")}
    return [v for v in inner.variables if key_of(v) not in own and _floating(v)]


def _floating(variable: Any) -> bool:
    return tf.as_dtype(variable.dtype).is_floating


def _statistics(model: Any) -> list[Any]:
    # Weights that are frozen at present are no statistics.
    layers = model._flatten_layers()
    trained = {key_of(v) for layer in layers for v in layer._trainable_variables}
    return [v for v in model.non_trainable_variables if key_of(v) not in trained and _floating(v)]


def _exchanged(optimizer: Any) -> list[Any]:
    known = optimizer._trainable_variables if optimizer is not None and optimizer.built else []
    return [variable for variable in known if not _overwritten(variable)]


def _overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


MOMENTS = {
    keras.optimizers.Adam: "_velocities",
    keras.optimizers.Nadam: "_velocities",
    keras.optimizers.RMSprop: "_velocities",
    keras.optimizers.Adagrad: "_accumulators",
}
"""Class of an optimizer -> attribute with its second moments."""


def gain_of(optimizer: Any, variable: Any) -> float:
    """Return the gain of Keras' optimizers for a variable; see `policies.displacement`."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    momentum = getattr(optimizer, "momentum", None)
    kind = next((kind for kind in MOMENTS if isinstance(optimizer, kind)), None)
    if kind is None:
        return USUAL_GAIN if momentum is None else gain_of_sgd(float(momentum))
    moments = getattr(optimizer, MOMENTS[kind])[optimizer._get_variable_index(variable)]
    mean = float(tf.reduce_mean(tf.cast(moments, tf.float32)))
    steps = float(tf.cast(optimizer.iterations, tf.float32))
    beta = getattr(optimizer, "beta_2", 0.0)  # only Adam corrects the bias of its moments
    return gain_of_sgd(momentum or 0.0) * gain_of_adam(mean, beta, steps)
