"""Tests of logging: the loggers, when a user sees messages, and that an import is silent."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TRAINING = """
import sys
import numpy as np
from accordion_hvd import Ledger, simulate
gradients = [{"w": np.ones((40, 50), np.float32)} for _ in range(2)]
world = simulate("topk", 2)
world.step(gradients)
exchange = world.exchanges[0]
exchange.ledger = Ledger(sys.argv[1])
exchange.ledger.attach(exchange)
for _ in range(9):
    world.step([gradients[0], {"w": gradients[1]["w"] * np.inf}])
assert exchange.skipped == 9
"""
CONFIGURE = """
import logging
logging.basicConfig(format="%(message)s")
logging.getLogger("accordion_hvd").setLevel(logging.INFO)
"""
SILENCE = "import logging; logging.getLogger('accordion_hvd').setLevel(logging.ERROR)"
ABSL = "import absl.logging; "


def run(code: str, *arguments: str) -> str:
    """Run code that writes nothing to its standard output; return its standard error."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "before, after, warnings, infos",
    [
        ("", "", 4, 0),
        ("", CONFIGURE, 4, 1),
        ("", SILENCE, 0, 0),
        ("import tensorflow", "", 4, 0),
        (ABSL, "absl.logging.warning('The root logger has a handler now.')", 4, 0),
        (ABSL, "absl.logging.use_absl_handler()" + CONFIGURE, 4, 1),
    ],
)
def test_each_message_appears_once(
    before: str, after: str, warnings: int, infos: int, tmp_path: Path
) -> None:
    """Each message appears once for each configuration of logging that enables its level.

    The messages are warnings after 1, 2, 4 and 8 of 9 skipped steps and, as Python ends, the path
    of the receipt.
    """
    for word in ("absl", "tensorflow"):
        if word in before:
            pytest.importorskip(word)
    told = run(f"{before}\n{after}\n{TRAINING}", str(tmp_path))
    assert told.count("a gradient of some rank was not finite") == warnings, told
    assert told.count(f"receipt of the communication: {tmp_path / 'receipt.html'}") == infos, told


IMPORTS = """
import importlib, logging, os, pkgutil
stderr = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
import horovod.tensorflow.keras, horovod.torch, keras, tensorflow, torch  # TensorFlow writes
os.dup2(stderr, 2)
logger = logging.getLogger("accordion_hvd")
handler = logging.StreamHandler()
logger.addHandler(handler)
logger.setLevel(logging.DEBUG)
import accordion_hvd
for module in pkgutil.walk_packages(accordion_hvd.__path__, "accordion_hvd."):
    importlib.import_module(module.name)
assert logger.handlers == [handler]
"""


@pytest.mark.nightly
def test_an_import_neither_prints_nor_logs() -> None:
    for name in ("torch", "tensorflow", "horovod"):
        pytest.importorskip(name)
    assert run(IMPORTS) == ""


def test_loggers_have_the_names_of_their_modules() -> None:
    """Loggers have the names of their modules, and no module of the library installs a handler.

    Ruff's rule T201 refuses calls of `print`.
    """
    found = 0
    for path in (ROOT / "accordion_hvd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                call = ast.unparse(node)
                assert not call.startswith("logging.basicConfig"), path
                assert ".addHandler(" not in call, path
                if call.startswith("logging.getLogger"):
                    found += 1
                    assert call == "logging.getLogger(__name__)", path
    assert found >= 10
