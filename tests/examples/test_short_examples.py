"""Tests of the short examples: each starts as its docstring says, learns, and sends fewer bytes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import BIN, PATIENT, forked_command, need

from benchmarks import processes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("pytorch/*.py"), *EXAMPLES.glob("keras/*.py")])
DAILY = ("pytorch-with_ddp",)
"""Examples that `make test` starts, beside the README's trainings; `make test-all` starts all."""

LINE = re.compile(r"^    (\S.*examples/\w+/\w+\.py)$", re.MULTILINE)
RESULT = re.compile(
    r"test (accuracy|loss) ([\d.]+)%?, ([\d.]+) MB (?:sent|received) instead of ([\d.]+) MB"
)
LAUNCHERS = {"torchrun": "torchrun", "horovodrun": "gloo", "mpirun": "mpirun"}
PACKAGES = {
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_ray_train": "ray.train.torch",
}


def names(paths: list[Path]) -> list[str]:
    return [f"{path.parent.name}-{path.stem}" for path in paths]


def commands(script: Path) -> list[list[str]]:
    """Return the launch commands of a script's docstring, each as a list of words."""
    text = ast.get_docstring(ast.parse(script.read_text()), clean=False) or ""
    return [shlex.split(line) for line in LINE.findall(text)]


@pytest.mark.parametrize("script", SCRIPTS, ids=names(SCRIPTS))
def test_examples_are_short_and_listed(script: Path) -> None:
    place = f"examples/{script.parent.name}/{script.name}"
    assert len(script.read_text().splitlines()) < 80
    assert commands(script) and all(words[-1] == place for words in commands(script))
    assert f"({script.parent.name}/{script.name})" in (EXAMPLES / "README.md").read_text()


def start(words: list[str], folder: Path, text: Path) -> str:
    """Run a launch command of a docstring in a folder of its own; return its output."""
    launcher, script = words[0], str(ROOT / words[-1])
    program = [script, str(text)] if "language_model" in script else [script]
    if launcher == "python":
        command = [sys.executable, *program]
    else:
        if launcher == "mpirun":
            pytest.importorskip("mpi4py")
        need(LAUNCHERS[launcher])
        ranks = next(int(word) for word in words if word.isdigit())
        command = forked_command(LAUNCHERS[launcher], ranks, program)
    environment = {
        **os.environ,
        **PATIENT,
        "CHECK_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(200)
        finally:
            processes.end(process, "CHECK_FOLDER", str(folder))
        output.seek(0)
        told = output.read()
    assert status == 0, told[-3000:]
    return told


@pytest.mark.launch
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[] if name in DAILY else [pytest.mark.nightly], id=name)
        for path, name in zip(SCRIPTS, names(SCRIPTS), strict=True)
    ],
)
def test_examples_run_as_they_are(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip(PACKAGES.get(script.stem, "torch"))
    text = tmp_path / "text.txt"
    text.write_text("".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    for words in commands(script):
        found = RESULT.search(start(words, tmp_path, text))
        assert found is not None
        kind, value, sent, dense = found[1], *map(float, found.groups()[1:])
        assert value < 3.5 if kind == "loss" else value > 75
        assert 0 < sent < dense


@pytest.mark.nightly
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accordion sends fewer bytes than its low level, and some layers change their level."""
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    cells = json.loads((EXAMPLES / "simulation.ipynb").read_text())["cells"]
    scope: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "simulation.ipynb", "exec"), scope)
    sent = {name: rows[-1][1] for name, rows in scope["runs"].items()}
    assert sent["PowerSGD(1)"] < sent["Accordion"] < sent["PowerSGD(4)"]
    assert len({tuple(row) for row in zip(*scope["mild"], strict=True)}) > 1
