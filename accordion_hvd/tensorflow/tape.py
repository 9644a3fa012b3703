"""`DistributedGradientTape`: a gradient tape that averages gradients over the ranks."""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.compressors import BF16, FP16, Dense
from accordion_hvd.compressors.wrappers import HorovodCompression
from accordion_hvd.core.base import ResidualDtype
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.policies import Fixed, Policy
from accordion_hvd.resolve import Compression, resolve
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.averager import TensorFlowGradientAverager
from accordion_hvd.tensorflow.variables import key_of, multiplied, references, weights_of
from accordion_hvd.validate import check_adasum, check_arguments, validate


def DistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    skip: Sequence[str] = (),
    guard: Mode | None = None,
    guard_every: int | None = None,
    lr: Callable[[], Any] | None = None,
    residual_dtype: ResidualDtype = "float32",
) -> Any:
    """Wrap a gradient tape so that `gradient` returns averages over all ranks.

    The signature is Horovod's, with a few more keyword arguments. A loop creates a new tape in each
    step, but the state of compression (residuals, levels) belongs to the place in the program that
    calls `gradient`, and to the sources: several losses of one step have states of their own if
    each has its own call, or if one persistent tape serves all of them in the same order. Therefore
    create a policy such as `Accordion` once, outside of the loop. A tape does not know the
    optimizer: policies that watch the learning rate need `lr`, and `Displacement` and `Goodput`,
    which need the optimizer, are refused.

    ```python
    compression = TopK(0.01)
    for x, y in dataset:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    ```

    Args:
        gradtape: the tape.
        device_dense: accepted for compatibility with Horovod; gradients stay on their devices.
        device_sparse: accepted for compatibility with Horovod; not used.
        compression: how gradients are compressed; see
            `accordion_hvd.tensorflow.keras.DistributedOptimizer`. A tape cannot average models or
            change batch sizes.
        sparse_as_dense: whether to convert `tf.IndexedSlices` to dense gradients and compress them.
            If False, they are gathered from all ranks without compression.
        op: `hvd.Average` or `hvd.Sum`; or `hvd.Adasum`, only with Horovod's own compression.
        gradient_predivide_factor: accepted for compatibility with Horovod; has no effect. Values
            other than 1 require `op=hvd.Average`.
        num_groups: deprecated by Horovod in favor of `groups`; has no effect.
        groups: accepted for compatibility with Horovod; has no effect.
        process_set: the ranks that average their gradients.
        scale_local_gradients: whether to divide the gradients of local sources by the number of
            ranks.
        skip: shell-style patterns (such as `"*/bias"`) of the names of variables whose gradients
            are exchanged uncompressed.
        guard: reaction to replicas that differ between ranks, as for `DistributedOptimizer`.
        guard_every: number of steps between comparisons, as for `DistributedOptimizer`.
        lr: function that returns the learning rate, such as `lambda: optimizer.learning_rate`, for
            policies such as `Accordion`.
        residual_dtype: dtype of stored residuals, as for `DistributedOptimizer`.

    Returns:
        A tape of a subclass of `type(gradtape)` that has recorded the same operations.

    Raises:
        ValueError: if an argument is invalid. Most values of `compression` are checked when
            `gradient` is called for the first time.
        TypeError: if `compression` is no compression; raised by the first call of `gradient`.
    """
    check_arguments(op, (hvd.Average, hvd.Sum, hvd.Adasum), gradient_predivide_factor, groups)
    validation.check_positions(
        "DistributedGradientTape", device_dense=device_dense, device_sparse=device_sparse
    )
    if op == hvd.Adasum:
        check_adasum(compression)
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, 2
        )
    bases: Any = (_DistributedTape, type(gradtape))
    kind: Any = type(type(gradtape).__name__, bases, {})
    tape = kind.__new__(kind)
    tape.__dict__.update(gradtape.__dict__)
    tape._local = set()
    tape._arguments = (
        compression, process_set, op, sparse_as_dense, check.patterns(skip), guard, guard_every,
        scale_local_gradients, residual_dtype,
    )  # fmt: skip
    tape._lr, tape._calls = lr, 0
    return tape


def PartialDistributedGradientTape(  # noqa: N802, D417 (Horovod's name; see above)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Return a `DistributedGradientTape` that does not average the gradients of `local_layers`.

    Args:
        gradtape: the tape; the other arguments are those of `DistributedGradientTape`.
        local_layers: a layer or several layers.

    Raises:
        ValueError: if `local_layers` contains an object that is not a layer.
    """
    local = weights_of(local_layers)
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
        **options,
    )  # fmt: skip
    for variable in local:
        tape.register_local_source(variable)
    return tape


class _DistributedTape:
    _local: set[int]
    _lr: Callable[[], Any] | None
    _calls: int  # calls of `gradient` so far
    _arguments: tuple[Any, ...]

    def register_local_source(self, source: Any) -> None:
        """Do not average the gradient of this source; `scale_local_gradients` still applies."""
        self._local.add(key_of(source))

    @property
    def process_set(self) -> Any:
        return self._arguments[1]

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the averaged gradients of `target`; see `tf.GradientTape.gradient`."""
        grads = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        variables = tf.nest.flatten(sources)
        flat = tf.nest.flatten(grads)
        if self._arguments[2] == hvd.Adasum:
            means = _adasum(flat, self._arguments)
        else:
            place, self._calls = (*_caller(), self._calls), self._calls + 1
            averager = _averager(variables, self._arguments, self._local, place, self._lr)
            scale = None if averager.scaler is None else averager.scaler()
            if scale is not None:  # residuals do not follow it
                flat = [multiplied(grad, 1.0 / scale) for grad in flat]
            means = averager.average(flat, variables, self._rate)
            if scale is not None:
                means = [multiplied(mean, scale) for mean in means]
        return tf.nest.pack_sequence_as(sources, means)

    def _rate(self) -> Any:
        rate = 0.0 if self._lr is None else self._lr()
        return float(rate) if tf.executing_eagerly() else tf.convert_to_tensor(rate)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, **options: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the (source, gradient) pairs of local sources, and those of averaged sources."""
        grads = self.gradient(target, sources, output_gradients, **options)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(grads), strict=True))
        local = [(s, g) for s, g in pairs if key_of(s) in self._local]
        return local, [(s, g) for s, g in pairs if key_of(s) not in self._local]


def _caller() -> tuple[Any, int]:
    frame = sys._getframe(2)
    # AutoGraph may stand between the user's program and `gradient`.
    while frame.f_back is not None and "/tensorflow/python/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


_averagers: dict[tuple[Any, ...], TensorFlowGradientAverager] = {}
"""Averagers by compression, settings, place of the call and variables."""


def exchange_of(compression: Any, variables: Sequence[Any]) -> Any:
    """Return the exchange of tapes with this compression and these sources, which has `stats()`.

    Raises:
        RuntimeError: if no such tape has been used.
    """
    for key, averager in _averagers.items():
        if key[0] == compression and key[-1] == tuple(map(key_of, variables)):
            return averager.exchange
    raise RuntimeError("no tape has exchanged these gradients with this compression.")


def _averager(
    variables: Sequence[Any],
    arguments: tuple[Any, ...],
    local: set[int],
    place: tuple[Any, ...],
    lr: Callable[[], Any] | None,
) -> TensorFlowGradientAverager:
    compression, process_set, op, as_dense, skip, guard, every, scale_local, dtype = arguments
    ids = tuple(map(key_of, variables))
    settings = (process_set.process_set_id, *arguments[2:], frozenset(local))
    key = (compression, settings, place, ids)
    if key not in _averagers:
        wider = [k for k in _averagers if k[:-1] == key[:-1] and set(k[-1]) > set(ids)]
        if wider:  # sources that are left out are frozen: what is owed to the others stays owed
            key = min(wider, key=lambda k: len(k[-1]))
        else:
            _take_in(key, variables)
    if key not in _averagers:
        use = validation.use_of(None, process_set, op == hvd.Sum, skip, 1)
        resolved = resolve(compression)
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if elastic:
            _check_elastic(resolved.serving)
        owner = "DistributedGradientTape"
        use = replace(use, owner=owner, takes_steps=False, residual_dtype=dtype)
        validate(resolved, replace(use, knows_optimizer=False, knows_rate=lr is not None))
        serving = resolved.serving
        assert isinstance(serving, Policy)
        others = [_averagers[k] for k in _averagers if k[1:] == key[1:] and k[0] is not compression]
        if compression is serving and any(x._exchange and x.exchange.steps == 1 for x in others):
            allowed = "made once, before the loop: a new one in each step keeps no residual"
            check.refuse(owner, "compression", compression, allowed)
        averager = TensorFlowGradientAverager(
            serving,
            process_set,
            references(variables),
            total=op == hvd.Sum,
            sparse_as_dense=as_dense,
            skip=skip,
            guard=Guard("off" if elastic else guard, every, resolved.guard),
            scale_local=scale_local,
            residual_dtype=dtype,
        )
        averager.agrees = not elastic  # ranks that join take their first step later than others
        averager.local = set(local)
        averager.scaler = _scaler_of(serving, ids)
        _keep(key, averager, variables)
    _averagers[key].rate = lr
    return _averagers[key]


def _take_in(key: tuple[Any, ...], variables: Sequence[Any]) -> None:
    known = [k for k in _averagers if k[:-1] == key[:-1] and set(k[-1]) < set(key[-1])]
    if known:
        averager = _averagers.pop(max(known, key=lambda k: len(k[-1])))
        averager.take_in(variables)
        _keep(key, averager, variables)


def _keep(key: tuple[Any, ...], averager: Any, variables: Sequence[Any]) -> None:
    _averagers[key] = averager
    # Once it is gone, another variable may get the same id.
    for variable in variables[:1]:
        weakref.finalize(variable, _averagers.pop, key, None)


def _scaler_of(serving: Policy, ids: Sequence[int]) -> Callable[[], Any] | None:
    # Nothing that lasts is in units of the gradient then.
    without_state = (Dense, FP16, BF16, HorovodCompression)
    if isinstance(serving, Fixed) and isinstance(serving.compressor, without_state):
        return None
    kind = tf.keras.optimizers.LossScaleOptimizer
    # A tape does not know the optimizer: it is the one that is built with one of these variables,
    # or the one that is not built yet.
    if not any(issubclass(type(x), kind) for x in gc.get_objects()):
        return None
    gc.collect()  # what nobody uses any more is there on some ranks only
    every = [x for x in gc.get_objects() if issubclass(type(x), kind)]
    every = [x for x in every if not hasattr(type(x), "exchange_owner")]  # scales for itself
    found = [x for x in every if x.built and not _variables_of(x).isdisjoint(ids)]
    found = found or [x for x in every if not x.built]
    if len(found) > 1:
        allowed = "built before the first step: optimizer.build(model.trainable_variables)"
        check.refuse("DistributedGradientTape", "LossScaleOptimizer", found, allowed)
    if not found:
        return None
    reference = weakref.ref(found[0])

    def scale() -> Any:
        alive = reference()
        if alive is None:
            return None
        return tf.convert_to_tensor(alive.dynamic_scale if alive.built else alive.initial_scale)

    return scale


def _variables_of(optimizer: Any) -> set[int]:
    return set(map(key_of, optimizer.inner_optimizer._trainable_variables))


def _check_elastic(serving: Any) -> None:
    kind = getattr(serving, "compressor", None)
    # A state in a tape cannot follow the ranks of an elastic job.
    if not isinstance(serving, Fixed) or not isinstance(kind, (Dense, HorovodCompression)):
        allowed = "Horovod's own in elastic jobs; DistributedOptimizer accepts all others"
        check.refuse("DistributedGradientTape", "compression", serving, allowed)


def _adasum(grads: Sequence[Any], arguments: tuple[Any, ...]) -> list[Any]:
    compression, process_set = arguments[:2]
    return [
        None if grad is None
        else hvd.allreduce(
            grad, op=hvd.Adasum, compression=compression, process_set=process_set,
            name=f"accordion.adasum.{i}", ignore_name_scope=True,
        )
        for i, grad in enumerate(grads)
    ]  # fmt: skip
