"""Tests of checkpoints of each kind of state: training continues as if it had not stopped."""

from __future__ import annotations

import copy
import functools
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from trainings import (
    KINDS,
    LR,
    METHODS,
    MORE,
    PRIVATE,
    STOP,
    Arrays,
    Kind,
    averagers,
    go_on,
    new_world,
    on_all,
    owners,
    save_gradients,
    save_models,
    train,
)

from accordion_hvd.engine import checkpoint_files as files
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.simulation.one_process import World

by_kind = pytest.mark.parametrize("name", KINDS)
by_method = pytest.mark.parametrize("name", METHODS)


class Saved(NamedTuple):
    """A checkpoint, and what became of a training that went on after it.

    Attributes:
        folder: folder of the checkpoint.
        results: results of the steps after it.
        models: the model that was saved with it, on each rank.
    """

    folder: Path
    results: np.ndarray
    models: list[Arrays]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function that gives the checkpoint of a kind or of a method of averaging."""

    @functools.cache
    def make(name: str) -> Saved:
        place = tmp_path_factory.mktemp(name)
        folder = place / "state-00001"
        if name in KINDS:
            kind = KINDS[name]
            return Saved(folder, go_on(save_gradients(kind, place), kind, kind.stop, MORE), [])
        ranks = save_models(name, place)
        models = [copy.deepcopy(averager.parameters.arrays) for averager in ranks]
        results = on_all(ranks, lambda averager: train(averager, STOP, MORE))
        return Saved(folder, np.array(results), models)

    return make


Make = Callable[[str], Saved]


def resumed(kind: Kind, folder: Path, ranks: int = 0) -> World:
    world = new_world(kind, ranks)
    on_all(owners(world), lambda owner: load_state(folder, only=[owner]))
    return world


def ranks_files(folder: Path) -> list[Arrays]:
    """Return the files that each rank has saved."""
    found = []
    for path in sorted(folder.glob("rank-*.npz")):
        with np.load(path) as file:
            found.append({key: file[key] for key in file})
    return found


def residuals(world: World) -> np.ndarray:
    """Return the mean of all ranks' residuals of the first tensor."""
    return np.mean([exchange.bucket_states[0].state["error"] for exchange in world.exchanges], 0)


CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""A residual is saved as one tensor, whose sum may be rounded in another order."""


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return np.allclose(found, wanted, equal_nan=True, **CLOSE)


@by_kind
def test_gradients_go_on_as_if_never_stopped(name: str, saved: Make) -> None:
    kind = KINDS[name]
    found = go_on(resumed(kind, saved(name).folder), kind, kind.stop, MORE)
    np.testing.assert_allclose(found, saved(name).results, **CLOSE)


@pytest.mark.parametrize("name", ["accordion", "qsgd", "birder"])
def test_tensors_may_have_other_names_now(name: str, saved: Make) -> None:
    """A loaded Keras model may have new names of variables; random numbers depend on the old."""
    kind = replace(KINDS[name], within="net/")
    found = go_on(resumed(kind, saved(name).folder), kind, kind.stop, MORE)
    np.testing.assert_allclose(found, saved(name).results, **CLOSE)


def rewritten(folder: Path, into: Path) -> tuple[Path, dict[str, Any]]:
    """Copy a checkpoint; return the copy's folder and its manifest, to be written anew."""
    shutil.copytree(folder, into / folder.name, dirs_exist_ok=True)
    return into / folder.name, files.read_manifest(folder)


def altered(folder: Path, rank: int, key: str, into: Path) -> Path:
    """Copy a checkpoint and change one of its arrays."""
    copied, manifest = rewritten(folder, into)
    arrays = ranks_files(folder)[rank]
    x = arrays[key]
    other = x + 1 + np.cos(np.arange(x.size)).reshape(x.shape)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays | {key: other.astype(x.dtype)})
    path = files.rank_file(copied, rank, manifest["ranks"])
    manifest["files"][rank] = files.write_file(path, buffer.getvalue())
    files.write_manifest(copied, manifest)
    return copied


@by_kind
def test_nothing_is_lost_when_it_is_saved_again(name: str, saved: Make, tmp_path: Path) -> None:
    kind, folder = KINDS[name], saved(name).folder
    world = resumed(kind, folder)
    on_all(owners(world), lambda owner: save_state(tmp_path, only=[owner]))
    again = tmp_path / "state-00001"
    for ours, theirs in zip(ranks_files(again), ranks_files(folder), strict=True):
        assert ours.keys() == theirs.keys()
        for key, x in theirs.items():
            np.testing.assert_array_equal(ours[key], x, err_msg=key)
    ours, theirs = (files.read_manifest(at)["exchanges"] for at in (again, folder))
    assert used(ours, kind) == used(theirs, kind)


def used(found: Any, kind: Kind) -> Any:
    """Return `found` without the keys that do not affect the next steps."""
    if isinstance(found, dict):
        return {key: used(x, kind) for key, x in found.items() if key not in kind.unused}
    return [used(x, kind) for x in found] if isinstance(found, list) else found


@by_kind
def test_every_array_matters(name: str, saved: Make, tmp_path: Path) -> None:
    """A change of any array of a checkpoint changes the next steps, so all arrays are loaded."""
    kind, (folder, results, _) = KINDS[name], saved(name)
    for rank, arrays in enumerate(ranks_files(folder)):
        for key in arrays:
            at = altered(folder, rank, key, tmp_path)
            noticed = not same(go_on(resumed(kind, at), kind, kind.stop, MORE), results)
            assert noticed != key.endswith(kind.unused or "never"), (rank, key)


# ------------------------------------------------------------------------- another number of ranks
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", ["owed", "two_level_owed"])
def test_others_pay_what_all_have_owed(name: str, ranks: int, saved: Make) -> None:
    """With another number of ranks, the next mean contains the mean residual of those before."""
    kind, folder = KINDS[name], saved(name).folder
    world = resumed(kind, folder, ranks)
    carried = np.mean([arrays["0/0/owed"] for arrays in ranks_files(folder)], 0)
    nothing = {name: np.zeros(shape, np.float32) for name, shape in kind.shapes.items()}
    for means in world.step([copy.deepcopy(nothing) for _ in range(ranks)], LR):
        assert means is not None and np.abs(carried).max() > 0.1
        np.testing.assert_allclose(means["w"], carried.reshape(32, 32), atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", ["topk", "ef_signsgd", "powersgd", "accordion"])
def test_others_keep_the_mean_residual(name: str, ranks: int, saved: Make) -> None:
    """With another number of ranks, means and remaining residuals add up to those loaded."""
    kind, folder = KINDS[name], saved(name).folder
    world = resumed(kind, folder, ranks)
    carried = np.mean([arrays["0/0/state/error"] for arrays in ranks_files(folder)], 0)
    nothing = {name: np.zeros(shape, np.float32) for name, shape in kind.shapes.items()}
    came = np.zeros((32, 32))
    for _ in range(30):
        means = world.step([copy.deepcopy(nothing) for _ in range(ranks)], LR)[0]
        assert means is not None and np.abs(carried).max() > 0.1
        came += means["w"]
    found = came + residuals(world).reshape(32, 32)
    np.testing.assert_allclose(found, carried.reshape(32, 32), atol=1e-4)


# --------------------------------------------------------------------------------- what is averaged
def trained(name: str, saved: Saved, folder: Path) -> np.ndarray:
    """Return the models of ranks that continue from a checkpoint."""
    ranks = averagers(name)
    for averager, model in zip(ranks, saved.models, strict=True):
        averager.parameters.arrays = copy.deepcopy(model)
    on_all(ranks, lambda averager: load_state(folder, only=[averager]))
    return np.array(on_all(ranks, lambda averager: train(averager, STOP, MORE)))


@by_method
def test_models_go_on_as_if_never_stopped(name: str, saved: Make) -> None:
    one = saved(name)
    np.testing.assert_array_equal(trained(name, one, one.folder), one.results)


@by_method
def test_every_array_of_an_average_matters(name: str, saved: Make, tmp_path: Path) -> None:
    one = saved(name)
    for rank, arrays in enumerate(ranks_files(one.folder)):
        for key in arrays:
            at = altered(one.folder, rank, key, tmp_path)
            assert not same(trained(name, one, at), one.results), (rank, key)


def test_periods_of_averages_go_on(saved: Make, tmp_path: Path) -> None:
    one = saved("local_sgd")
    at, manifest = rewritten(one.folder, tmp_path)
    manifest["exchanges"][0]["steps"] += 1
    files.write_manifest(at, manifest)
    assert not same(trained("local_sgd", one, at), one.results)


def test_others_keep_what_ranks_had_in_common(saved: Make) -> None:
    one = saved("diloco")
    ranks, kept = averagers("diloco", 3), ranks_files(one.folder)[0]
    for averager in ranks:
        averager.parameters.arrays = copy.deepcopy(one.models[0])
    on_all(ranks, lambda averager: load_state(one.folder, only=[averager]))
    on_all(ranks, lambda averager: averager.prepare())
    for averager in ranks:
        (state,) = averager.state()["states"]
        assert np.array_equal(state["velocity"], kept["0/0/velocity"])
        assert not state["compressor/error"].any()


# ------------------------------------------------------------------------------------------ privacy
@pytest.mark.parametrize("ranks", [2, 3])
def test_budgets_remember_what_was_spent(ranks: int, tmp_path: Path) -> None:
    before = save_gradients(PRIVATE, tmp_path).exchanges[0].stats()["privacy"]
    assert before["releases"] == PRIVATE.stop and before["epsilon"] > 0
    for exchange in resumed(PRIVATE, tmp_path, ranks).exchanges:
        assert exchange.stats()["privacy"] == before
