"""An optimizer that leaves the gradients of some layers alone."""

from __future__ import annotations

from typing import Any

import keras

from accordion_hvd.tensorflow.keras.optimizer import DistributedOptimizer
from accordion_hvd.tensorflow.variables import weights_of


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    *args: Any,
    local_layers: Any = None,
    **kwargs: Any,
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
