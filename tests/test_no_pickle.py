"""Tests that payloads, checkpoints and configurations contain no pickles."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from cases import CASES

from accordion_hvd import simulate
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.simulation.one_process import World
from examples.config import parse_settings

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
READERS = ("examples/data/cifar10.py", "examples/data/citation.py")  # read others' pickles, safely


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*about: Any, **more: Any) -> NoReturn:
        raise AssertionError("something is pickled")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


def sources() -> list[Path]:
    found = [p for part in ("accordion_hvd", "examples") for p in (ROOT / part).rglob("*.py")]
    return [path for path in found if str(path.relative_to(ROOT)) not in READERS]


def test_nothing_imports_pickle() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not MODULES & {name.partition(".")[0] for name in names}, path


def test_arrays_are_read_without_pickles() -> None:
    """Every call of `np.load` has allow_pickle=False, and of `torch.load` weights_only=True."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "torch.load"):
                options = {key.arg: ast.unparse(key.value) for key in node.keywords}
                safe = {"allow_pickle": "False"}, {"weights_only": "True"}
                assert any(kind.items() <= options.items() for kind in safe), (path, node.lineno)


def step(world: World, ranks: int) -> None:
    rng = np.random.default_rng(0)
    world.step([{"w": rng.standard_normal((24, 50)).astype(np.float32)} for _ in range(ranks)])


def test_exchanges_and_checkpoints(tmp_path: Path) -> None:
    for number, case in enumerate({type(case.compressor): case for case in CASES}.values()):
        step(simulate(case.compressor, 3), 3)
        alone, again = simulate(case.compressor, 1), simulate(case.compressor, 1)
        for world in (alone, again):
            step(world, 1)
        for world, action in ((alone, save_state), (again, load_state)):
            owners = [
                SimpleNamespace(exchange=x, communicator=x.communicator, expect=lambda names: None)
                for x in world.exchanges
            ]
            action(tmp_path / str(number), only=owners)


def test_configurations(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    path = tmp_path / "run.yaml"
    path.write_text("lr: 0.2\ncompression: topk:0.1\n")
    assert parse_settings(None, ["--config", str(path)]).lr == 0.2
    path.write_text("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError):
        parse_settings(None, ["--config", str(path)])


def test_the_fixture_refuses() -> None:
    with pytest.raises(AssertionError, match="something is pickled"):
        pickle.dumps(1)
