"""A Keras training in which rank 1 stops after three steps; run by tests/test_timeouts.py."""

import os
import signal

import harness  # noqa: F401  (tells launch.py of this process)
import keras
import numpy as np

import accordion_hvd.tensorflow.keras as hvd


class Stop(keras.callbacks.Callback):
    """A callback that stops rank 1 after its third step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Stop the process of rank 1 after the third batch."""
        if batch == 2 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


hvd.init()
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:0.1")
model.compile(optimizer, "mse")
x = np.ones((80, 40), np.float32)
first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(x, x[:, :10], batch_size=8, callbacks=[first, Stop()], verbose=0)
