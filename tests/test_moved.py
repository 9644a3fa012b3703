"""Tests of old names of modules: they import the same modules with a warning; no file uses them."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from accordion_hvd._moved import MOVED, now

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("accordion_hvd", "benchmarks", "examples", "scripts", "tests")
LONG = "accordion_hvd.simulation.one_process.simulate"  # accordion_hvd.simulate is shorter
NEEDS = {"torch": "torch", "tensorflow": "tensorflow", "process_sets": "horovod"}

LOOK = """
import importlib, sys, warnings
old, new = (f"accordion_hvd.{name}" for name in sys.argv[1:])
warnings.simplefilter("ignore")
wanted = importlib.import_module(new)
spec = wanted.__spec__
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    exec(f"import {old} as found")
assert found is wanted is sys.modules[old] and found.__spec__ is spec and found.__name__ == new
texts = [str(w.message) for w in caught if w.category is DeprecationWarning]
assert texts.count(f"{old} has moved: import {new} instead.") == 1, texts
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_same_module(old: str, new: str) -> None:
    for word, needed in NEEDS.items():
        if word in new.split("."):
            pytest.importorskip(needed)
            pytest.importorskip("horovod")
    done = run("-c", LOOK, old, new)
    assert done.returncode == 0, done.stderr


def test_a_second_name_is_the_same_module() -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("horovod")
    code = "import accordion_hvd.keras as a, accordion_hvd.tensorflow.keras as b; assert a is b"
    done = run("-W", "default", "-c", code)
    assert done.returncode == 0 and "has moved" not in done.stderr, done.stderr


MEMBERS = """
import pickle, warnings
from accordion_hvd import Accordion, Compressor, PowerSGD
warnings.simplefilter("ignore")
policy = Accordion(low=PowerSGD(4), high=PowerSGD(1))
text = pickle.dumps(policy, protocol=0)
old = text.replace(b"accordion_hvd.policies", b"accordion_hvd.policy")
assert old != text and repr(pickle.loads(old)) == repr(policy)
from accordion_hvd.policy.accordion import Accordion as Old
import accordion_hvd.base
assert Old is Accordion and accordion_hvd.base.Compressor is Compressor
"""


def test_classes_and_pickles_are_the_same_by_old_names() -> None:
    done = run("-c", MEMBERS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["doctor", "build_horovod"])
def test_programs_keep_the_names_that_are_typed(name: str) -> None:
    done = run("-W", "error::DeprecationWarning", "-m", f"accordion_hvd.{name}", "--help")
    assert done.returncode == 0 and f"accordion_hvd.{name}" in done.stdout, done.stderr
    assert not done.stderr


def test_what_has_not_moved_is_found_as_ever() -> None:
    assert now("accordion_hvd.ops.numpy") is now("accordion_hvd") is now("policy") is None
    assert importlib.util.find_spec("accordion_hvd.nothing") is None


def test_nothing_here_uses_an_old_name() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 200
    for path in paths:
        if path == Path(__file__).resolve():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {alias.name for alias in node.names}
                if node.module == "accordion_hvd":
                    members -= {"simulate"}  # the function
                names = [node.module, *(f"{node.module}.{name}" for name in members)]
            else:
                continue
            assert not [name for name in names if now(name)], f"{path}:{node.lineno}"
            within = path.parent.name == "simulation"
            assert within or LONG not in names, f"{path}:{node.lineno}"
