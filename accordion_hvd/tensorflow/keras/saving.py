"""Loading of saved models with a distributed optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.tensorflow.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model and wrap its optimizer, with the saved state, in `DistributedOptimizer`.

    From an HDF5 file, Keras 3 may restore an optimizer without its state that accepts no variables.
    In this case, a new optimizer with the same settings replaces it, with a warning.

    Args:
        filepath: file or folder that `model.save` wrote.
        custom_optimizers: custom optimizer classes.
        custom_objects: other custom classes and functions, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for compatibility with Horovod; Keras 3 has no legacy optimizers.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model, compiled with a distributed optimizer if it was saved with an optimizer.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        options["compression"] = compression
        model.optimizer = DistributedOptimizer(_usable(model.optimizer, filepath), **options)
        model.train_function = None
        if model.jit_compile:
            model.jit_compile = False
    return model


def _usable(optimizer: Any, filepath: Any) -> Any:
    if not optimizer.built or optimizer._trainable_variables:
        return optimizer
    warnings.warn(
        f"Keras did not restore the state of the optimizer, such as momentum, from {filepath}. The "
        "optimizer starts without it. Save models as .keras files to preserve the state.",
        stacklevel=3,
    )
    return type(optimizer).from_config(optimizer.get_config())
