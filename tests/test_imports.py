"""Tests of imports: which modules are loaded and when, and that every public name exists."""

from __future__ import annotations

import ast
import configparser
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

import accordion_hvd

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "tensorflow", "keras", "horovod", "mpi4py")


def loaded(code: str) -> set[str]:
    """Return the top-level modules that are loaded after some code in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import accordion_hvd",
        "import accordion_hvd.simulation.one_process",
        "from accordion_hvd import *",
        "import accordion_hvd; accordion_hvd.parse('accordion(low=powersgd(4), high=topk)')",
        "import numpy as np; from accordion_hvd import simulate\n"
        "simulate('topk', 2).step([{'w': np.ones((40, 50), 'f')}] * 2)",
    ],
)
def test_no_framework_is_loaded(code: str) -> None:
    assert not loaded(code) & set(HEAVY)


FIRST = """
import importlib, os, sys
import numpy  # once for all: it takes longest
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        status = 1
        try:
            importlib.import_module(name)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, f"{name} cannot be imported first"
"""


@pytest.mark.nightly
def test_any_module_can_be_the_first() -> None:
    """Every module without a framework can be imported first, before any other module."""
    files = [path.relative_to(ROOT) for path in (ROOT / "accordion_hvd").rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    pure = [name for name in names if not {*HEAVY, "process_sets"} & {*name.split(".")}]
    others = [name for name in pure if not name.endswith(("quantization_torch", "__main__"))]
    assert len(others) > 80
    command = [sys.executable, "-c", FIRST, *others]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "name", ["accordion_hvd", "accordion_hvd.tools.doctor", "accordion_hvd.tools.build_horovod"]
)
def test_modules_that_need_no_numpy(name: str) -> None:
    """The package, the doctor and build_horovod can be imported before NumPy is installed."""
    assert "numpy" not in loaded(f"import {name}")


STOCK_KERAS = """
import sys, types, warnings
warnings.simplefilter("error")
from accordion_hvd import Accordion, PowerSGD, TopK
sys.modules["horovod.tensorflow.keras"] = types.ModuleType("keras")
sys.modules["accordion_hvd.tensorflow"] = types.ModuleType("tensorflow")
TopK(0.1)
del sys.modules["accordion_hvd.tensorflow"]
for make in (lambda: TopK(0.1), lambda: Accordion(low="topk:0.1", high="topk:0.01")):
    try:
        make()
    except UserWarning as warning:
        assert "`import accordion_hvd.tensorflow.keras as hvd`" in str(warning)
    else:
        sys.exit("no warning")
"""


def test_scripts_that_keep_horovods_keras_are_warned() -> None:
    """Under Keras 3, Horovod's optimizer ignores `compression`: only a compressor can warn."""
    command = [sys.executable, "-c", STOCK_KERAS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_old_pytorch_is_refused_in_one_sentence() -> None:
    pytest.importorskip("torch")
    code = "from torch.distributed import Store; del Store.clone; import accordion_hvd.ddp"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "but must be 2.8 or newer: pip install 'torch>=2.8'." in done.stderr.splitlines()[-1]


TWO_NAMES = """
import sys
import accordion_hvd.keras.callbacks as callbacks, accordion_hvd.keras.elastic as elastic
import accordion_hvd.keras as a, accordion_hvd.tensorflow.keras as b
import accordion_hvd.keras.optimizer
from accordion_hvd.keras import DistributedOptimizer
assert a is b and a.__name__ == a.__spec__.name == "accordion_hvd.tensorflow.keras"
assert callbacks is b.callbacks and elastic is b.elastic
assert accordion_hvd.keras.optimizer is sys.modules["accordion_hvd.tensorflow.keras.optimizer"]
"""


def test_keras_has_two_names() -> None:
    """`accordion_hvd.keras` and its submodules are those of `accordion_hvd.tensorflow`."""
    pytest.importorskip("tensorflow")
    pytest.importorskip("horovod")
    command = [sys.executable, "-c", TWO_NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in accordion_hvd.__all__:
        assert getattr(accordion_hvd, name) is not None
        assert name in dir(accordion_hvd)
    assert sorted(set(accordion_hvd.__all__)) == accordion_hvd.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = accordion_hvd.nothing
    torch = importlib.import_module("accordion_hvd.torch")
    for name, says in (("PowerSGD", "; write accordion_hvd.PowerSGD$"), ("nothing", "'nothing'$")):
        with pytest.raises(AttributeError, match=says):
            getattr(torch, name)


def imported(path: Path) -> set[str]:
    """Return the top-level modules that a file imports, also in functions or by `import_module`."""
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
    """Benchmarks may import examples and the package, but examples may import only the package."""
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


ORDERS = [
    "pass",
    "from accordion_hvd import *",
    "import accordion_hvd.simulation",
    "import accordion_hvd.simulation.one_process",
    "import accordion_hvd.graph.structure",
]
CALLED = """
import os, sys
import numpy
for order in sys.argv[1:]:
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(order)
            from accordion_hvd import simulate
            from accordion_hvd.graph import partition
            from accordion_hvd.simulation import World
            assert isinstance(simulate("topk", 2), World) and simulate(ranks=3, compression="topk")
            assert callable(partition)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, f"there is no function after: {order}"
"""


def test_functions_that_modules_have_the_names_of() -> None:
    """Functions with the name of a module can be called after any order of imports."""
    command = [sys.executable, "-c", CALLED, *ORDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_public_name_is_hidden_by_a_module() -> None:
    """No public name is that of a submodule, which would replace it when it is imported."""
    modules = {path.stem for path in (ROOT / "accordion_hvd").glob("*")}
    assert not modules & set(accordion_hvd.__all__)
