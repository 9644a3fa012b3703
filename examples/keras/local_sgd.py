"""Average models every ten steps instead of gradients in each step (local SGD), in Keras.

    horovodrun --gloo -np 2 python examples/keras/local_sgd.py

Each rank takes its own steps. The callback also averages the models before each validation and at
the end of each epoch. Rank 0 prints the test accuracy on scikit-learn's digits, and its bytes, with
those of an average of gradients in each step.
"""

from __future__ import annotations

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import LocalSGD

EPOCHS, BATCH, PERIOD = 20, 32, 10


def main() -> None:
    """Train and test."""
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())  # ranks shuffle differently; rank 0 sends its weights
    pixels, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        pixels / 16, labels, test_size=360, random_state=0
    )
    mine = slice(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())
    model = keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10),
    ])  # fmt: skip
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), compression=LocalSGD(PERIOD)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(images[mine], labels[mine], BATCH, EPOCHS, verbose=verbose, callbacks=callbacks)
    accuracy = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)["accuracy"]
    if hvd.rank() == 0:
        stats = optimizer.averaging.stats()
        dense = 2 * (1 - 1 / hvd.size()) * 4 * model.count_params() * stats["steps"] / 1e6
        print(
            f"test accuracy {accuracy:.1%}, {stats['sent'] / 1e6:.2f} MB sent instead of ", end=""
        )
        print(f"{dense:.2f} MB")


if __name__ == "__main__":
    main()
