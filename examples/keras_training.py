"""One training run in Keras."""

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
    """Train as `settings` say; collective. Returns what `result.json` holds."""
    hvd.init()
    _devices()
    keras.utils.set_random_seed(settings.seed)
    model = build(settings, data)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(settings.lr, momentum=settings.momentum),
        compression=settings.policy() or hvd.Compression.none,
        skip=settings.skip,
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
    return record.write(exchange_of(optimizer))


def _devices() -> None:
    """One GPU a rank if there are any; as many threads as there are cores for each."""
    cards = tf.config.list_physical_devices("GPU")
    threads = max(1, (os.cpu_count() or 1) // hvd.local_size())
    try:
        if cards:
            tf.config.set_visible_devices(cards[hvd.local_rank() % len(cards)], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        pass  # TensorFlow is running already: a second run in this process


def exchange_of(optimizer: Any) -> Any:
    """What counts bytes; None for a process on its own."""
    return optimizer.exchange if hvd.size() > 1 else None


class Batches(keras.utils.PyDataset):
    """A rank's batches as `fit` takes them, shuffled anew for each epoch."""

    def __init__(self, shard: Shard, epoch: int) -> None:
        super().__init__()
        self.shard, self.epoch = shard, epoch
        shard.shuffle(epoch)

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.shard[index]

    def on_epoch_end(self) -> None:
        """Deal out anew."""
        self.epoch += 1
        self.shard.shuffle(self.epoch)


class Epochs(keras.callbacks.Callback):
    """After each epoch: test, note, keep a checkpoint, show how far the run is."""

    def __init__(self, settings: Settings, shard: Shard, record: Record) -> None:
        super().__init__()
        self.settings, self.shard, self.record = settings, shard, record
        show = settings.progress and hvd.rank() == 0
        done, total = len(record.rows), settings.epochs
        self.bar = tqdm(total=total, initial=done, unit="epoch", disable=not show)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See the class; collective."""
        loss, accuracy = float((logs or {})["loss"]), self._accuracy()
        exchange = exchange_of(self.model.optimizer)
        self.record.epoch(self.settings.lr_at(epoch), loss, accuracy, exchange)
        if self.settings.checkpoint:
            _save(self.record.folder, self.model)
        self.bar.update()
        self.bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")

    def on_train_end(self, logs: Any = None) -> None:
        """Close the bar."""
        self.bar.close()

    def _accuracy(self) -> float:
        """On all test images, each rank testing its part."""
        counts = np.zeros(2)
        for images, labels in self.shard.test_batches():
            guess = np.argmax(self.model.predict_on_batch(images), axis=1)
            counts += [np.sum(guess == labels), len(labels)]
        right, tested = np.asarray(hvd.allreduce(counts, op=hvd.Sum, name="test"))
        return float(right / tested)


# -------------------------------------------------------------------------------------- the models
def build(settings: Settings, data: Dataset) -> keras.Model:
    """The network that `settings.model` names, as in PyTorch but for channels last."""
    decay = keras.regularizers.L2(settings.weight_decay / 2)  # adds weight_decay * w to gradients
    words = {"kernel_initializer": "he_normal", "kernel_regularizer": decay}
    layers: list[Any] = [keras.Input(data.shape)]
    if settings.model == "mlp":
        layers.append(keras.layers.Flatten())
        for _ in range(settings.depth):
            layers.append(keras.layers.Dense(settings.width, activation="relu", **words))
    else:
        layers += _convolutions(settings, words)
    layers.append(keras.layers.Dense(data.classes, **words))
    for number, layer in enumerate(layers[1:], 1):
        layer.name = f"layer_{number}"  # the same in every run: checkpoints go by names
    return keras.Sequential(layers, name="network")


def _convolutions(settings: Settings, words: dict[str, Any]) -> list[Any]:
    """Pairs of 3 x 3 convolutions; each pair halves the picture and doubles the channels."""
    layers: list[Any] = []
    for pair in range(settings.depth):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(settings.width * 2**pair, 3, padding="same", **words),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers.append(keras.layers.MaxPooling2D(2, padding="same"))
    return [*layers, keras.layers.AdaptiveAveragePooling2D(2), keras.layers.Flatten()]


# -------------------------------------------------------------------------------------- checkpoints
def _save(folder: Path, model: keras.Model) -> None:
    """Weights and momentum from rank 0; errors and levels from every rank."""
    place = folder / "checkpoint"
    if hvd.rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
        part = place / "model.part.npz"
        np.savez(part, *[np.asarray(variable) for variable in _variables(model)])
        part.replace(place / "model.npz")
    if hvd.size() > 1:
        hvd.save_state(place, only=[model.optimizer])


def _resume(settings: Settings, model: keras.Model) -> Row | None:
    """Go back to the last checkpoint; None if there is none yet."""
    folder = Path(settings.output) / settings.name
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
