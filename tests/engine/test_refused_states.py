"""Tests of states that are refused: one sentence on all ranks, and nothing has changed on any."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from trainings import (
    KINDS,
    METHODS,
    PRIVATE,
    Kind,
    averagers,
    go_on,
    held,
    new_world,
    on_all,
    owners,
    save_gradients,
    save_models,
    train,
)

from accordion_hvd import TopK
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine import checkpoint_files as files
from accordion_hvd.engine.checkpoint import load_state
from accordion_hvd.engine.exchange import Exchange

FEW = ("accordion_batches", "fixed", "two_level", "owed", "onebit_adam", "private")
EVERY = {**KINDS, "private": PRIVATE}
by_kind = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in FEW else [pytest.mark.nightly]) for x in EVERY]
)


class Wrong(NamedTuple):
    """A checkpoint that must be refused.

    Attributes:
        name: what is wrong.
        word: part of the message.
        spoil: function that changes the checkpoint's folder.
    """

    name: str
    word: str
    spoil: Callable[[Path], Any]


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that changes a manifest, whose checksum fits then."""

    def spoil(folder: Path) -> None:
        manifest = files.read_manifest(folder)
        change(manifest)
        files.write_manifest(folder, manifest)

    return spoil


def with_arrays(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the last rank's arrays; the checksums fit then."""

    def spoil(folder: Path) -> None:
        path = sorted(folder.glob("rank-*.npz"))[-1]
        arrays = dict(np.load(path))
        change(arrays)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        manifest = files.read_manifest(folder)
        manifest["files"][-1] = files.write_file(path, buffer.getvalue())
        files.write_manifest(folder, manifest)

    return spoil


def of_manifest(about: dict[str, Any]) -> Iterator[Wrong]:
    """Yield a wrong checkpoint for each key of the first exchange, its policy, its last bucket."""
    places = {"exchange": lambda row: row, "policy": lambda row: row.get("policy", {}),
              "bucket": lambda row: row.get("buckets", [{}])[-1]}  # fmt: skip
    for place, find in places.items():
        for key in find(about):

            def drop(manifest: dict[str, Any], find: Any = find, key: str = key) -> None:
                del find(manifest["exchanges"][0])[key]

            def change(manifest: dict[str, Any], find: Any = find, key: str = key) -> None:
                row = find(manifest["exchanges"][0])
                row[key] = 1.5 if isinstance(row[key], str | list | dict) else "x"

            yield Wrong(f"{place} without {key}", "", rewritten(drop))
            if key not in ("history", "seed", "large", "apart", "state"):
                yield Wrong(f"{place}, {key} of another kind", "", rewritten(change))


def of_arrays(arrays: dict[str, np.ndarray]) -> Iterator[Wrong]:
    """Yield wrong checkpoints for each array of the last rank."""
    for key, x in arrays.items():
        longer = np.concatenate([np.ravel(x), np.zeros(3, x.dtype)])
        other = x.astype("float16" if x.dtype == np.float32 else "float32")
        yield Wrong(f"{key}, longer", "", with_arrays(lambda a, k=key, y=longer: a.update({k: y})))
        yield Wrong(f"{key}, dtype", "", with_arrays(lambda a, k=key, y=other: a.update({k: y})))
        if "/state/" in key:
            yield Wrong(f"{key}, missing", "", with_arrays(lambda a, k=key: a.pop(k)))
    extra = {"0/0/state/unknown": np.zeros(3, np.float32), "0/99/state/x": np.zeros(3, np.float32)}
    for key, x in extra.items():
        yield Wrong(f"{key}, unknown", "", with_arrays(lambda a, k=key, y=x: a.update({k: y})))


def cut(folder: Path) -> None:
    path = sorted(folder.glob("rank-*.npz"))[-1]
    path.write_bytes(path.read_bytes()[:10])


FILES = (
    Wrong("cut short", "has 10 bytes", cut),
    Wrong("other format", "format 7", lambda at: (at / "manifest.json").write_text('{"format":7}')),
    Wrong("nested", "not JSON", lambda at: (at / "manifest.json").write_bytes(b"[" * 10**5)),
    Wrong("no optimizer", "0 optimizers", rewritten(lambda m: m.update(exchanges=[]))),
)


def outcome(ranks: list[Any], folder: Path) -> str:
    """Return the sentence with which `load_state` raises on all ranks; "" if it does not."""

    def told(rank: Any) -> str:
        try:
            load_state(folder, only=[rank])
        except RuntimeError as error:
            return str(error)
        return ""

    (text,) = set(on_all(ranks, told))
    return text


def refused(ranks: list[Any], folder: Path) -> str:
    text = outcome(ranks, folder)
    assert text.startswith("state: ") and text.endswith(".") and "\n" not in text
    return text


def changed(folder: Path, wrong: Wrong, into: Path) -> Path:
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(folder, into)
    wrong.spoil(into)
    return into


# ------------------------------------------------------------------------------ gradients exchanged
@by_kind
def test_nothing_changes(name: str, tmp_path: Path) -> None:
    """Before its first step and after some, no rank's state, policy or step has changed."""
    kind, folder = EVERY[name], tmp_path / "state-00001"
    about = checkpoint.describe(save_gradients(kind, tmp_path).exchanges[0])
    arrays = dict(np.load(sorted(folder.glob("rank-*.npz"))[-1]))
    fresh, begun = new_world(kind), new_world(kind)
    go_on(begun, kind, 0, 2)
    for wrong in (*FILES, *of_manifest(about), *of_arrays(arrays)):
        at = changed(folder, wrong, tmp_path / "wrong")
        for world in (fresh, begun):
            before = [held(exchange) for exchange in world.exchanges]
            assert wrong.word in refused(owners(world), at), wrong.name
            assert [held(exchange) for exchange in world.exchanges] == before, wrong.name
    for world in (fresh, begun):  # and what fits is loaded as ever
        on_all(owners(world), lambda owner: load_state(folder, only=[owner]))
        assert [checkpoint.describe(x)["steps"] for x in world.exchanges] == [
            kind.stop
        ] * kind.ranks


OTHERS: dict[str, tuple[Callable[[Kind], Kind], str]] = {
    "another compressor": (lambda kind: replace(kind, make=lambda: TopK(0.37)), "when saved"),
    "another model": (lambda kind: replace(kind, shapes={"w": (31, 32)}), "when saved"),
    "a part of the model": (lambda kind: replace(kind, shapes={"w": (32, 32)}, skip=[]), ""),
}


@by_kind
@pytest.mark.parametrize("other", OTHERS)
def test_others_are_refused(name: str, other: str, tmp_path: Path) -> None:
    kind, (change, word) = EVERY[name], OTHERS[other]
    save_gradients(kind, tmp_path)
    if name == "fixed":  # whose override needs a tensor "v"
        kind = replace(kind, make=lambda: TopK(0.1))
    world = new_world(change(kind))
    before = [held(exchange) for exchange in world.exchanges]
    assert word in refused(owners(world), tmp_path)
    assert [held(exchange) for exchange in world.exchanges] == before


FAULTS = {
    "reading": (files, "read_arrays", OSError(5, "Input/output error")),
    "memory": (Exchange, "load_bucket_state", MemoryError("no memory for the residual")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_changes_no_other(fault: str, tmp_path: Path) -> None:
    """Each call may be the one that fails, on whichever rank it is."""
    kind, (place, name, error) = KINDS["accordion"], FAULTS[fault]
    save_gradients(kind, tmp_path)
    real = getattr(place, name)
    for number in range(1, 100):
        world, left = new_world(kind), number
        before = [held(exchange) for exchange in world.exchanges]

        def fail(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return real(*args)

        with mock.patch.object(place, name, fail):
            told = outcome(owners(world), tmp_path)
        if left > 0:  # no call has failed
            assert not told and world.exchanges[0].steps == kind.stop and number > 2
            return
        assert str(error) in told
        assert [held(exchange) for exchange in world.exchanges] == before


def test_small_files_take_little_memory(tmp_path: Path) -> None:
    """Arrays that claim more bytes than the file has are refused before memory is allocated."""
    import tracemalloc
    import zipfile

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (3 << 30,)}
    )
    plain, packed = tmp_path / "plain.npz", tmp_path / "packed.npz"
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + b"\0" * 8)
    np.savez_compressed(packed, x=np.zeros(1 << 22, np.float32))
    assert plain.stat().st_size < 1000 and packed.stat().st_size < 1 << 15
    tracemalloc.start()
    for path in (plain, packed):
        with pytest.raises(files.Damaged, match=r"is not whole|more than it has"):
            files.read_arrays(path, "")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# ---------------------------------------------------------------------------------- models averaged
@pytest.mark.parametrize("name", METHODS)
def test_averages_stay_as_they_are(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "state-00001"
    about = save_models(name, tmp_path)[0].describe()
    arrays = dict(np.load(sorted(folder.glob("rank-*.npz"))[-1]))
    ranks, others = averagers(name), averagers("local_sgd" if name == "wagma" else "wagma")
    on_all(ranks, lambda averager: train(averager, 0, 2))
    on_all(ranks, lambda averager: averager.average_now())
    for wrong in (*FILES, *of_manifest(about), *of_arrays(arrays)):
        at = changed(folder, wrong, tmp_path / "wrong")
        before = repr([averager.state() for averager in ranks])
        assert wrong.word in refused(ranks, at), wrong.name
        assert repr([averager.state() for averager in ranks]) == before, wrong.name
    assert "was saved" in refused(others, folder)
    assert not any(averager.steps for averager in others)
