"""MNIST: 28 x 28 grey digits, in IDX files (LeCun et al.)."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from examples.data import files
from examples.data.base import Array, DataError, Dataset, Split

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
NAMES = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
"""The official files (without .gz) and the MD5 sums of their .gz."""

PART = 0.8
"""Fraction of the test file that is used for training if the training file is missing."""


def load_mnist() -> Dataset:
    """Load the official split.

    If only the 10,000 test images are available, the first 8,000 of them are for training.

    Raises:
        DataError: if files are missing or damaged.
    """
    paths = _local() or [files.fetched(f"{SOURCE}{n}.gz", md5, "MNIST") for n, md5 in NAMES.items()]
    splits = [Split(read_idx(i), _labels(j)) for i, j in zip(paths[::2], paths[1::2], strict=True)]
    for split, path in zip(splits, paths[::2], strict=True):
        if len(split.images) != len(split.labels):
            raise DataError(
                f"data: {path} has {len(split.images)} images, but {len(split.labels)} labels; "
                "the files do not belong together."
            )
    if len(splits) == 1:
        images, labels = splits[0].images, splits[0].labels
        cut = int(PART * len(labels))
        splits = [Split(images[:cut], labels[:cut]), Split(images[cut:], labels[cut:])]
    train, test = splits
    return Dataset("mnist", train, test, classes=10, mean=(33.3,), std=(78.6,))


def _local() -> list[Path]:
    """Return the files for training, if they exist, and testing, or an empty list."""
    for folder in files.folders("mnist", "MNIST", "mnist10k", "MNIST/raw"):
        found = [_either(folder / name) for name in NAMES]
        if all(found):
            return [path for path in found if path]
        if all(found[2:]):
            return [path for path in found[2:] if path]
    return []


def _either(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".gz")
    return next((p for p in (packed, path) if p.is_file()), None)


def _labels(path: Path) -> Array:
    return read_idx(path).reshape(-1).astype(np.int64)


def read_idx(path: Path) -> Array:
    """Read an IDX file, packed or not: (count, ...) for labels, (count, h, w, 1) for images.

    Raises:
        DataError: if the file is incomplete or is not an IDX file of bytes.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        zero, kind, dimensions = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
        if (zero, kind) != (0, 8):
            raise ValueError("wrong header")
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(
            f"data: {path} is not a complete IDX file ({error}); get it again."
        ) from None
    return values[..., np.newaxis] if dimensions == 3 else values
