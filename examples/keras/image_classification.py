"""Classify images in Keras, with gradients compressed by Accordion in `model.fit`.

Accordion serves each layer with PowerSGD of rank 4 in critical regimes, and of rank 1 elsewhere.
The images are scikit-learn's digits, which need no download.

    horovodrun --gloo -np 2 python examples/keras/image_classification.py

Rank 0 prints the test accuracy, and its bytes, with those of averaged gradients.
"""

from __future__ import annotations

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import Accordion, PowerSGD

EPOCHS, BATCH = 15, 32  # images per rank and step


def main() -> None:
    """Train and test."""
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())  # ranks shuffle differently; rank 0 sends its weights
    pixels, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        (pixels / 16).reshape(-1, 8, 8, 1), labels, test_size=360, random_state=0
    )
    mine = slice(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())
    model = keras.Sequential([
        keras.Input((8, 8, 1)), keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10),
    ])  # fmt: skip
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        compression=Accordion(low=PowerSGD(4), high=PowerSGD(1), interval=5),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # it also ends Accordion's windows
        hvd.callbacks.MetricAverageCallback(),
    ]
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(images[mine], labels[mine], BATCH, EPOCHS, verbose=verbose, callbacks=callbacks)
    accuracy = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)["accuracy"]
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
