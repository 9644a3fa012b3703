"""Communication-efficient distributed training on Horovod, for PyTorch and TensorFlow/Keras.

Importing this package loads no framework; `accordion_hvd.torch`, `accordion_hvd.tensorflow` and
`accordion_hvd.tensorflow.keras` stand in for Horovod's modules of these names.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__version__ = "0.1.0"

_SHELVES = ("compressors", "policy", "averaging")  # their own `__all__` says what is public
_HOME = {
    "base": (
        "Allgather",
        "Allreduce",
        "Alltoall",
        "Broadcast",
        "Compressor",
        "Conversation",
        "Info",
        "Neighbours",
        "Spec",
        "State",
        "Tensor",
    ),
    "ops": ("namespace",),
    "privacy": ("BudgetSpent", "PrivacyBudget", "TopAgg"),
    "resolve": ("parse",),
}


@functools.cache
def _homes() -> dict[str, str]:
    """Public names and the modules that define them; found when the first is asked for."""
    homes = {name: module for module, names in _HOME.items() for name in names}
    for shelf in _SHELVES:
        homes |= dict.fromkeys(importlib.import_module(f"{__name__}.{shelf}").__all__, shelf)
    return homes


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("_") or name not in _homes():
        raise AttributeError(f"module 'accordion_hvd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_homes()[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
