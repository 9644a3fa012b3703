"""Communication-efficient distributed training on Horovod, for PyTorch and TensorFlow/Keras.

Importing this package loads no framework; `accordion_hvd.torch`, `accordion_hvd.tensorflow` and
`accordion_hvd.tensorflow.keras` stand in for Horovod's modules of these names.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "compressors": ("BF16", "FP16", "Dense", "PowerSGD", "RandomK", "TopK"),
    "policy": ("Accordion", "Fixed", "Policy", "Replay"),
    "base": (
        "Allgather",
        "Allreduce",
        "Alltoall",
        "Broadcast",
        "Compressor",
        "Conversation",
        "Info",
        "Spec",
        "State",
        "Tensor",
    ),
    "ops": ("namespace",),
    "words": ("parse",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'accordion_hvd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"accordion_hvd.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
