"""CIFAR-10: 32 x 32 colour images of 10 classes (Krizhevsky, 2009), in several layouts.

Official files: `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz`, packed or unpacked. Image
files: `train` and `test` with one folder per class, or archives of them, `train.tar.xz` and
`test.tar.xz`.
"""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import files
from examples.data.base import Array, DataError, Dataset, Split

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
PIXELS = 3 * 32 * 32
Files = Iterator[tuple[str, bytes]]


def load_cifar10() -> Dataset:
    """Load 50,000 images for training and 10,000 for testing.

    Raises:
        DataError: if there is no copy and no network, or if files are damaged.
    """
    sources, decode = _local() or _official(files.fetched(URL, MD5, "CIFAR-10"))
    try:
        train, test = files.cached("cifar10", sources, decode)
    except (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        names = " and ".join(str(path) for path in sources)
        raise DataError(f"data: {names} cannot be read ({error}); get a new copy.") from None
    mean, std = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
    return Dataset("cifar10", train, test, classes=10, mean=mean, std=std)


Found = tuple[list[Path], Callable[[], files.Splits]]


def _local() -> Found | None:
    """Return the first layout in the local folders, or None."""
    for folder in files.folders("cifar10", "cifar-10", "CIFAR10"):
        for name in ("cifar-10-batches-bin", "cifar-10-batches-py"):
            if (folder / name).is_dir():
                return _official(folder / name)
        for name in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
            if (folder / name).is_file():
                return _official(folder / name)
        for ending in (".tar.xz", ""):
            pair = [folder / f"{split}{ending}" for split in ("train", "test")]
            if all(path.exists() for path in pair):
                return pair, lambda pair=pair: (_pictures(pair[0]), _pictures(pair[1]))
    return None


def _official(source: Path) -> Found:
    return [source], lambda: _batches(source)


# ------------------------------------------------------------------------------ the official files
def _batches(source: Path) -> files.Splits:
    train: dict[str, Split] = {}
    test: list[Split] = []
    for path, content in _files(source):
        name = path.rpartition("/")[2]
        if name.removesuffix(".bin") == "test_batch":
            test.append(_batch(name, content))
        elif name.startswith("data_batch_"):
            train[name] = _batch(name, content)
    if not train or not test:
        raise ValueError("data_batch_1 to 5 or test_batch is missing")
    return _joined([train[name] for name in sorted(train)]), test[0]


def _joined(parts: list[Split]) -> Split:
    images = np.concatenate([part.images for part in parts])
    return Split(images, np.concatenate([part.labels for part in parts]))


def _batch(name: str, content: bytes) -> Split:
    if name.endswith(".bin"):
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
        return Split(_upright(rows[:, 1:]), _checked(name, rows[:, 0]))
    try:
        table = Safe(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # damaged pickles raise errors of any kind
        raise ValueError(f"{name} is not a batch of images: {error}") from None
    if not isinstance(table, dict) or not {b"data", b"labels"} <= set(table):
        raise ValueError(f"{name} has no data and labels")
    return Split(_upright(np.asarray(table[b"data"], np.uint8)), _checked(name, table[b"labels"]))


def _upright(rows: Array) -> Array:
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _checked(name: str, labels: Any) -> Array:
    found = np.asarray(labels).astype(np.int64)
    if found.size == 0 or found.min() < 0 or found.max() > 9:
        raise ValueError(f"{name} has labels outside 0 to 9")
    return found


class Safe(pickle.Unpickler):
    """Unpickler for plain values and NumPy arrays, which looks up and runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a name that arrays need.

        Raises:
            ValueError: if the name is any other.
        """
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.ndarray.__reduce__(np.zeros(0))[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: str(text).encode("latin1")
        raise ValueError(f"the pickle refers to {module}.{name}, which images do not need")


# ----------------------------------------------------------------------------- one folder per class
def _pictures(source: Path) -> Split:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "data: this copy of CIFAR-10 has image files, but Pillow, which reads them, is not "
            "installed; install it (pip install pillow)."
        ) from None
    images: list[Array] = []
    names: list[str] = []
    for path, content in _files(source):
        if not path.lower().endswith((".jpg", ".jpeg", ".png")):
            continue
        with Image.open(io.BytesIO(content)) as picture:
            images.append(np.asarray(picture.convert("RGB"), np.uint8))
        names.append(path.split("/")[-2])
    if not images:
        raise ValueError(f"{source.name} has no images")
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    if len(classes) != 10 or {image.shape for image in images} != {(32, 32, 3)}:
        raise ValueError(f"{source.name} must have 10 classes of 32 x 32 images")
    return Split(np.stack(images), np.array([classes[name] for name in names], np.int64))


def _files(source: Path) -> Files:
    """Yield paths and contents of a folder, sorted by name, or of an archive, in its order."""
    if source.is_dir():
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            yield path.relative_to(source.parent).as_posix(), path.read_bytes()
        return
    with tarfile.open(source) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()
