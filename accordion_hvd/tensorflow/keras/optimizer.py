"""`DistributedOptimizer`: a Keras 3 optimizer whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.engine.controls import Controls
from accordion_hvd.engine.guard import Guard
from accordion_hvd.policies import Policy
from accordion_hvd.policies.alternation import Alternation
from accordion_hvd.policies.byte_budget import ByteBudget
from accordion_hvd.resolve import default_guard, resolve
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.averager import TensorFlowGradientAverager
from accordion_hvd.tensorflow.averaging import TensorFlowModelAverager, Variables
from accordion_hvd.tensorflow.graph import call_back, when
from accordion_hvd.tensorflow.variables import key_of
from accordion_hvd.validate import OWNER, check_adasum, check_arguments, check_passes, validate


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    skip: Sequence[str] = (),
    guard: str | None = None,
    guard_every: int | None = None,
) -> Any:
    """Average `optimizer`'s gradients over the ranks before each step; Horovod's signature.

    The result is of a subclass of the optimizer's class and has its name, so that models saved
    with it are loaded without Horovod. It has the state of `optimizer`, if that was built.

    Args:
        optimizer: what takes the steps.
        name: accepted for compatibility.
        device_dense: accepted for compatibility; gradients stay where they are.
        device_sparse: accepted for compatibility.
        compression: a compressor such as `TopK(0.01)`, a policy such as `Accordion(low=, high=)`,
            a class of either, a word such as "topk:0.01", a method that averages models
            (`WAGMA(8)`; see docs/averaging.md), or Horovod's own `hvd.Compression`.
        sparse_as_dense: exchange `tf.IndexedSlices` like dense gradients; otherwise they are
            gathered, beside any compression.
        gradient_predivide_factor: accepted; an average is an average whatever it is divided by
            before, and overflow is no concern of fp32.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: steps whose gradients are added up locally before an exchange.
        average_aggregated_gradients: divide what was added up by `backward_passes_per_step`.
        num_groups: accepted; what travels together is decided by sizes.
        groups: accepted, like num_groups.
        process_set: the ranks that average; others take plain steps.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        skip: patterns (as of file names) of variables that travel uncompressed.
        guard: what to do when replicas differ: "error", "warn" (once) or "off". None: "warn" with
            Horovod's own compression, else "error", unless ACCORDION_HVD_GUARD says otherwise.
        guard_every: steps between comparisons of the replicas, by default 100.

    Returns:
        The wrapped optimizer; `exchange.stats()` has bytes, `end_window()` ends a window of
        `Accordion`'s (in `fit`, the BroadcastGlobalVariablesCallback does). Where models are
        averaged, it has `average_now(model)`, `averaging.stats()` and `close()` instead; where
        they are at times (`Accordion(high=WAGMA())`), `average_now(model)` and `averaging` besides.

    Raises:
        ValueError: an argument is not what it must be; the sentence says which.
        TypeError: `compression` or `optimizer` is nothing known.
    """
    check_arguments(op, (hvd.Average, hvd.Sum, hvd.Adasum), gradient_predivide_factor, groups)
    if op == hvd.Adasum:
        check_adasum(compression)
        raise ValueError("op == Adasum is not supported with Keras; use op=hvd.Average.")
    validation.check_strategy()
    check_passes(backward_passes_per_step)
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, 2
        )
    serving, passes = resolve(compression), backward_passes_per_step
    validate(serving, validation.use_of(optimizer, process_set, op == hvd.Sum, skip, passes))
    validation.check_optimizer(serving, optimizer)
    if isinstance(serving, Averaging):
        averages = AveragingSettings(
            serving, process_set, Guard(guard, guard_every), passes, average_aggregated_gradients
        )
        wrapped = wrap(optimizer, averages, _ModelAveraging)
        wrapped.averaging.set_up()
        return wrapped
    guard = Guard(guard, guard_every, default_guard(compression)).mode
    settings = Settings(
        serving, process_set, op == hvd.Sum, sparse_as_dense, tuple(skip), guard, guard_every,
        scale_local_gradients, passes, average_aggregated_gradients,
    )  # fmt: skip
    wrapped = wrap(optimizer, settings)
    if wrapped.averaging is not None:
        wrapped.averaging.set_up()
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
    hyper: Any = None  # what conversations are told (`Info.hyper`)
    used: bool = False

    def averager(self, variables: Callable[[], Sequence[Any]]) -> TensorFlowGradientAverager:
        """Make an averager; from the second on with a policy of its own."""
        policy = copy.deepcopy(self.policy) if self.used else self.policy
        self.used = True
        return TensorFlowGradientAverager(
            policy,
            self.process_set,
            variables,
            total=self.total,
            sparse_as_dense=self.sparse_as_dense,
            skip=self.skip,
            guard=Guard(self.guard, self.guard_every),
            scale_local=self.scale_local,
            hyper=self.hyper,
        )

    def models(self, averager: TensorFlowGradientAverager) -> TensorFlowModelAverager | None:
        """Make the averager of models, if the policy averages them at times."""
        alternation = averager.policy.observers.find(Alternation)
        if alternation is None:
            return None
        guard = Guard(self.guard, self.guard_every)
        made = TensorFlowModelAverager(
            alternation.method, self.process_set, averager.variables, guard, alternation
        )
        made.local = averager.local
        return made


@dataclass
class AveragingSettings:
    """The arguments of `DistributedOptimizer` that matter where models are averaged."""

    method: Averaging
    process_set: Any
    guard: Guard
    passes: int
    average_passes: bool

    def averager(self, variables: Callable[[], Sequence[Any]]) -> TensorFlowModelAverager:
        """Make an averager."""
        return TensorFlowModelAverager(self.method, self.process_set, variables, self.guard)

    def models(self, averager: TensorFlowModelAverager) -> TensorFlowModelAverager:
        """Return the same averager: there is no other."""
        return averager


def wrap(optimizer: Any, settings: Any, methods: type | None = None) -> Any:
    """Return an optimizer like `optimizer`, in the same state, that averages."""
    if is_distributed(optimizer):
        raise ValueError("this optimizer is distributed already; wrap the plain one once.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{OWNER}: optimizer is {optimizer!r}, but must be a Keras 3 optimizer.")
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise TypeError("wrap the optimizer within LossScaleOptimizer no second time.")
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # Else compile() would put loss scaling around us, where an overflow on one rank hangs all.
        optimizer, scaled = keras.optimizers.LossScaleOptimizer(optimizer), True
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "_settings": settings, "__doc__": base.__doc__}
    kind: Any = type(base.__name__, (methods or _Distributed, base), namespace)
    if scaled:
        scale, growth = optimizer.initial_scale, optimizer.dynamic_growth_steps
        wrapped = kind(optimizer.inner_optimizer, scale, growth, name=optimizer.name)
    else:
        wrapped = kind.from_config(optimizer.get_config())
    if optimizer.built:
        wrapped.build(optimizer._trainable_variables)
        for ours, theirs in zip(wrapped.variables, optimizer.variables, strict=True):
            ours.assign(theirs)
    return wrapped


def is_distributed(optimizer: Any) -> bool:
    """Return whether `DistributedOptimizer` made `optimizer`."""
    return isinstance(optimizer, _Distributed)


def averages_models(optimizer: Any) -> bool:
    """Return whether `DistributedOptimizer` made it with a method that averages models."""
    return isinstance(optimizer, _ModelAveraging)


class _Distributed(Controls):
    """Methods of a distributed optimizer; every path of Keras 3 leads through `apply`."""

    _settings: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        me = weakref.ref(self)
        self._averager = self._settings.averager(lambda: _exchanged(me()))
        self._models = self._settings.models(self._averager)  # averages them, if anything does
        self._sums: list[tf.Variable] = []
        self._passes: tf.Variable | None = None
        self._small: tf.Variable | None = None  # small batches in a batch, for graphs
        self._factor: Any = None  # of the learning rate, within a step

    # ------------------------------------------------------------------------ what users may need
    def average_now(self: Any, model: Any = None) -> None:
        """Make all models equal, outside of graphs; see `Controls`."""
        if not tf.executing_eagerly():
            raise RuntimeError("average_now() is called outside of tf.function.")
        if self._models is not None:
            self._models.directly(False)
        super().average_now(model)

    def _statistics(self: Any, model: Any) -> Variables:
        return Variables(lambda: _statistics(model))

    def resize(self: Any) -> None:
        """Give batches their present size; a loader calls it on every rank before an epoch.

        Takes the decision that is due.
        """
        self.growth.loader = True
        self._averager.decide(float(self.learning_rate))
        self.growth.resize()
        self._follow()

    def register_local_var(self, var: Any) -> None:
        """Leave this variable's gradient alone (but see `scale_local_gradients`)."""
        self._averager.local.add(key_of(var))

    # ----------------------------------------------------------------------------- what Keras calls
    def build(self: Any, variables: Any) -> None:
        """Create the optimizer's variables; refuse what cannot work."""
        validation.check_keras_caller(self)
        super().build(variables)  # type: ignore[misc]
        self._averager.enlist()
        if self._models is not None:
            self._models.enlist()

    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Average, then take the step (clipping and all that follows included)."""
        grads = list(grads)
        if not grads:
            return
        given = trainable_variables is not None
        variables = list(trainable_variables) if given else list(self._trainable_variables)
        if given and not self.built:
            with tf.init_scope():
                self.build(variables)
        if len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables.")
        grads = self._unscaled(grads, variables)
        batches = self._batches() if self._resizes else 1
        if self._settings.passes == 1 and (not self._resizes or self.growth.loader):
            self._step(grads, variables, batches)
        else:
            self._accumulate(grads, variables, batches)

    def _step(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        chosen = [i for i, v in enumerate(variables) if not _overwritten(v)]
        means = self._averager.average(
            [grads[i] for i in chosen], [variables[i] for i in chosen], self._rate
        )
        for i, mean in zip(chosen, means, strict=True):
            grads[i] = mean
        models, rate = self._models, self._rate()  # before the step: a schedule's goes on with it
        if self._resizes:
            rate = _multiplied(tf.convert_to_tensor(rate), batches)
        apart = models.follow(Variables(lambda: _slots(self))) if models is not None else False
        when(apart, lambda: models.before())
        self._factor = batches if self._resizes else None
        try:
            super().apply(self._scaled(grads, variables), variables)  # type: ignore[misc]
        finally:
            self._factor = None
        when(apart, lambda: models.after(rate))
        if self._resizes and self.growth.loader:
            self._iterations.assign_add(batches - 1)

    def _get_current_learning_rate(self: Any) -> Any:
        """Return the rate of Keras' step: within one, multiplied by the number of batches."""
        rate = super()._get_current_learning_rate()  # type: ignore[misc]
        if self._factor is None:
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(self._factor, rate.dtype)

    # ------------------------------------------------------------------------- batches that grow
    @property
    def _resizes(self: Any) -> bool:
        return self.growth is not None

    def _batches(self: Any) -> Any:
        """Small batches in the present one, after a decision that was due; a tensor in a graph."""
        averager = self._averager
        if averager.policy.observers.find(ByteBudget) is not None and not averager.idle:
            assert averager.exchange  # which reckons what may be sent
        if tf.executing_eagerly():
            averager.decide(self._rate())
            return self.growth.micro_batches
        with tf.init_scope():
            self._follow()
        if averager.managed:  # the manager decides between steps
            return self._small.read_value()

        def decided(lr: Any) -> Any:
            averager.decide(float(lr))
            return tf.constant(self.growth.micro_batches, tf.int64)

        found = call_back(decided, [tf.cast(self._rate(), tf.float32)], [tf.int64])
        return tf.ensure_shape(found[0], ())

    def _follow(self: Any) -> None:
        if not self._resizes:
            return
        if self._small is None:
            self._small = tf.Variable(1, trainable=False, dtype=tf.int64)
        self._small.assign(self.growth.micro_batches)

    def _rate(self: Any) -> Any:
        rate = self.learning_rate
        return float(rate) if tf.executing_eagerly() else tf.convert_to_tensor(rate)

    # -------------------------------------------------------------------------------- loss scaling
    def _unscaled(self: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
        """In the units that errors are kept in, whatever the loss scale is now (a power of 2)."""
        return self._times(grads, variables, lambda scale: 1.0 / scale)

    def _scaled(self: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
        return self._times(grads, variables, lambda scale: scale)

    def _times(self: Any, grads: list[Any], variables: list[Any], factor: Any) -> list[Any]:
        if not isinstance(self, keras.optimizers.LossScaleOptimizer):
            return grads
        scale = factor(tf.convert_to_tensor(self.dynamic_scale))
        pairs = zip(grads, variables, strict=True)
        return [g if g is None or _overwritten(v) else _multiplied(g, scale) for g, v in pairs]

    # ---------------------------------------------------------------------------- several backwards
    def _accumulate(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        """Add gradients up; every `backward_passes_per_step`-th time, take a step with the sum.

        Where batches grow, that many times more often, with the average of as many sums.
        """
        self._make_sums(variables)
        added = batches if self._resizes and not self.growth.loader else 1
        for total, grad in zip(self._sums, grads, strict=True):
            if grad is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(grad), total.dtype))
        passes = self._settings.passes
        parts = added * (passes if self._settings.average_passes else 1)
        self._passes.assign_add(1)

        def step() -> None:
            self._passes.assign(0)
            sums = [
                None if grad is None else total / tf.cast(parts, total.dtype)
                for total, grad in zip(self._sums, grads, strict=True)
            ]
            for total in self._sums:
                total.assign(tf.zeros_like(total))
            self._step(sums, variables, batches)

        def wait() -> None:
            getattr(self, "inner_optimizer", self)._iterations.assign_add(1)

        last = self._passes >= passes * added
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
            self._passes = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                tf.Variable(tf.zeros(tuple(v.shape), v.dtype), trainable=False) for v in variables
            ]


class _ModelAveraging(_Distributed):
    """Takes its own steps with this rank's own gradients; a method then averages the models.

    Momentum and other state stay local, and so do the loss scale (a rank whose gradients are not
    finite takes no step of its own, but averages) and what is no trainable variable: statistics of
    batch normalisation, which `average_now(model)` averages too. Clipping is by a rank's own norm.
    In `fit`, the BroadcastGlobalVariablesCallback averages before validation and at epochs' ends.
    """

    _averager: TensorFlowModelAverager

    def close(self) -> None:
        """Average all models and end; for averaging without waiting, ends its thread.

        Processes that do not call it do so when they exit.
        """
        self._averager.close()

    averaging_models = True  # always

    @property
    def exchange(self) -> Any:
        """Raises: AttributeError, since no gradients are exchanged."""
        raise AttributeError("models are averaged, not gradients: see optimizer.averaging.stats().")

    def end_window(self) -> None:
        """Nothing: there is no policy whose windows could end."""

    def register_local_var(self, var: Any) -> None:
        """Do not average this variable; before the first step."""
        self._averager.leave_alone(var)

    @property
    def _resizes(self) -> bool:
        return False

    def _step(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        rate = self._rate()  # before the step: a schedule's goes on with it
        self._averager.before()
        super(_Distributed, self).apply(self._scaled(grads, variables), variables)  # type: ignore[misc]
        self._averager.after(rate)


def _slots(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = {key_of(v) for v in (inner._iterations, inner._learning_rate) if hasattr(v, "dtype")}
    return [v for v in inner.variables if key_of(v) not in own and _floating(v)]


def _floating(variable: Any) -> bool:
    return tf.as_dtype(variable.dtype).is_floating


def _statistics(model: Any) -> list[Any]:
    """Return a model's floating-point variables that are never trained; not frozen weights."""
    layers = model._flatten_layers()
    trained = {key_of(v) for layer in layers for v in layer._trainable_variables}
    return [v for v in model.non_trainable_variables if key_of(v) not in trained and _floating(v)]


def _exchanged(optimizer: Any) -> list[Any]:
    """Return the variables whose gradients a distributed optimizer exchanges."""
    known = optimizer._trainable_variables if optimizer is not None and optimizer.built else []
    return [variable for variable in known if not _overwritten(variable)]


def _overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _multiplied(grad: Any, factor: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values = grad.values * tf.cast(factor, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
