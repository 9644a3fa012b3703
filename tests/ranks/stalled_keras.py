"""A Keras training in which rank 1 stalls; run by tests/test_timeouts.py.

Argument: what rank 1 does after three steps, "stop" or "sleep"; "metric": rank 1 has fewer batches
and is alone in averaging its metrics.
"""

import os
import signal
import sys
import time

import harness
import keras
import numpy as np

import accordion_hvd.tensorflow.keras as hvd


class Stall(keras.callbacks.Callback):
    """A callback that stalls rank 1 after its third step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Tell when rank 1 stalls, and stall it."""
        if batch == 2 and hvd.rank() == 1:
            harness.tell(time=time.monotonic())
            if sys.argv[1] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if sys.argv[1] == "sleep":
                time.sleep(600)


hvd.init()
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:0.1")
model.compile(optimizer, "mse")
x = np.ones((24 if sys.argv[1] == "metric" and hvd.rank() == 1 else 80, 40), np.float32)
first, metrics = (
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
)
model.fit(x, x[:, :10], batch_size=8, callbacks=[first, metrics, Stall()], verbose=0)
