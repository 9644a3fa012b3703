"""Tests of the package: the wheel, the source archive, and the types that type checkers see."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
import venv
import zipfile
from pathlib import Path

import pytest

import accordion_hvd
from scripts import release, setup_env

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "accordion_hvd"

SCRIPT = """
import keras
import torch

import accordion_hvd.tensorflow.keras as keras_hvd
import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD, TopK, ddp, fsdp, simulate

hvd.init()
model = torch.nn.Linear(10, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=Accordion(low=PowerSGD(4), high=TopK(0.01)),
)
rank: int = hvd.rank()
optimizer.step()
hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16, guard="warn", ledger="runs/x")
hvd.OnebitAdam(model.named_parameters(), 1e-3, (0.9, 0.99), warmup_steps=100, skip=["b*"]).step()
keras_hvd.OnebitAdam(1e-3, beta_1=0.8, clipnorm=1.0, floor=0.01)
keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:0.01")
ddp.register(torch.nn.parallel.DistributedDataParallel(model), TopK(0.01), skip=["*.bias"])
simulate(TopK, 2).step([])
"""

WRONG = """
from accordion_hvd import PowerSDG
PowerSGD(rnak=4)
hvd.DistributedOptimizer(optimizer, compresion="topk")
hvd.DistributedOptimizer(optimizer, compression=4)
hvd.OnebitAdam(model.parameters(), warmup_step=100)
hvd.OnebitAdam(model.parameters(), floor="small")
hvd.Birder(model.parameters(), betas=(0.9, 0.99))
keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), guard="never")
keras_hvd.OnebitAdam(1e-3, beta1=0.8)
keras_hvd.CDAMSGrad(1e-3, clipnorm="small")
ddp.register(model, TopK(0.01), guards="off")
fsdp.between(model, None, TopK(0.01), passes="two")
simulate(TopK(0.01), ranks="two")
optimizer.end_windw()
keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)).end_windw()
ddp.register(torch.nn.parallel.DistributedDataParallel(model), TopK(0.01)).exchange.stat()
"""


def test_type_checkers_see_the_names_of_the_package() -> None:
    """The imports under TYPE_CHECKING are of the names that `__getattr__` returns."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("accordion_hvd."):
            for alias in node.names:
                star = alias.name == "*"
                module = importlib.import_module(str(node.module))
                names |= set(module.__all__) if star else {alias.name}
                assert star or alias.asname == alias.name and hasattr(module, alias.name)
    assert names == set(accordion_hvd.__all__)


@pytest.mark.parametrize("module", ["torch", "tensorflow", "tensorflow/keras"])
def test_type_checkers_see_the_names_of_the_module(module: str) -> None:
    """The literal list `__all__`, which type checkers read, has what is imported for users."""
    body = ast.parse((PACKAGE / module / "__init__.py").read_text()).body
    lists = [x.value for x in body if isinstance(x, ast.Assign) and isinstance(x.value, ast.List)]
    imports = [x for x in body if isinstance(x, ast.ImportFrom)]
    ours = [x for x in imports if str(x.module).startswith("accordion_hvd")]
    names = {alias.name for x in ours for alias in x.names if alias.asname is None}
    assert set(ast.literal_eval(lists[0])) == names - {"*", "check", "compressed"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive and the wheel; return their folder."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("built")
    release.build(folder)
    return folder


def test_wheel_and_source_archive_are_whole(built: Path) -> None:
    """They have the package and little else."""
    sources = {
        f"accordion_hvd/{path.relative_to(ROOT / 'accordion_hvd')}"
        for path in (ROOT / "accordion_hvd").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == sources
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {x.name.partition("/")[2] for x in archive if x.isfile()}
    others = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg"}
    made = {name for name in names if name.startswith("accordion_hvd.egg-info/")} | {"PKG-INFO"}
    assert names - made == sources | others


def test_the_lowest_versions_are_those_of_setup_cfg() -> None:
    python, packages = release.lowest(["torch", "tensorflow-cpu"])
    assert re.fullmatch(r"python3\.\d+", python)
    names = [package.partition("==")[0] for package in packages]
    assert names == ["click", "numpy", "torch", "tensorflow-cpu", "keras"]


def test_the_demo_needs_less_than_the_whole_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has installed serves the next demo, but not the tests."""
    ran: list[str] = []
    steps = types.SimpleNamespace(BuildError=OSError)
    steps.run_step = lambda title, command, env, log, cwd=None: ran.append(" ".join(command)) or 0
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "log")
    monkeypatch.setattr(setup_env, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup_env, "load_builder", lambda: steps)
    for name in ("check_machine", "make_venv", "header_folders"):
        monkeypatch.setattr(setup_env, name, lambda builder: [])
    monkeypatch.setattr(setup_env, "install_horovod", lambda *_: ran.append("Horovod"))
    for words in (["demo"], ["demo"], ["horovod"], [], [], ["demo"]):
        ran.append(f"{words}:")
        assert setup_env.main(words) == 0
    demo, again, horovod, whole, *last = " ".join(ran).split(":")[1:]
    assert "torch==2" in demo and "-e .[mpi,build,train]" in demo and "Horovod" not in demo
    assert "pip" not in again + horovod and "Horovod" in horovod
    assert "-r requirements.txt" in whole and "Horovod" in whole
    assert "pip" not in " ".join(last)
    assert setup_env.main(["all"]) == 2


def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path) -> None:
    """An editable install is found from a folder in which the clone is named accordion_hvd."""
    pytest.importorskip("setuptools")
    clone, environment = tmp_path / "accordion_hvd", tmp_path / "env"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, clone / "accordion_hvd", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    venv.create(environment, with_pip=False)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(next(environment.glob("lib/python*/site-packages")))
    script = tmp_path / "train.py"
    script.write_text("import accordion_hvd\nprint(accordion_hvd.__file__)\n")
    isolated = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [environment / "bin" / "python", script], env=isolated, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(clone / "accordion_hvd" / "__init__.py"), done.stderr


def test_one_version() -> None:
    """The citations and the newest entry of the changelog have the version of the package."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == accordion_hvd.__version__
    bibtex = (ROOT / "docs" / "citing.md").read_text()
    assert f"version = {{{accordion_hvd.__version__}}}" in bibtex
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == accordion_hvd.__version__


def test_messages_and_pages_install_what_exists() -> None:
    """Nothing is on an index: extras are those of a clone, as in pip install '.[torch]'."""
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    known, found = set(extras["options.extras_require"]), set()
    listed = ["git", "ls-files", "*.py", "*.md", "*.ipynb", "Dockerfile"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split():
        text = (ROOT / name).read_text() if (ROOT / name).is_file() else ""
        assert name == "tests/test_package.py" or not re.search(
            r"'accordion_hvd\[|pip install accordion", text
        ), name
        found |= {x for words in re.findall(r"'\.\[([\w,-]+)\]'", text) for x in words.split(",")}
    assert {"torch", "privacy", "train", "trainers"} <= found <= known


def test_the_image_has_what_it_copies() -> None:
    """Files that .dockerignore lets through exist, and the image copies no others."""
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert allowed and all((ROOT / name).exists() for name in allowed)
    for words in re.findall(r"^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text(), re.M):
        assert set(words.split()[:-1]) <= {".", *allowed}


@pytest.mark.nightly
def test_a_users_script_passes_a_strict_type_checker(built: Path, tmp_path: Path) -> None:
    """With the wheel installed, mypy accepts the correct lines and flags each wrong line."""
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    others = Path(importlib.import_module("torch").__file__ or "").parent.parent
    (packages / "others.pth").write_text(f"{others}\n")
    script = tmp_path / "script.py"
    text = f"{SCRIPT}\nreveal_type(PowerSGD(4))\n{WRONG}"
    script.write_text(text)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = silent\n"
        "[mypy-numpy.*,tensorflow.*,keras.*,horovod.*]\nfollow_imports = skip\n"
        "ignore_missing_imports = True\n"
    )
    words = ["--strict", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, script.name],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert 'Revealed type is "accordion_hvd.compressors.powersgd.PowerSGD"' in done.stdout
    command = [python.with_name("accordion-hvd"), "--version"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.split()[-1] == accordion_hvd.__version__
    flagged = dict.fromkeys(int(x) for x in re.findall(r":(\d+): error:", done.stdout))
    lines = text.splitlines()
    assert [lines[number - 1] for number in flagged] == WRONG.split("\n")[1:-1], done.stdout
