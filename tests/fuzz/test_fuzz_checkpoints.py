"""Fuzz tests of checkpoint files: a state that fits is loaded, other files are refused clearly.

The tests change the files themselves: bytes of any file, values of any JSON file, and arrays of any
NumPy archive.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fuzzing import fuzz, seeds
from hypothesis import strategies as st
from trainings import held

from accordion_hvd import simulate
from accordion_hvd.engine import checkpoint_files
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.simulation.one_process import World

SHAPES = {"v": (40,), "w": (30, 40)}
METHODS = ["Accordion(PowerSGD(4), TopK(0.1))", "ef21:topk:0.1", "lgc:0.05", "dgc:0.1", "topk:0.1",
           "scalecom:0.1", "sketchedsgd:0.1", "diana:qsgd:4", "adacomp"]  # fmt: skip
VALUES = [None, -1, 0, 1, 2**70, 1.5, "x", "", [], {}, [1], {"a": 1}, True, float("nan"), "9" * 20]
STRANGE = [
    b"",
    b"[]",
    b"null",
    b"3",
    b'"a"',
    b"{}",
    b"[" * 5000,
    b"[" * 900 + b"]" * 900,
    b"\xff\xfe",
    b'{"format": 1}',
]
DTYPES = ["int64", "complex64", "float16", "S3", "bool"]
NAMES = ["0/0/state/x", "0/x/state/a", "0/9/state/error", "q", "0/0/parked/x/y", "0/0/parked/7/y"]


def step(world: World) -> list[Any]:
    rng = np.random.default_rng(0)
    return world.step([{k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}])


def owners(world: World) -> list[Any]:
    """Return owners of the world's exchanges, as arguments of `save_state` and `load_state`."""
    return [
        SimpleNamespace(exchange=x, communicator=x.communicator, expect=lambda names: None)
        for x in world.exchanges
    ]


@functools.cache
def saved(method: str) -> dict[str, bytes]:
    """Return the files of a checkpoint after three steps, by path."""
    world = simulate(method, 1)
    for _ in range(3):
        step(world)
    with tempfile.TemporaryDirectory() as folder:
        save_state(folder, only=owners(world))
        files = sorted(Path(folder).glob("*/*"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write(folder: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_bytes(content)


def sign(folder: Path) -> None:
    """Update the checksums to the changed files, so that more than the checksums is tested."""
    (manifest,) = folder.rglob("manifest.json")
    try:
        about = json.loads(manifest.read_bytes())
        for row, path in zip(about["files"], sorted(manifest.parent.glob("*.npz")), strict=True):
            row |= checkpoint_files.write_file(path, path.read_bytes())
        del about["checksum"]
        checkpoint_files.write_manifest(manifest.parent, about)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return  # the file is not a manifest any more


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON file."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


def changed_json(content: bytes, r: random.Random) -> bytes:
    """Return the JSON file with one value removed or replaced."""
    parent = whole = copy.deepcopy(json.loads(content))
    *way, last = r.choice(list(paths(whole)))
    for key in way:
        parent = parent[key]
    if r.random() < 0.2:
        del parent[last]
    else:
        parent[last] = r.choice(VALUES)
    return json.dumps(whole).encode()


def changed_arrays(content: bytes, r: random.Random) -> bytes:
    """Return the archive with one array removed, added or replaced."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {key: file[key] for key in file}
    name = r.choice(list(arrays))
    array = arrays.pop(name)
    kind = r.randrange(6)
    if kind == 1:
        arrays[name] = array.reshape(-1)[1:]
    elif kind == 2:
        arrays[name] = np.zeros((), np.float32)
    elif kind == 3:
        arrays[name] = array.astype(r.choice(DTYPES))
    elif kind == 4:
        arrays[name] = np.array([{}, None], object)
    elif kind == 5:
        arrays |= {name: array, r.choice(NAMES): np.zeros(3, np.float32)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def changed(path: str, content: bytes, r: random.Random) -> bytes:
    kind = r.randrange(5)
    if kind == 0:
        return content[: r.randrange(len(content))]
    if kind == 1:
        return r.choice(STRANGE)
    if kind == 2:
        flipped = bytearray(content)
        for _ in range(r.randrange(1, 4)):
            flipped[r.randrange(len(flipped))] = r.randrange(256)
        return bytes(flipped)
    return changed_json(content, r) if path.endswith(".json") else changed_arrays(content, r)


@fuzz("checkpoints with a changed file", 0.02, method=st.sampled_from(METHODS), seed=seeds)
def test_changed_files(method: str, seed: int) -> None:
    r = random.Random(seed)
    files = dict(saved(method))
    path = r.choice(list(files))
    files[path] = changed(path, files[path], r)
    world = simulate(method, 1)
    world._build({k: np.zeros(s, np.float32) for k, s in SHAPES.items()})
    with tempfile.TemporaryDirectory() as folder:
        write(folder, files)
        if r.random() < 0.8:
            sign(Path(folder))
        before = held(world.exchanges[0])
        try:
            load_state(folder, only=owners(world))
        except RuntimeError as error:
            assert str(error).startswith("state: ") and str(error).endswith("."), repr(error)
            assert held(world.exchanges[0]) == before
            return
    for mean in (step(world)[0] or {}).values():  # the next step works with the loaded state
        assert mean.dtype == np.float32


@fuzz("checkpoints that are unchanged", 0.001, method=st.sampled_from(METHODS))
def test_unchanged_files(method: str) -> None:
    """Negative control: unchanged files are loaded."""
    world = simulate(method, 1)
    world._build({k: np.zeros(s, np.float32) for k, s in SHAPES.items()})
    with tempfile.TemporaryDirectory() as folder:
        write(folder, saved(method))
        load_state(folder, only=owners(world))
    assert world.exchanges[0].steps == 3
