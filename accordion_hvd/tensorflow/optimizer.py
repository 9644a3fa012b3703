"""`DistributedOptimizer` for the optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.core.base import ResidualDtype
from accordion_hvd.engine.guard import Mode
from accordion_hvd.resolve import Compression, is_ours


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = hvd.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    skip: Sequence[str] = (),
    guard: Mode | None = None,
    guard_every: int | None = None,
    residual_dtype: ResidualDtype = "float32",
) -> Any:
    """Wrap `optimizer` so that each step uses gradients that are averaged over all ranks.

    The signature is that of `horovod.tensorflow.DistributedOptimizer`. For a Keras optimizer, this
    function calls `accordion_hvd.tensorflow.keras.DistributedOptimizer`; see there. For a
    `tf.compat.v1.train.Optimizer`, it calls Horovod, which accepts only Horovod's compression.

    Raises:
        ValueError: if an argument is invalid, or if `compression` is one of this package and the
            optimizer is one of TensorFlow 1.
    """
    options: dict[str, Any] = {
        "name": name, "device_dense": device_dense, "device_sparse": device_sparse,
        "compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
        "gradient_predivide_factor": gradient_predivide_factor, "groups": groups,
        "num_groups": num_groups, "backward_passes_per_step": backward_passes_per_step,
        "average_aggregated_gradients": average_aggregated_gradients, "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }  # fmt: skip
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if is_ours(compression):
            raise ValueError(
                f"DistributedOptimizer: compression={compression!r} needs a Keras optimizer, but "
                f"{type(optimizer).__name__} is an optimizer of TensorFlow 1."
            )
        return hvd.DistributedOptimizer(optimizer, use_locking=use_locking, **options)
    from accordion_hvd.tensorflow.keras.optimizer import DistributedOptimizer as Keras

    return Keras(
        optimizer, **options, skip=skip, guard=guard, guard_every=guard_every,
        residual_dtype=residual_dtype,
    )  # fmt: skip
