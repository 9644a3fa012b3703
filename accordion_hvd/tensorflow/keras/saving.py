"""Loading saved models with a distributed optimizer."""

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
    """Load a model; its optimizer, in the state that was saved, becomes a distributed one.

    (From HDF5 files Keras 3 may give an optimizer that lost its state and accepts no variables;
    it is made anew, with a warning.)

    Args:
        filepath: what `model.save` wrote.
        custom_optimizers: optimizer classes of your own.
        custom_objects: other classes and functions of your own, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for compatibility; Keras 3 has no legacy optimizers.
        options: further arguments of `DistributedOptimizer`.
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
    """Return the optimizer, or one like it if it was built for no variables at all."""
    if not optimizer.built or optimizer._trainable_variables:
        return optimizer
    warnings.warn(
        f"Keras did not restore the optimizer's state (momentum, say) from {filepath}; it starts "
        "anew. Save models as .keras files to keep it.",
        stacklevel=3,
    )
    return type(optimizer).from_config(optimizer.get_config())
