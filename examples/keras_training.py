"""A training run in Keras."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import accordion_hvd.tensorflow.keras as hvd
from examples.config import Settings
from examples.data import Dataset, Shard
from examples.results import Record, Row, read_json


def train(settings: Settings, data: Dataset) -> Row:
    """Train according to `settings`; collective. Return the content of `result.json`."""
    hvd.init()
    _devices()
    keras.utils.set_random_seed(settings.seed)
    model = build(settings, data)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(settings.lr, momentum=settings.momentum),
        compression=settings.policy() or hvd.Compression.none,
        skip=settings.skip,
        ledger=settings.folder,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, jit_compile=False)
    optimizer.build(model.trainable_variables)
    earlier = _resume(settings, model) if settings.resume else None
    part = (hvd.rank(), hvd.size(), settings.batch_size, settings.seed, "NHWC", settings.shift)
    shard = Shard(data, *part)
    record = Record(settings, "keras", hvd.rank(), hvd.size(), earlier)
    epochs = Epochs(settings, shard, record)
    model.fit(
        Batches(shard, len(record.rows)),
        initial_epoch=len(record.rows),
        epochs=settings.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LearningRateScheduler(settings.lr_at),
            epochs,
        ],
    )
    return record.write(recorded(optimizer))


def _devices() -> None:
    """Select this rank's GPU, if there are GPUs, and share the cores among the local ranks."""
    cards = tf.config.list_physical_devices("GPU")
    threads = max(1, (os.cpu_count() or 1) // hvd.local_size())
    try:
        if cards:
            tf.config.set_visible_devices(cards[hvd.local_rank() % len(cards)], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        pass  # TensorFlow is already running: this is a second run in this process


def recorded(optimizer: Any) -> Any:
    """Return the optimizer, which counts bytes, or None if there is a single rank."""
    return optimizer if hvd.size() > 1 else None


class Batches(keras.utils.PyDataset):
    """Batches of a rank for `fit`, shuffled again for each epoch."""

    def __init__(self, shard: Shard, epoch: int) -> None:
        super().__init__()
        self.shard, self.epoch = shard, epoch
        shard.shuffle(epoch)

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.shard[index]

    def on_epoch_end(self) -> None:
        """Shuffle for the next epoch."""
        self.epoch += 1
        self.shard.shuffle(self.epoch)


class Epochs(keras.callbacks.Callback):
    """Callback that tests, records results and saves a checkpoint after each epoch."""

    def __init__(self, settings: Settings, shard: Shard, record: Record) -> None:
        super().__init__()
        self.settings, self.shard, self.record = settings, shard, record
        show = settings.progress and hvd.rank() == 0
        done, total = len(record.rows), settings.epochs
        self.bar = tqdm(total=total, initial=done, unit="epoch", disable=not show)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Test, record and save; collective."""
        loss, accuracy = float((logs or {})["loss"]), self._accuracy()
        optimizer = recorded(self.model.optimizer)
        self.record.epoch(self.settings.lr_at(epoch), loss, accuracy, optimizer)
        if self.settings.checkpoint:
            _save(self.record.folder, self.model)
        self.bar.update()
        self.bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")

    def on_train_end(self, logs: Any = None) -> None:
        """Close the progress bar."""
        self.bar.close()

    def _accuracy(self) -> float:
        """Return the accuracy on all test images. Each rank tests its part."""
        counts = np.zeros(2)
        for images, labels in self.shard.test_batches():
            predicted = np.argmax(self.model.predict_on_batch(images), axis=1)
            counts += [np.sum(predicted == labels), len(labels)]
        correct, tested = np.asarray(hvd.allreduce(counts, op=hvd.Sum, name="test"))
        return float(correct / tested)


# -------------------------------------------------------------------------------------- the models
def build(settings: Settings, data: Dataset) -> keras.Model:
    """Return the network that `settings.model` names: as in PyTorch, but with channels last."""
    decay = keras.regularizers.L2(settings.weight_decay / 2)  # adds weight_decay * w to gradients
    options = {"kernel_initializer": "he_normal", "kernel_regularizer": decay}
    layers: list[Any] = [keras.Input(data.shape)]
    if settings.model == "mlp":
        layers.append(keras.layers.Flatten())
        for _ in range(settings.depth):
            layers.append(keras.layers.Dense(settings.width, activation="relu", **options))
    else:
        layers += _convolutions(settings, options)
    layers.append(keras.layers.Dense(data.classes, **options))
    for number, layer in enumerate(layers[1:], 1):
        layer.name = f"layer_{number}"  # equal in every run, because checkpoints use the names
    return keras.Sequential(layers, name="network")


def _convolutions(settings: Settings, options: dict[str, Any]) -> list[Any]:
    """Return pairs of 3 x 3 convolutions. Each pair halves the image and doubles the channels."""
    layers: list[Any] = []
    for pair in range(settings.depth):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(settings.width * 2**pair, 3, padding="same", **options),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers.append(keras.layers.MaxPooling2D(2, padding="same"))
    return [*layers, keras.layers.AdaptiveAveragePooling2D(2), keras.layers.Flatten()]


# -------------------------------------------------------------------------------------- checkpoints
def _save(folder: Path, model: keras.Model) -> None:
    """Save weights and momentum from rank 0, and residuals and levels from every rank."""
    place = folder / "checkpoint"
    if hvd.rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
        part = place / "model.part.npz"
        np.savez(part, *[np.asarray(variable) for variable in _variables(model)])
        part.replace(place / "model.npz")
    if hvd.size() > 1:
        hvd.save_state(place, only=[model.optimizer])


def _resume(settings: Settings, model: keras.Model) -> Row | None:
    """Restore the last checkpoint and return its results, or None if there is no checkpoint."""
    folder = settings.folder
    place = folder / "checkpoint"
    if not (place / "model.npz").exists():
        return None
    with np.load(place / "model.npz", allow_pickle=False) as saved:
        for variable, value in zip(_variables(model), saved.values(), strict=True):
            variable.assign(value)
    if hvd.size() > 1:
        hvd.load_state(place, only=[model.optimizer])
    return read_json(folder / "result.json")


def _variables(model: keras.Model) -> list[Any]:
    return [*model.weights, *model.optimizer.variables]
