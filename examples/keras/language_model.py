"""Train a small Transformer of Keras layers on the bytes of a text, with PowerSGD.

    horovodrun --gloo -np 2 python examples/keras/language_model.py

The path of a text file may follow. Without one, the text is Tiny Shakespeare: the copy in the
folder ACCORDION_DATA, or a download. Rank 0 prints the loss on the last tenth of the text, in nats
per byte (an untrained model has 5.5), and its bytes, with those of averaged gradients.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import keras
import numpy as np
import pooch
from keras import layers, ops

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import PowerSGD

STEPS, BATCH, CONTEXT, WIDTH = 300, 32, 32, 64
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HASH = "md5:6fb458f1232090904fb40fe944165e91"


def text(path: str = "") -> np.ndarray:
    """Return the bytes of a file, by default Tiny Shakespeare."""
    folder = Path(os.environ.get("ACCORDION_DATA", pooch.os_cache("accordion-hvd")))
    path = path or pooch.retrieve(URL, HASH, "input.txt", folder / "tinyshakespeare")
    return np.fromfile(path, np.uint8).astype("int32")


def transformer() -> keras.Model:
    """Return a decoder of two layers, which predicts the next byte."""
    inputs = keras.Input((CONTEXT,), dtype="int32")
    x = layers.Embedding(256, WIDTH)(inputs)
    x = x + layers.Embedding(CONTEXT, WIDTH)(ops.arange(CONTEXT))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, "relu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(y)
    return keras.Model(inputs, layers.Dense(256)(layers.LayerNormalization()(x)))


def main() -> None:
    """Train and test."""
    hvd.init()
    keras.utils.set_random_seed(0)
    model, data = transformer(), text(*sys.argv[1:2])
    train, test = np.split(data, [len(data) * 9 // 10])
    parts = np.lib.stride_tricks.sliding_window_view(train, CONTEXT + 1)
    parts = parts[np.random.default_rng(hvd.rank()).integers(len(parts), size=STEPS * BATCH)]
    adam = keras.optimizers.Adam(5e-3)
    optimizer = hvd.DistributedOptimizer(adam, compression=PowerSGD(8))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(parts[:, :-1], parts[:, 1:], BATCH, verbose=0, callbacks=callbacks)
    parts = np.lib.stride_tricks.sliding_window_view(test, CONTEXT + 1)[:: 4 * CONTEXT]
    loss = model.evaluate(parts[:, :-1], parts[:, 1:], verbose=0)
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test loss {loss:.3f}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
