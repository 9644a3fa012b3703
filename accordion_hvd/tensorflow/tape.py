"""`DistributedGradientTape`: gradients that come averaged over the ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.engine.guard import Guard
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import default_guard, resolve
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.averager import TensorFlowGradientAverager
from accordion_hvd.tensorflow.variables import key_of
from accordion_hvd.validate import check_adasum, check_arguments, validate


def DistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    skip: Sequence[str] = (),
    guard: str | None = None,
    guard_every: int | None = None,
) -> Any:
    """Make a tape whose `gradient` averages over the ranks; Horovod's signature.

    A tape is made for each step, but what compression remembers (errors, levels) is kept with the
    variables: the same sources with an equal compressor, or the same policy object, find it again.
    A policy such as `Accordion` must therefore be made once, outside of the loop; it knows no
    learning rate here.

    Args:
        gradtape: the tape.
        device_dense: accepted for compatibility; gradients stay where they are.
        device_sparse: accepted for compatibility.
        compression: see `accordion_hvd.tensorflow.keras.DistributedOptimizer`.
        sparse_as_dense: see there, too.
        op: hvd.Average, hvd.Sum, or hvd.Adasum with Horovod's own compression.
        gradient_predivide_factor: accepted for compatibility.
        num_groups: accepted for compatibility.
        groups: accepted for compatibility.
        process_set: the ranks that average.
        scale_local_gradients: divide gradients of local sources by the number of ranks.
        skip: patterns (as of file names) of variables that travel uncompressed.
        guard: what to do when replicas differ: "error", "warn" (once) or "off". None: "warn" with
            Horovod's own compression, else "error", unless ACCORDION_HVD_GUARD says otherwise.
        guard_every: steps between comparisons of the replicas, by default 100.

    Raises:
        ValueError: an argument is not what it must be; the sentence says which.
        TypeError: `compression` is nothing known.
    """
    check_arguments(op, (hvd.Average, hvd.Sum, hvd.Adasum), gradient_predivide_factor, groups)
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
    tape._wanted = (
        compression, process_set, op, sparse_as_dense, tuple(skip), guard, guard_every,
        scale_local_gradients,
    )  # fmt: skip
    return tape


def PartialDistributedGradientTape(  # noqa: N802, D417 (Horovod's name; see above)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Make a `DistributedGradientTape` that leaves the gradients of `local_layers` alone.

    Args:
        gradtape: the tape; the other arguments are those of `DistributedGradientTape`.
        local_layers: a layer, or several.

    Raises:
        ValueError: one of them is no layer.
    """
    layers = tf.keras.layers.Layer
    chosen = [] if local_layers is None else local_layers
    chosen = [chosen] if isinstance(chosen, layers) else list(chosen)
    if not all(isinstance(layer, layers) for layer in chosen):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
        **options,
    )  # fmt: skip
    for layer in chosen:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _DistributedTape:
    _local: set[int]
    _wanted: tuple[Any, ...]

    def register_local_source(self, source: Any) -> None:
        """Leave this source's gradient alone (but see `scale_local_gradients`)."""
        self._local.add(key_of(source))

    @property
    def process_set(self) -> Any:
        """Return the ranks that average."""
        return self._wanted[1]

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the averages of the gradients of `target`; see `tf.GradientTape.gradient`."""
        grads = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        variables = tf.nest.flatten(sources)
        flat = tf.nest.flatten(grads)
        if self._wanted[2] == hvd.Adasum:
            means = _adasum(flat, self._wanted)
        else:
            averager = _averager(variables, self._wanted, self._local)
            means = averager.average(flat, variables, lambda: 0.0)
        return tf.nest.pack_sequence_as(sources, means)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, **options: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of source and gradient: local ones, and averaged ones."""
        grads = self.gradient(target, sources, output_gradients, **options)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(grads), strict=True))
        local = [(s, g) for s, g in pairs if key_of(s) in self._local]
        return local, [(s, g) for s, g in pairs if key_of(s) not in self._local]


_averagers: dict[
    tuple[Any, ...], TensorFlowGradientAverager
] = {}  # by compression, settings, variables


def exchange_of(compression: Any, variables: Sequence[Any]) -> Any:
    """Return the exchange of tapes with this compression for these sources (for its `stats()`).

    Raises:
        RuntimeError: there is none yet.
    """
    for key, averager in _averagers.items():
        if key[0] == compression and key[-1] == tuple(map(key_of, variables)):
            return averager.exchange
    raise RuntimeError("nothing has been exchanged yet, so there is nothing to tell.")


def _averager(
    variables: Sequence[Any], wanted: tuple[Any, ...], local: set[int]
) -> TensorFlowGradientAverager:
    compression, process_set, op, sparse_as_dense, skip, guard, every, scale_local = wanted
    ids = tuple(map(key_of, variables))
    settings = (process_set.process_set_id, *wanted[2:], frozenset(local))
    key = (compression, settings, ids)
    if key not in _averagers:
        use = validation.use_of(None, process_set, op == hvd.Sum, skip, 1)
        serving = resolve(compression)
        validate(serving, replace(use, owner="DistributedGradientTape", takes_steps=False))
        assert isinstance(serving, Policy)
        references = [weakref.ref(variable) for variable in variables]
        averager = TensorFlowGradientAverager(
            serving,
            process_set,
            lambda: [variable for reference in references if (variable := reference()) is not None],
            total=op == hvd.Sum,
            sparse_as_dense=sparse_as_dense,
            skip=skip,
            guard=Guard(guard, every, default_guard(compression)),
            scale_local=scale_local,
        )
        averager.local = set(local)
        _averagers[key] = averager
        for variable in variables[:1]:  # whose number may be another's once it is gone
            weakref.finalize(variable, _averagers.pop, key, None)
    return _averagers[key]


def _adasum(grads: Sequence[Any], wanted: tuple[Any, ...]) -> list[Any]:
    compression, process_set = wanted[:2]
    return [
        None if grad is None
        else hvd.allreduce(
            grad, op=hvd.Adasum, compression=compression, process_set=process_set,
            name=f"accordion.adasum.{i}", ignore_name_scope=True,
        )
        for i, grad in enumerate(grads)
    ]  # fmt: skip
