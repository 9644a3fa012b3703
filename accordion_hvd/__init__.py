"""Communication-efficient distributed training on Horovod, for PyTorch and TensorFlow/Keras.

Importing this package loads no framework; `accordion_hvd.torch`, `accordion_hvd.tensorflow` and
`accordion_hvd.tensorflow.keras` stand in for Horovod's modules of these names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

__version__ = "0.2.0"

_CATALOGS = ("compressors", "policies", "averaging")  # all of their `__all__` is public
_HOME = {
    "core.base": (
        "Allgather",
        "Allreduce",
        "Alltoall",
        "Broadcast",
        "Compressor",
        "ExchangeGenerator",
        "Info",
        "Neighbours",
        "State",
        "Tensor",
    ),
    "core.codec": ("Codec",),
    "engine.ledger": (
        "CSV",
        "JsonLines",
        "Ledger",
        "MLflow",
        "Perfetto",
        "Sink",
        "TensorBoard",
        "WandB",
    ),
    "ops": ("namespace",),
    "ops.spec": ("Spec",),
    "privacy": ("BudgetSpent", "PrivacyBudget", "TopAgg"),
    "resolve": ("as_policy", "parse"),
    "simulation": ("simulate",),
}


@functools.cache
def _homes() -> dict[str, str]:
    homes = {name: module for module, names in _HOME.items() for name in names}
    for catalog in _CATALOGS:
        homes |= dict.fromkeys(importlib.import_module(f"{__name__}.{catalog}").__all__, catalog)
    return homes


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'accordion_hvd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def _home(name: str) -> str | None:
    """Return the module that defines a public name; None for submodules and unknown names."""
    listed = next((module for module, names in _HOME.items() if name in names), None)
    if listed or name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}"):
        return listed
    return _homes().get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
