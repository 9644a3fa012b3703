"""Tests of data sets: layouts, damage, caches, downloads, and the images of each rank."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest

from examples import data
from examples.data import cifar10, files, text
from examples.data.base import DataError, Dataset, Shard, Split

Array = np.ndarray


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty data folder; the cache is the test's own, and there is no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("ACCORDION_DATA", str(tmp_path / "data"))

    def offline(*_: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", offline)
    return tmp_path / "data"


# --------------------------------------------------------------------------------- sets in general
def test_digits() -> None:
    pytest.importorskip("sklearn")
    found = data.load("digits")
    assert (len(found.train), len(found.test), found.shape) == (1437, 360, (8, 8, 1))
    assert set(found.train.labels) == set(found.test.labels) == set(range(10))
    ready = found.prepared(found.train.images, "NCHW")
    assert ready.shape == (1437, 1, 8, 8) and ready.dtype == np.float32
    assert abs(ready.mean()) < 0.05 and abs(ready.std() - 1) < 0.05


def test_limit() -> None:
    pytest.importorskip("sklearn")
    few, again, other = (data.load("digits", 100, seed) for seed in (1, 1, 2))
    assert len(few.train) == len(few.test) == 100
    assert (few.train.labels == again.train.labels).all()
    assert (few.train.labels != other.train.labels).any()
    with pytest.raises(ValueError, match="limit is 0, but must be an integer of at least 1"):
        data.load("digits", 0)


def test_unknown() -> None:
    with pytest.raises(ValueError, match="data is 'imagenet', but must be one of 'digits'"):
        data.load("imagenet")


def test_layouts_hold_the_same() -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    found = made(images, np.zeros(2, np.int64), mean=(1, 2, 3), std=(4, 5, 6))
    last, first = found.prepared(images, "NHWC"), found.prepared(images, "NCHW")
    np.testing.assert_array_equal(first.transpose(0, 2, 3, 1), last)
    np.testing.assert_allclose(last[1, 2, 3, 1], (float(images[1, 2, 3, 1]) - 2) / 5, rtol=1e-6)


def made(images: Array, labels: Array, **more: Any) -> Dataset:
    split = Split(images, labels)
    return Dataset("made", split, split, classes=10, **({"mean": (0,), "std": (1,)} | more))


# -------------------------------------------------------------------------------------------- MNIST
def idx(values: Array) -> bytes:
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, name: str, count: int, packed: bool = True) -> tuple[Array, Array]:
    draw = np.random.default_rng(count)
    images, labels = draw.integers(0, 256, (count, 28, 28)), draw.integers(0, 10, count)
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        path, content = folder / f"{name}-{kind}-ubyte", idx(values)
        if packed:
            path, content = path.with_name(path.name + ".gz"), gzip.compress(content)
        path.write_bytes(content)
    return images, labels


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_official(home: Path, packed: bool) -> None:
    folder = home / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images, _ = write_mnist(folder, "train", 30, packed)
    _, labels = write_mnist(folder, "t10k", 20, packed)
    found = data.load("mnist")
    np.testing.assert_array_equal(found.train.images[..., 0], images)
    np.testing.assert_array_equal(found.test.labels, labels)


def test_mnist_test_file_alone_is_split(home: Path) -> None:
    images, labels = write_mnist(home, "t10k", 20)
    found = data.load("mnist")
    assert (len(found.train), len(found.test)) == (16, 4)
    np.testing.assert_array_equal(found.test.images[..., 0], images[16:])
    np.testing.assert_array_equal(found.train.labels, labels[:16])


@pytest.mark.parametrize("damage", ["cut", "no gzip", "no idx", "mismatch"])
def test_mnist_damaged(home: Path, damage: str) -> None:
    write_mnist(home, "t10k", 20)
    path = home / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    bad = {
        "cut": whole[:-100],
        "no gzip": b"<html>not found</html>",
        "no idx": gzip.compress(b"\1\2\3\4\5\6"),
        "mismatch": gzip.compress(idx(np.zeros((19, 28, 28)))),
    }
    path.write_bytes(bad[damage])
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte") as refusal:
        data.load("mnist")
    assert str(refusal.value).count("\n") == 0


# --------------------------------------------------------------------------------------- CIFAR-10
def batch(seed: int, count: int = 4) -> tuple[Array, Array]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (count, 3072)).astype(np.uint8), draw.integers(0, 10, count)


def binary(seed: int) -> bytes:
    rows, labels = batch(seed)
    return np.hstack([labels.astype(np.uint8)[:, None], rows]).tobytes()


def pickled(seed: int) -> bytes:
    rows, labels = batch(seed)
    return pickle.dumps({b"data": rows, b"labels": labels.tolist()}, protocol=2)


def official(home: Path, make: Any, folder: str, ending: str, archive: str | None) -> None:
    names = [f"data_batch_{i}{ending}" for i in range(1, 6)] + [f"test_batch{ending}"]
    contents = {f"{folder}/{name}": make(seed) for seed, name in enumerate(names)}
    contents[f"{folder}/batches.meta.txt"] = b"airplane\n"
    if archive is None:
        (home / folder).mkdir()
        for name, content in contents.items():
            (home / name).write_bytes(content)
        return
    with tarfile.open(home / archive, "w:gz") as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("make", "folder", "ending", "archive"),
    [
        (binary, "cifar-10-batches-bin", ".bin", None),
        (binary, "cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz"),
        (pickled, "cifar-10-batches-py", "", None),
        (pickled, "cifar-10-batches-py", "", "cifar-10-python.tar.gz"),
    ],
)
def test_cifar_official(home: Path, make: Any, folder: str, ending: str, archive: Any) -> None:
    official(home, make, folder, ending, archive)
    found = data.load("cifar10")
    assert (len(found.train), len(found.test), found.shape) == (20, 4, (32, 32, 3))
    rows, labels = batch(2)
    np.testing.assert_array_equal(found.train.labels[8:12], labels)
    np.testing.assert_array_equal(
        found.train.images[8].transpose(2, 0, 1).reshape(-1), rows[0], strict=True
    )
    np.testing.assert_array_equal(found.test.labels, batch(5)[1])


def pictures(folder: Path, count: int) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(10):
        place = folder / f"class{number}"
        place.mkdir(parents=True)
        for i in range(count):
            image.new("RGB", (32, 32), (number * 20, i, 0)).save(place / f"{i:04}.png")


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_pictures(home: Path, tmp_path: Path, packed: bool) -> None:
    place = home / "cifar10"
    place.mkdir()
    for split, count in (("train", 2), ("test", 1)):
        pictures((tmp_path if packed else place) / split, count)
        if packed:
            with tarfile.open(place / f"{split}.tar.xz", "w:xz") as file:
                file.add(tmp_path / split, split)
    found = data.load("cifar10")
    assert (len(found.train), len(found.test)) == (20, 10)
    for image, label in zip(found.train.images, found.train.labels, strict=True):
        assert (image[..., 0] == 20 * label).all()


def test_cifar_is_decoded_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official(home, binary, "cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz")
    first = data.load("cifar10")
    monkeypatch.setattr(cifar10, "_batches", None)
    again = data.load("cifar10")
    np.testing.assert_array_equal(first.train.images, again.train.images)
    monkeypatch.undo()


def test_half_a_cache_is_decoded_anew(home: Path) -> None:
    official(home, binary, "cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz")
    data.load("cifar10")
    (kept,) = files.cache_folder().glob("cifar10-*/train-images.npy")
    kept.write_bytes(kept.read_bytes()[:200])
    assert len(data.load("cifar10").train) == 20


def test_ranks_decode_together_and_once(home: Path, tmp_path: Path) -> None:
    official(home, binary, "cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz")
    program = (
        "from examples.data import cifar10, load\n"
        "plain = cifar10._batches\n"
        "def slow(source):\n"
        "    import time; print('decoding', flush=True); time.sleep(0.5); return plain(source)\n"
        "cifar10._batches = slow\n"
        "print(len(load('cifar10').train))"
    )
    root = str(Path(__file__).resolve().parents[2])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[0].split() for process in started]
    assert sorted(map(len, said)) == [1, 1, 2] and all(words[-1] == "20" for words in said)
    assert not list(files.cache_folder().glob("*.part*"))


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pickle.dumps(Harmful()), "system"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [11]}), "0 to 9"),
        (pickle.dumps([1]), "no data and labels"),
        (b"nonsense", "cannot be read"),
    ],
)
def test_cifar_damaged(home: Path, content: bytes, told: str) -> None:
    official(home, lambda seed: content, "cifar-10-batches-py", "", None)
    with pytest.raises(DataError, match="cannot be read") as refusal:
        data.load("cifar10")
    assert told in str(refusal.value) and "cifar-10-batches-py" in str(refusal.value)


@pytest.mark.parametrize("size", [10, 1000])
def test_cifar_archive_cut_short(home: Path, size: int) -> None:
    official(home, binary, "cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz")
    path = home / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz cannot be read"):
        data.load("cifar10")


# --------------------------------------------------------------------- missing data and downloads
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_and_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="set ACCORDION_DATA to a folder") as refusal:
        data.load(name)
    assert "no network in tests" in str(refusal.value)
    monkeypatch.delenv("ACCORDION_DATA")
    with pytest.raises(DataError, match="could not be fetched"):
        data.load(name)


def test_folder_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCORDION_DATA", "/nonexistent")
    with pytest.raises(DataError, match="ACCORDION_DATA is '/nonexistent', but must be a folder"):
        data.load("mnist")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Server of a folder that records the paths of its answers, and prints nothing."""

    answers: list[str]

    def log_request(self, *_: Any) -> None:
        """Record the path, and print nothing."""
        self.answers.append(self.path)

    def log_error(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """Yield a folder and the address at which it is served; downloads work as outside of tests."""
    monkeypatch.undo()
    monkeypatch.delenv("ACCORDION_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "served").mkdir()
    monkeypatch.setattr(Quiet, "answers", [], raising=False)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


HELLO = "5d41402abc4b2a76b9719d911017c592"


def test_a_download_is_checked(served: tuple[Path, str]) -> None:
    folder, address = served
    (folder / "file.bin").write_bytes(b"hello")
    url, bad = f"{address}/file.bin", "0" * 32
    with pytest.raises(DataError, match=f"expected md5:{bad} but got {HELLO}") as refusal:
        files.fetched(url, bad, "It")
    assert url in str(refusal.value) and "set ACCORDION_DATA to a folder" in str(refusal.value)
    assert {path.suffix for path in files.cache_folder().iterdir()} <= {".lock"}
    kept = files.fetched(url, HELLO, "It")
    kept.write_bytes(b"hel")  # damaged since: it is fetched again
    assert files.fetched(url, HELLO, "It") == kept and kept.read_bytes() == b"hello"
    (folder / "file.bin").unlink()
    assert files.fetched(url, HELLO, "It") == kept and len(Quiet.answers) == 3
    assert kept == files.cache_folder() / "file.bin"


def test_a_file_without_a_sum_is_fetched_once(served: tuple[Path, str]) -> None:
    folder, address = served
    with pytest.raises(DataError, match=r"It could not be fetched from .* \(404 ") as refusal:
        files.fetched(f"{address}/file.bin", None, "It")
    assert str(refusal.value).endswith("with a copy, or use --data digits, which needs none.")
    (folder / "file.bin").write_bytes(b"hello")
    for _ in range(2):
        assert files.fetched(f"{address}/file.bin", None, "It").read_bytes() == b"hello"
    assert len(Quiet.answers) == 2


def test_a_host_that_does_not_answer(served: tuple[Path, str]) -> None:
    with pytest.raises(DataError, match=r"could not be fetched from .* \(.*refused\); set "):
        files.fetched("http://127.0.0.1:9/file.bin", HELLO, "It")


def test_ranks_download_together_and_once(served: tuple[Path, str]) -> None:
    folder, address = served
    (folder / "file.bin").write_bytes(b"hello")
    found: list[bytes] = []
    ranks = [
        threading.Thread(
            target=lambda: found.append(
                files.fetched(f"{address}/file.bin", HELLO, "It").read_bytes()
            )
        )
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    assert found == [b"hello"] * 4 and len(Quiet.answers) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="the cache .* cannot be written .*; set XDG_CACHE_HOME"):
        data.load("mnist")


# ------------------------------------------------------------------------------------------- shards
@pytest.mark.parametrize(
    ("count", "size", "size_of_batch"), [(103, 4, 8), (12, 3, 4), (7, 7, 5), (64, 1, 10)]
)
def test_shards_are_disjoint_equal_and_cover(count: int, size: int, size_of_batch: int) -> None:
    images = np.arange(count, dtype=np.uint16).reshape(count, 1, 1, 1)
    found = made(images, np.arange(count))
    shards = [Shard(found, rank, size, size_of_batch, 3, "NHWC") for rank in range(size)]
    seen: set[int] = set()
    for epoch in range(20):
        for shard in shards:
            shard.shuffle(epoch)
        assert len({len(shard) for shard in shards}) == 1
        parts = [[shard[i] for i in range(len(shard))] for shard in shards]
        for same in zip(*parts, strict=True):
            assert len({len(labels) for _, labels in same}) == 1
        dealt = [int(label) for part in parts for _, labels in part for label in labels]
        assert len(set(dealt)) == len(dealt) == count // size * size
        for part in parts:
            for pictures_, labels in part:
                np.testing.assert_array_equal(pictures_.reshape(-1), labels)
        seen |= set(dealt)
    assert seen == set(range(count))


def test_epochs_differ_and_repeat() -> None:
    found = made(np.zeros((50, 1, 1, 1), np.uint8), np.arange(50))
    shard = Shard(found, 1, 2, 5, 3, "NHWC")
    orders = []
    for epoch in (0, 1, 0):
        shard.shuffle(epoch)
        orders.append(shard.mine.tolist())
    assert orders[0] == orders[2] != orders[1]
    with pytest.raises(IndexError):
        shard[len(shard)]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_all_test_images_are_tested_once(size: int) -> None:
    found = made(np.zeros((50, 1, 1, 1), np.uint8), np.arange(50))
    shards = [Shard(found, rank, size, 5, 3, "NHWC") for rank in range(size)]
    labels = [x for shard in shards for _, part in shard.test_batches(7) for x in part.tolist()]
    assert sorted(labels) == list(range(50))


def test_more_ranks_than_images() -> None:
    found = made(np.zeros((3, 1, 1, 1), np.uint8), np.arange(3))
    with pytest.raises(DataError, match="has 3 images for training, but 4 ranks"):
        Shard(found, 0, 4, 5, 3, "NHWC")


def test_shift_moves_pictures() -> None:
    images = np.zeros((200, 5, 5, 1), np.uint8)
    images[:, 2, 2] = 1
    shard = Shard(made(images, np.zeros(200, np.int64)), 0, 1, 200, 3, "NHWC", shift=1)
    moved, _ = shard[0]
    assert moved.shape == images.shape and (moved.sum((1, 2, 3)) == 1).all()
    places = {tuple(np.argwhere(picture[..., 0])[0]) for picture in moved}
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}


# ------------------------------------------------------------------------------- Tiny Shakespeare
def test_text(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"to be, or not to be: " * 10
    (home / "tinyshakespeare").mkdir()
    (home / "tinyshakespeare" / "input.txt").write_bytes(content)
    with pytest.raises(DataError, match="is not Tiny Shakespeare"):
        text.load_tinyshakespeare()
    monkeypatch.setattr(text, "MD5", hashlib.md5(content, usedforsecurity=False).hexdigest())
    found = text.load_tinyshakespeare()
    assert (len(found.train), len(found.test)) == (189, 21) and found.alphabet == " ,:benort"
    codes = np.concatenate([found.train, found.test])
    assert "".join(found.alphabet[code] for code in codes) == content.decode()


def test_text_that_is_nowhere() -> None:
    with pytest.raises(DataError, match=r"Tiny Shakespeare is not in .* with a copy\.$"):
        text.load_tinyshakespeare()


def test_each_test_image_is_tested_once_for_each_shift() -> None:
    images = np.random.default_rng(0).integers(1, 200, (5, 4, 4, 1), dtype=np.uint8)
    found = made(images, np.arange(5)).tested_shifted(1).test
    assert found.images.shape == (45, 4, 4, 1) and found.labels.tolist() == [*range(5)] * 9
    copies = found.images.reshape(9, 5, 4, 4, 1)
    assert [i for i in range(9) if np.array_equal(copies[i], images)] == [4]
    assert np.array_equal(copies[0][:, 1:, 1:], images[:, :-1, :-1])
    assert len({copy.tobytes() for copy in copies}) == 9
