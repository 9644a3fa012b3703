"""Contestants in Keras, trained by `fit`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from accordion_hvd.comm import fp16_reduction
from benchmarks.netbench import contestants, receipts
from benchmarks.netbench.contestants import ALONE, COMPILED, GROUPED, HOROVOD, OURS

BATCHES = 32
FIRST = 1
"""First measured step of each `fit`."""


class Keras:
    """Methods of one launch, each with its own compiled model.

    Args:
        methods: names of the methods.
        model: "vgg".
        batch: number of examples per rank and step.
    """

    def __init__(self, methods: Sequence[str], model: str, batch: int) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        if contestants.group(methods[0]) == HOROVOD:
            import horovod.tensorflow.keras as hvd

            hvd.init()
            self.rank = hvd.rank()
        self._models: dict[str, Any] = {}
        self._callbacks: dict[str, list[Any]] = {}
        for method in methods:
            keras.utils.set_random_seed(1)
            self._models[method] = MODELS[model]()
            optimizer, self._callbacks[method] = _contestant(method)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._models[method].compile(optimizer, loss, jit_compile=method == COMPILED)
        rng = np.random.default_rng(100 + self.rank)
        inputs = rng.standard_normal((BATCHES * batch, 32, 32, 3), np.float32)
        labels = rng.integers(0, 10, BATCHES * batch)
        self._data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(batch).repeat()
        sizes = [int(np.prod(v.shape)) for v in self._models[methods[0]].trainable_variables]
        self.facts = {"parameters": sum(sizes), "tensors": len(sizes)}

    def steps(
        self, method: str, count: int, together: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train for some steps; return wall and CPU milliseconds per step, and the last loss.

        Args:
            method: name of the method.
            count: number of measured steps.
            together: function that synchronizes all workers. It is called before the measured steps
                and after one unmeasured step, in which `fit` may trace its function again.
        """
        watch = _Stopwatch(together)
        history = self._models[method].fit(
            self._data, steps_per_epoch=FIRST + count, verbose=0, shuffle=False,
            callbacks=[*self._callbacks[method], watch],
        )  # fmt: skip
        ms, cpu_ms = watch.ms(count)
        return {"ms": ms, "cpu_ms": cpu_ms, "loss": history.history["loss"][-1]}

    def receipt(self, method: str, count: int) -> dict[str, Any]:
        """Return what a job of `count` steps takes, and what its receipt says of others."""
        model = self._models[method]
        job = receipts.Job(model.optimizer._averager)
        after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: job.stepped())
        callbacks = [*self._callbacks[method], after]
        model.fit(self._data, steps_per_epoch=count, verbose=0, shuffle=False, callbacks=callbacks)
        return job.result()

    def warm(self, method: str, count: int) -> None:
        """End a window after each step, so that Accordion leaves its initial critical regime."""
        for _ in range(count):
            self.steps(method, 1)
        if contestants.adapts(method):
            contestants.check_level(method, self._models[method].optimizer.exchange.policy.current)

    def judge(self, method: str, count: int) -> None:
        """Measure the 16-bit reduction again; the next step is traced with the result."""
        exchange = self._models[method].optimizer.exchange
        exchange.communicator.native_fp16_allreduce = None
        fp16_reduction.choose_reduction(exchange.communicator, exchange.policy.fp16_reduction)
        exchange.version += 1

    def digest(self, method: str) -> str:
        """Return a hash that is equal on two ranks if their weights are bitwise equal."""
        digest = hashlib.sha256()
        for variable in self._models[method].trainable_variables:
            digest.update(variable.numpy().tobytes())
        return digest.hexdigest()


class _Stopwatch(keras.callbacks.Callback):
    """Time from the start of one step to the end of the last, without the overhead of `fit`."""

    def __init__(self, together: Callable[[], None]) -> None:
        super().__init__()
        self._together = together

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == FIRST:
            self._together()
            self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended = time.perf_counter(), time.process_time()

    def ms(self, steps: int) -> tuple[float, float]:
        """Return the milliseconds and CPU milliseconds (of all threads) per step."""
        seconds, cpu_seconds = (b - a for a, b in zip(self.began, self.ended, strict=True))
        return 1000 * seconds / steps, 1000 * cpu_seconds / steps


def vgg() -> Any:
    """Return the network of `torch_models.vgg`, channels last."""
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for width, pool in ((32, True), (64, True), (128, False), (128, True)):
        layers.append(keras.layers.Conv2D(width, 3, padding="same", activation="relu"))
        layers += [keras.layers.MaxPooling2D()] if pool else []
    layers.append(keras.layers.Flatten())
    layers += [keras.layers.Dense(width, "relu") for width in (2048, 1024)]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


MODELS = {"vgg": vgg}


def _contestant(method: str) -> tuple[Any, list[Any]]:
    """Return (optimizer, callbacks) of a method."""
    plain = keras.optimizers.SGD(0.01, momentum=0.9)
    if method in ALONE:
        return plain, []
    if method == GROUPED:
        return _averaging()(0.01, momentum=0.9), []
    if method.startswith(OURS):
        import accordion_hvd.tensorflow.keras as ours

        compression = contestants.compression(method)
        optimizer = ours.DistributedOptimizer(plain, compression=compression, guard="off")
        return optimizer, [ours.callbacks.BroadcastGlobalVariablesCallback(0)]
    import horovod.tensorflow.keras as hvd

    return hvd.DistributedOptimizer(plain), []


def _averaging() -> Any:
    """Return an optimizer with the least code that averages under Keras 3.

    It calls Horovod's grouped allreduce in the graph.
    """
    import horovod.tensorflow as hvd

    class Averaging(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply(hvd.grouped_allreduce(list(grads)), trainable_variables)

    return Averaging
