"""Tests of `accordion-hvd inspect` on checkpoints: their contents and their damage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from trainings import KINDS, METHODS, PRIVATE, save_gradients, save_models

import accordion_hvd
from accordion_hvd import Accordion, Gate, PowerSGD, TopK, simulate
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine import checkpoint_files as files
from accordion_hvd.simulation.one_process import World
from accordion_hvd.tools import inspector
from accordion_hvd.tools.command import main


def save(directory: Path, world: World) -> Path:
    """Write a checkpoint as `save_state` does, but without collectives; return its folder."""
    folder = files.new_folder(directory)
    rows = [checkpoint._write(folder, [exchange]) for exchange in world.exchanges]
    checkpoint._complete(folder, world.exchanges[:1], rows, 0, "a job")
    return folder


def train(world: World, steps: int, ranks: int = 2) -> World:
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 48), "v": (48, 64), "bias": (5,)}
    for _ in range(steps):
        world.step([
            {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
            for _ in range(ranks)
        ])  # fmt: skip
    return world


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, World]:
    """Return a directory with checkpoints after steps 3 and 6, and its two ranks."""
    policy = Accordion(
        low=PowerSGD(4), high=TopK(0.1), window=2, interval=1, overrides={"v": PowerSGD(1)}
    )
    world = train(simulate(policy, 2), 3)
    save(tmp_path, world)
    save(tmp_path, train(world, 3))
    return tmp_path, world


def show(*words: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, words)])


def cells(text: str, first: str) -> list[str]:
    """Return the cells of the row that begins with a word."""
    (line,) = (line for line in text.splitlines() if line.split() and line.split()[0] == first)
    return re.split(r"\s{2,}", line)


def test_what_a_checkpoint_holds(two: tuple[Path, World]) -> None:
    directory, world = two
    done = show(directory)
    assert done.exit_code == 0, done.output
    assert cells(done.output, "state-00002")[1:3] == ["step 6", "2 ranks"]
    assert cells(done.output, "state-00001")[-1] == "complete"
    lead = world.exchanges[0]
    assert repr(lead.policy) in done.output
    assert f"{len(lead.policy.history)} decisions" in done.output
    for entry in lead.bucket_states:
        row = cells(done.output, entry.bucket.name)
        compress = entry.bucket.compress
        assert row[1] == (repr(entry.compressor) if compress else "exempt")
        assert " x ".join(map(str, entry.bucket.shape)) in row
    assert "PowerSGD(rank=4)" in cells(done.output, "w")[2], "the inactive level"


def test_residuals_of_layers_and_ranks(two: tuple[Path, World]) -> None:
    """The norms of layers and ranks are those of the residuals in the ranks' states."""
    directory, world = two
    text = show(directory).output
    by_rank = [
        [state.residuals() for state in checkpoint.saved_of(exchange)]
        for exchange in world.exchanges
    ]
    for rank, layers in enumerate(by_rank):
        whole = np.concatenate([x.ravel() for layer in layers for x in layer])
        assert float(cells(text, str(rank))[2]) == pytest.approx(np.linalg.norm(whole), rel=0.01)
    place = [entry.bucket.name for entry in world.exchanges[0].bucket_states].index("w")
    norms = [np.linalg.norm(np.concatenate([x.ravel() for x in rank[place]])) for rank in by_rank]
    assert float(cells(text, "w")[-1]) == pytest.approx(np.mean(norms), rel=0.01)


def test_quick_reads_no_ranks_file(
    two: tuple[Path, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = two
    monkeypatch.setattr(np, "load", None)
    newest = directory / "state-00002" / "rank-00001-of-00002.npz"
    size = newest.stat().st_size
    newest.write_bytes(bytes(size))
    done = show(directory, "--quick")
    assert done.exit_code == 0 and "TopK(ratio=0.1)" in done.output
    assert show(directory, "--quick").exit_code == 0
    newest.write_bytes(bytes(size - 1))
    assert show(directory, "--quick").exit_code == 1


RANK = "rank-00001-of-00002.npz"
DAMAGES: dict[str, Callable[[Path], None]] = {
    f"{RANK} has 100 bytes": lambda folder: os.truncate(folder / RANK, 100),
    f"{RANK} has changed": lambda folder: (folder / RANK).write_bytes(
        bytes((folder / RANK).stat().st_size)
    ),
    "the files of ranks [1] of 2 are missing": lambda folder: (folder / RANK).unlink(),
    "manifest.json is not JSON": lambda folder: os.truncate(folder / "manifest.json", 100),
    "manifest.json has changed": lambda folder: _replace(folder, '"steps": 6', '"steps": 7'),
    "has format 9": lambda folder: _replace(folder, '"format": 1', '"format": 9'),
    "not written to its end": lambda folder: (folder / "manifest.json").unlink(),
}


def _replace(folder: Path, old: str, new: str) -> None:
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


@pytest.mark.parametrize("told", DAMAGES)
def test_damage(told: str, two: tuple[Path, World]) -> None:
    """The error says what is damaged; the details are those of the checkpoint that is restored."""
    directory, _ = two
    DAMAGES[told](directory / "state-00002")
    done = show(directory)
    *_, last = done.output.splitlines()
    assert done.exit_code == 1 and told in last and "Traceback" not in done.output
    assert last.startswith("Error: state-00002 is damaged: ")
    assert last.endswith("load_state restores state-00001.")
    assert "after step 3" in done.output
    alone = show(directory / "state-00002")
    assert alone.exit_code == 1 and alone.output.rstrip().endswith("No checkpoint is complete.")


def test_older_damage_is_a_problem_too(two: tuple[Path, World]) -> None:
    directory, _ = two
    os.truncate(directory / "state-00001" / RANK, 100)
    done = show(directory)
    assert done.exit_code == 1 and "load_state restores state-00002." in done.output
    assert "after step 6" in done.output


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    done = show(tmp_path)
    assert done.exit_code == 1 and f"{tmp_path} has nothing to inspect" in done.output


def test_checkpoints_of_every_kind(tmp_path: Path) -> None:
    for name in KINDS:
        world = save_gradients(KINDS[name], tmp_path / name)
        told = shown(tmp_path / name)
        assert repr(world.exchanges[0].policy) in told
        assert f"written by accordion_hvd {accordion_hvd.__version__}" in told
    for name in METHODS:
        ranks = save_models(name, tmp_path / name)
        assert repr(ranks[0].method) in shown(tmp_path / name)
    save_gradients(PRIVATE, tmp_path / "private")
    spent = "4 releases of a privacy budget (epsilon 8, delta 1e-05)"
    assert spent in shown(tmp_path / "private")


def shown(directory: Path) -> str:
    """Return what is shown of a directory without damage."""
    done = show(directory)
    assert done.exit_code == 0, (directory, done.output)
    return done.output


def test_privacy_that_was_spent_since(tmp_path: Path) -> None:
    """If a privacy budget was spent, the error says that no older checkpoint is restored."""
    complete = inspector.Checkpoint(tmp_path, {"exchanges": [{"policy": {"privacy": {}}}]})
    damaged = [inspector.Checkpoint(tmp_path / "x", problem="cut")]
    assert "restores no older one" in inspector.verdict(damaged, complete)


def test_many_ranks_are_summed_up(tmp_path: Path) -> None:
    ranks = inspector.MOST_RANKS + 1
    save(tmp_path, train(simulate(TopK(0.1), ranks), 1, ranks))
    text = show(tmp_path).output
    least, middle, most = (float(cells(text, name)[2]) for name in ("least", "median", "most"))
    assert least <= middle <= most and "\n16 " not in text


def test_compressors_by_the_policys_text() -> None:
    """A policy's text gives the compressors of its levels, then the fallbacks of its gate.

    `Replay`, which would read a file, is not made from its text.
    """
    policy = Accordion(low=PowerSGD(4), high=TopK(0.1), gate=Gate())
    again = inspector.policy_of(repr(policy))
    found = [inspector.compressor_at(again, "w", level) for level in range(5)]
    assert found == [repr(x) for x in (PowerSGD(4), TopK(0.1), *Gate().fallbacks)] + [""]
    assert inspector.start_of(again, "w") == repr(PowerSGD(4))
    assert inspector.policy_of("Replay('/dev/zero')") is None
    assert inspector.policy_of("MyPolicy(3)") is None and not inspector.start_of(None, "w")
