"""Ranks that start in a moment: processes that have imported the frameworks fork them.

Launchers stay the real ones; `fork_server.py` is what they start and what forks.
"""

from __future__ import annotations

import ast
import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent  # not resolved: a virtual environment's python is a link
FORK_SERVER = Path(__file__).with_name("fork_server.py")

_ALWAYS = ("numpy", "numpy.testing", "pytest")
_OF_TORCH = ("torch", "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.tensor")
_OF_TENSORFLOW = ("tensorflow", "keras")
_FRAMEWORKS = {
    "torch": (*_OF_TORCH, "accordion_hvd.torch"),
    "tensorflow": (*_OF_TENSORFLOW, "accordion_hvd.tensorflow"),
    "keras": (*_OF_TENSORFLOW, "accordion_hvd.tensorflow"),
}
"""A part of an imported name -> what a server imports for it."""


class ForkServer:
    """A process that has imported modules and forks ranks; see fork_server.py.

    Args:
        modules: names of modules.

    Attributes:
        running: all servers of this process.
    """

    running: ClassVar[list[ForkServer]] = []

    def __init__(self, modules: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks"))
        measured = [name for name in os.environ if name.startswith("COVERAGE_PROCESS_")]
        variables = {k: v for k, v in environment().items() if k not in measured}
        # A rank's own environment, which is longer, takes this one's place in /proc.
        variables["PADDING"] = " " * 16_000
        with open(self.folder / "output", "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(FORK_SERVER), "serve", str(self.folder / "socket"), *modules],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no server: {(self.folder / 'output').read_text()}")
        self.running.append(self)
        atexit.register(self.end)

    def program(self, words: Sequence[str]) -> list[str]:
        """Return the command by which a launcher starts a script as a forked rank."""
        socket = str(self.folder / "socket")
        return [sys.executable, "-I", "-S", str(FORK_SERVER), socket, *words]

    def seconds(self) -> float:
        """Return the CPU seconds of the server and of the ranks that have ended."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.running.remove(self)
        self.process.communicate()  # the end of its input ends it
        shutil.rmtree(self.folder)


@functools.cache
def fork_server(modules: tuple[str, ...]) -> ForkServer:
    return ForkServer(modules)


@functools.cache
def modules_of(script: Path) -> tuple[str, ...]:
    """Return what a server imports for a script: frameworks that it or files beside it import."""
    found = set(_ALWAYS)
    for node in ast.walk(ast.parse(script.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            parts, beside = name.split("."), script.with_name(f"{name.partition('.')[0]}.py")
            for framework in _FRAMEWORKS.keys() & parts:
                found |= set(_FRAMEWORKS[framework])
            if beside.exists():
                found |= set(modules_of(beside))
    return tuple(sorted(found))


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        # One thread runs an exchange in a graph, the other runs the operations that it calls.
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
