"""Image sets, and their shards on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from accordion_hvd import check

Array = np.ndarray


class DataError(RuntimeError):
    """Raised if a data set cannot be found or read."""


@dataclass(frozen=True)
class Split:
    """Stored images (count, height, width, channels) and labels (count,)."""

    images: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, count: int, seed: int) -> Split:
        """Return at most `count` images, drawn with `seed`."""
        index = np.random.default_rng(seed).permutation(len(self))[:count]
        return Split(self.images[index], self.labels[index])


@dataclass(frozen=True)
class Dataset:
    """An image set.

    Attributes:
        name: name for `load`.
        train: images for training.
        test: images for testing.
        classes: number of classes.
        mean: mean of the stored values, per channel.
        std: standard deviation of the stored values, per channel.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        height, width, channels = self.train.images.shape[1:]
        return height, width, channels

    def limited(self, count: int, seed: int) -> Dataset:
        """Return the data set with at most `count` images in each split."""
        check.integer("load", "limit", count, least=1)
        train, test = self.train.chosen(count, seed), self.test.chosen(count, seed)
        return replace(self, train=train, test=test)

    def tested_shifted(self, most: int) -> Dataset:
        """Return the data set with a copy of each test image for each shift of up to `most` pixels.

        A copy differs from the image by a shift in both directions; `most` = 1 gives nine copies.
        """
        test, width = self.test, 2 * most + 1
        corners = [(y, x) for y in range(width) for x in range(width)]
        copies = [shifted(test.images, [corner] * len(test), most) for corner in corners]
        labels = np.tile(test.labels, len(corners))
        return replace(self, test=Split(np.concatenate(copies), labels))

    def prepared(self, images: Array, layout: str) -> Array:
        """Return stored images as fp32 with mean 0 and standard deviation 1.

        Args:
            images: (count, height, width, channels).
            layout: "NHWC" (TensorFlow) or "NCHW" (PyTorch).
        """
        check.one_of("Dataset", "layout", layout, ("NHWC", "NCHW"))
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        scaled = (images.astype(np.float32) - mean) / std
        return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)) if layout == "NCHW" else scaled


class Shard:
    """Batches of one rank from a training set.

    Each epoch shuffles the entire set (by `seed` and the epoch, equally on all ranks) and
    distributes it: ranks get disjoint parts of equal size, hence the same number of steps, and
    batches of the same size at each step. Each epoch leaves out fewer than `size` images, and
    different ones each time.

    Args:
        data: image set.
        rank: index of the part.
        size: number of parts.
        batch_size: images per step and rank; the last batch of an epoch may be smaller.
        seed: seed of the order.
        layout: "NHWC" or "NCHW".
        shift: maximum shift of each image in pixels, in each direction, drawn again in each epoch.
    """

    def __init__(
        self,
        data: Dataset,
        rank: int,
        size: int,
        batch_size: int,
        seed: int,
        layout: str,
        shift: int = 0,
    ) -> None:
        check.integer(self, "batch_size", batch_size, least=1)
        if len(data.train) < size:
            raise DataError(
                f"data: {data.name} has {len(data.train)} images for training, but {size} ranks "
                "need at least one each; use fewer ranks or a larger limit."
            )
        self.data, self.rank, self.size, self.layout = data, rank, size, layout
        self.batch_size, self.seed, self.shift = batch_size, seed, shift
        self.share = len(data.train) // size
        self.shuffle(0)

    def __len__(self) -> int:
        return -(-self.share // self.batch_size)

    def shuffle(self, epoch: int) -> None:
        """Select this rank's part for `epoch`."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data.train))
        self.mine = order[self.rank * self.share : (self.rank + 1) * self.share]
        moves = np.random.default_rng([self.seed, epoch, self.rank])
        self.moves = moves.integers(0, 2 * self.shift + 1, (self.share, 2))

    def __getitem__(self, step: int) -> tuple[Array, Array]:
        """Return the images of a step, prepared for the network, and their labels (int64)."""
        if not 0 <= step < len(self):
            raise IndexError(step)
        part = slice(step * self.batch_size, (step + 1) * self.batch_size)
        train, index = self.data.train, self.mine[part]
        images = train.images[index]
        if self.shift:
            images = shifted(images, self.moves[part], self.shift)
        return self.data.prepared(images, self.layout), train.labels[index]

    def test_batches(self, most: int = 500) -> list[tuple[Array, Array]]:
        """Return this rank's part of the test set in batches; parts may differ in size."""
        test, batches = self.data.test, []
        mine = np.arange(self.rank, len(test), self.size)
        for start in range(0, len(mine), most):
            index = mine[start : start + most]
            images = self.data.prepared(test.images[index], self.layout)
            batches.append((images, test.labels[index]))
        return batches


def shifted(images: Array, corners: Sequence[tuple[int, int]] | Array, most: int) -> Array:
    """Return each image shifted by `most - corner` pixels, with zeros at the edges."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    views = [
        picture[y : y + height, x : x + width]
        for picture, (y, x) in zip(padded, corners, strict=True)
    ]
    return np.stack(views)
