"""What is imported when, and that every public name is there."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

import accordion_hvd

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "tensorflow", "keras", "horovod", "mpi4py")


def loaded(code: str) -> set[str]:
    """Top-level modules loaded by some code in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import accordion_hvd",
        "import accordion_hvd.simulate",
        "from accordion_hvd import *",
        "import accordion_hvd; accordion_hvd.parse('accordion(low=powersgd(4), high=topk)')",
        "import numpy as np; from accordion_hvd.simulate import simulate\n"
        "simulate('topk', 2).step([{'w': np.ones((40, 50), 'f')}] * 2)",
    ],
)
def test_no_framework_is_loaded(code: str) -> None:
    assert not loaded(code) & set(HEAVY)


def test_the_package_itself_needs_nothing() -> None:
    """The doctor and build_horovod run before anything is installed."""
    assert "numpy" not in loaded("import accordion_hvd")


def test_every_public_name_is_there() -> None:
    for name in accordion_hvd.__all__:
        assert getattr(accordion_hvd, name) is not None
        assert name in dir(accordion_hvd)
    assert sorted(set(accordion_hvd.__all__)) == accordion_hvd.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = accordion_hvd.nothing


def test_dependencies_point_one_way() -> None:
    """Compressors and policies know no framework and no exchange; the exchange no algorithm."""
    forbidden = {
        "compressors": ("exchange", "communicator", "policy", "torch", "tensorflow", "horovod"),
        "policy": ("exchange", "communicator", "import torch", "import tensorflow", "horovod."),
    }
    for folder, words in forbidden.items():
        for path in (ROOT / "accordion_hvd" / folder).glob("*.py"):
            lines = path.read_text().splitlines()
            imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
            for line in imports:
                assert not any(word in line for word in words), f"{path.name}: {line}"
    exchange = (ROOT / "accordion_hvd" / "exchange.py").read_text()
    assert not any(name in exchange for name in ("TopK", "PowerSGD", "RandomK", "Accordion("))


def imported(path: Path) -> set[str]:
    """Top-level modules that a file imports anywhere, inside functions too, or by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.add(ast.unparse(node.args[0]).removeprefix("f").strip("'\""))
    return {name.partition(".")[0] for name in found}


FORBIDDEN = {"accordion_hvd": {"benchmarks", "examples"}, "examples": {"benchmarks"}}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_the_package_knows_neither_examples_nor_benchmarks(folder: str) -> None:
    """Benchmarks import examples and the package, examples the package alone."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not imported(path) & (FORBIDDEN[folder] | {"tests", "scripts"}), path
    used = set().union(*map(imported, files))
    assert used & ({*FORBIDDEN, "benchmarks"} - FORBIDDEN[folder]), "nothing was recognised"


def test_only_the_package_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.packages.find"]["include"].split()
    found = find_packages(str(ROOT), include=patterns)
    assert {name.partition(".")[0] for name in found} == {"accordion_hvd"}


def test_no_public_name_is_hidden_by_a_module() -> None:
    """A submodule of the same name would take its place once it is imported."""
    modules = {path.stem for path in (ROOT / "accordion_hvd").glob("*")}
    assert not modules & set(accordion_hvd.__all__)
