"""Tests of the layers of imports: the package keeps the contracts, and mistakes are noticed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "accordion_hvd"
COMMAND = "from importlinter.cli import lint_imports_command as lint; lint()"
CONTRACTS = 7
MOST = 20  # entries at the top of the package

pytest.importorskip("importlinter")


def lint(tree: Path) -> tuple[int, str]:
    """Run import-linter on a tree with its own setup.cfg; return the exit status and the report."""
    command = [sys.executable, "-c", COMMAND, "--no-cache"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_the_package_keeps_to_what_is_declared() -> None:
    status, report = lint(ROOT)
    assert status == 0 and report.count("KEPT") == CONTRACTS, report


@pytest.mark.parametrize(
    ("file", "mistake", "broken"),
    [
        ("ops/indices.py", "from accordion_hvd.core import base", "Layers"),
        ("ops/indices.py", "def late():\n    import accordion_hvd.engine.layout", "Layers"),
        (
            "core/base.py",
            "if TYPE_CHECKING:\n    from accordion_hvd.policies import Policy",
            "Layers",
        ),
        ("compressors/topk.py", "from accordion_hvd.averaging.wagma import WAGMA", "Layers"),
        ("torch/reducer.py", "from accordion_hvd.simulation import simulate", "Layers"),
        ("nowhere.py", "", "Layers"),
        ("ops/indices.py", "def late():\n    from accordion_hvd.ops import numpy", "circle"),
        ("ops/indices.py", "if TYPE_CHECKING:\n    from accordion_hvd.ops import numpy", "circle"),
        ("comm/collectives.py", "from accordion_hvd.comm.packing import together", "circle"),
        ("engine/step.py", "def late():\n    import horovod.torch", "import Horovod"),
        ("torch/functions.py", "from horovod.torch import init", "import Horovod"),
        ("engine/step.py", "def late():\n    import torch", "name no framework"),
        ("engine/step.py", "from accordion_hvd.compressors import topk", "knows no compressor"),
        ("torch/reducer.py", "from accordion_hvd.privacy import TopAgg", "Nobody knows privacy"),
        ("graph/store.py", "from accordion_hvd.policies import Fixed", "Privacy and graph use"),
    ],
)
def test_mistakes_are_noticed(file: str, mistake: str, broken: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=ignored)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    path = tmp_path / PACKAGE.name / file
    path.write_text((path.read_text() if path.exists() else "") + f"\n\n{mistake}\n")
    status, report = lint(tmp_path)
    verdicts = re.findall(r"^(.+) (KEPT|BROKEN)", report, re.MULTILINE)
    found = [name for name, verdict in verdicts if verdict == "BROKEN"]
    assert status == 1 and len(verdicts) == CONTRACTS, report
    assert any(broken in name for name in found), report


def test_the_top_of_the_package_is_short() -> None:
    no_layers = {"__pycache__", "py.typed", "keras.py"}
    assert len({path.name for path in PACKAGE.iterdir()} - no_layers) <= MOST
