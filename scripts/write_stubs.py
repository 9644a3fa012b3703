"""Write the signatures of the compressed optimizers for type checkers and editors.

`python scripts/write_stubs.py` writes `accordion_hvd/torch/compressed.pyi` and
`accordion_hvd/tensorflow/keras/compressed.pyi` from the signatures at run time. It needs both
frameworks and ruff.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HEADS = {
    "torch": """
from collections.abc import Iterable, Sequence

import torch

from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.guard import Mode
from accordion_hvd.policies import Policy
from accordion_hvd.torch.optimizers import CompressedOptimizer, Parameters
""",
    "tensorflow.keras": """
from collections.abc import Sequence

import keras

from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.guard import Mode
from accordion_hvd.policies import Policy
from accordion_hvd.tensorflow.keras.optimizers import CompressedOptimizer
""",
}
"""Imports of each framework's stub."""


def main() -> None:
    """Write both stubs."""
    for framework in HEADS:
        path = path_of(framework)
        command = ["ruff", "format", "--quiet", "--stdin-filename", str(path), "-"]
        command = [sys.executable, "-m", *command]
        done = subprocess.run(
            command, input=stub(framework), capture_output=True, text=True, check=True, cwd=ROOT
        )
        path.write_text(done.stdout)


def path_of(framework: str) -> Path:
    """Return the path of a framework's stub."""
    return ROOT.joinpath("accordion_hvd", *framework.split("."), "compressed.pyi")


def stub(framework: str) -> str:
    """Return the text of a framework's stub, not formatted."""
    module = importlib.import_module(f"accordion_hvd.{framework}.compressed")
    parts = [
        _class(kind) if name == kind.__name__ else f"{name} = {kind.__name__}\n"
        for name, kind in sorted(module.NATIVE.items(), key=lambda item: item[1].__name__)
    ]
    docstring = '"""Signatures of the compressed optimizers; scripts/write_stubs.py writes them."""'
    names = f"__all__ = {module.__all__}\n\nNATIVE: dict[str, type[CompressedOptimizer]]\n"
    return "\n".join([docstring, HEADS[framework], names, *parts])


def _class(kind: Any) -> str:
    summary = inspect.cleandoc(kind.__doc__).partition("\n")[0]
    arguments = _arguments(inspect.signature(kind))
    return (
        f'class {kind.__name__}(CompressedOptimizer):\n    """{summary}"""\n\n'
        f"    def __init__(self, {arguments}) -> None: ...\n"
    )


def _arguments(signature: inspect.Signature) -> str:
    """Return the arguments of a signature as source, with annotations and defaults."""
    words: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        word = f"{parameter.name}: {parameter.annotation}"
        if parameter.default is not parameter.empty:
            word += f" = {parameter.default!r}"
        words.append(word)
    return ", ".join(words)


if __name__ == "__main__":
    main()
