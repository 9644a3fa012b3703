"""Keras over Horovod on GPUs: replicas agree, and training works."""

from __future__ import annotations

import sys


def train() -> None:
    """Train as one of the ranks that `horovodrun` has started; print what happened on rank 0.

    Raises:
        SystemExit: with status 1 if replicas differ or the loss does not fall.
    """
    try:
        import keras
        import numpy as np
        import tensorflow as tf

        import accordion_hvd.tensorflow.keras as hvd
    except ImportError as error:
        print(f"gpu_check: {error}; nothing was checked with Keras.", file=sys.stderr)
        raise SystemExit(1) from None
    from accordion_hvd import Accordion, PowerSGD, TopK

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    draw = np.random.default_rng(hvd.rank())
    x = draw.standard_normal((2048, 64)).astype("f")
    y = (x @ np.random.default_rng(9).standard_normal((64, 10))).argmax(1)
    failed = False
    for compression in (PowerSGD(4), TopK(0.1), Accordion(PowerSGD(4), TopK(0.1), interval=1)):
        keras.utils.set_random_seed(0)
        net = keras.Sequential([
            keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)
        ])  # fmt: skip
        net.build((None, 64))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, 0.9), compression=compression
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer, loss)
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        losses = net.fit(x, y, 64, 5, verbose=0, callbacks=[begin]).history["loss"]
        sums = tf.constant([[float(np.sum(w, dtype="d")) for w in net.get_weights()]])
        rows = hvd.allgather(sums).numpy()
        good = (rows == rows[0]).all() and losses[-1] < 0.6 * losses[0]
        failed |= not good
        if hvd.rank() == 0:
            found = f"{losses[0]:.2f} to {losses[-1]:.2f}"
            print(f"{'ok    ' if good else 'FAILED'} loss {found}  {compression!r}", flush=True)
    if hvd.rank() == 0:
        print(f"{len(gpus)} GPUs were visible to TensorFlow", flush=True)
    raise SystemExit(1 if failed else 0)
