"""Checks of `tests/parity/behaviours.py` in Keras, eagerly and within a tf.function."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import horovod.tensorflow.keras
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import Adasum, broadcast_object

import accordion_hvd.tensorflow.keras
from accordion_hvd.ops import tensorflow as xp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))
from behaviours import ZEROS, Arrays, Switch, bound  # noqa: E402

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"


class Job:
    """Variables to which the optimizer applies gradients."""

    def __init__(
        self,
        traced: bool,
        compression: Any,
        lr: float,
        momentum: float,
        adam: bool,
        first: Arrays,
        options: dict[str, Any],
    ) -> None:
        if compression is not None:
            options = {"compression": compression, **options}
        self.optimizer = accordion_hvd.tensorflow.keras.DistributedOptimizer(
            keras.optimizers.Adam(lr) if adam else keras.optimizers.SGD(lr, momentum), **options
        )
        self._named = {name: keras.Variable(x, name=name) for name, x in first.items()}
        self.optimizer.build(list(self._named.values()))
        self._traced, self._functions = traced, {}  # type: ignore[var-annotated]

    def step(self, gradients: Arrays) -> None:
        """Take a step with this rank's gradients; an array that is not named has no gradient."""
        self._call("apply", gradients)

    def accumulate(self, passes: Sequence[Arrays]) -> None:
        """Take one step with the gradients of several backward passes."""
        for gradients in passes:
            self.step(gradients)

    def averages(self, gradients: Arrays) -> Arrays:
        """Exchange gradients and return the averages, without a step."""
        return {
            n: x.numpy() for n, x in zip(gradients, self._call("average", gradients), strict=True)
        }

    def weights(self) -> Arrays:
        """Return the current values of all arrays."""
        return {name: np.array(variable.numpy()) for name, variable in self._named.items()}

    def assign(self, name: str, values: np.ndarray) -> None:
        """Change an array on this rank."""
        self._named[name].assign(values)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        self.optimizer.learning_rate = lr

    def _call(self, what: str, gradients: Arrays) -> Any:
        """Run `_apply` or `_average`, which are traced once for each set of names."""
        key = what, tuple(gradients)
        if key not in self._functions:
            function = getattr(self, f"_{what}")(tuple(gradients))
            self._functions[key] = tf.function(function) if self._traced else function
        return self._functions[key](*map(tf.constant, gradients.values()))

    def _apply(self, names: tuple[str, ...]) -> Any:
        def run(*grads: Any) -> None:
            given = dict(zip(names, grads, strict=True))
            self.optimizer.apply([given.get(n) for n in self._named], list(self._named.values()))

        return run

    def _average(self, names: tuple[str, ...]) -> Any:
        variables = [self._named[name] for name in names]
        average = self.optimizer._averager.average
        return lambda *grads: average(list(grads), variables, lambda: 0.0)


class Keras:
    """An implementation of `behaviours.Adapter` for Keras.

    Args:
        traced: whether steps are taken within a tf.function.
    """

    hvd, horovod, xp = accordion_hvd.tensorflow.keras, horovod.tensorflow.keras, xp
    adasum = Adasum
    failed: tuple[type[BaseException], ...] = (tf.errors.OpError,)

    def __init__(self, traced: bool) -> None:
        self.traced = traced

    def job(
        self,
        compression: Any = None,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        adam: bool = False,
        first: Arrays = ZEROS,
        **options: Any,
    ) -> Job:
        """Begin a training; `options` go to `DistributedOptimizer`."""
        return Job(self.traced, compression, lr, momentum, adam, first, options)

    def switch(self) -> Switch:
        """Return a new switch."""
        return Switch(keras.Variable(0.0, trainable=False))

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return every rank's array, as rows."""
        return np.array(self.hvd.allgather(values[None], name="parity.gather"))

    def shared(self, text: str) -> str:
        """Return rank 0's text."""
        return str(broadcast_object(text, 0, name="parity.shared"))


if __name__ == "__main__":
    modes = [Keras(traced=False), Keras(traced=True)]
    harness.main(
        {"__name__": "behaviours", "INIT": accordion_hvd.tensorflow.keras.init, **bound(modes)}
    )
