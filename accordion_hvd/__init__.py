"""Communication-efficient distributed training on Horovod, for PyTorch and TensorFlow/Keras.

Importing this package loads no framework; `accordion_hvd.torch`, `accordion_hvd.tensorflow` and
`accordion_hvd.tensorflow.keras` stand in for Horovod's modules of these names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` returns
    from accordion_hvd.averaging import *  # noqa: F403
    from accordion_hvd.compressors import *  # noqa: F403
    from accordion_hvd.core.base import Allgather as Allgather
    from accordion_hvd.core.base import Allreduce as Allreduce
    from accordion_hvd.core.base import Alltoall as Alltoall
    from accordion_hvd.core.base import Broadcast as Broadcast
    from accordion_hvd.core.base import Compressor as Compressor
    from accordion_hvd.core.base import ExchangeGenerator as ExchangeGenerator
    from accordion_hvd.core.base import Info as Info
    from accordion_hvd.core.base import Neighbours as Neighbours
    from accordion_hvd.core.base import State as State
    from accordion_hvd.core.base import Tensor as Tensor
    from accordion_hvd.core.codec import Codec as Codec
    from accordion_hvd.engine.ledger import CSV as CSV
    from accordion_hvd.engine.ledger import JsonLines as JsonLines
    from accordion_hvd.engine.ledger import Ledger as Ledger
    from accordion_hvd.engine.ledger import MLflow as MLflow
    from accordion_hvd.engine.ledger import Perfetto as Perfetto
    from accordion_hvd.engine.ledger import Sink as Sink
    from accordion_hvd.engine.ledger import TensorBoard as TensorBoard
    from accordion_hvd.engine.ledger import WandB as WandB
    from accordion_hvd.ops import namespace as namespace
    from accordion_hvd.ops.spec import Spec as Spec
    from accordion_hvd.policies import *  # noqa: F403
    from accordion_hvd.privacy import BudgetSpent as BudgetSpent
    from accordion_hvd.privacy import PrivacyBudget as PrivacyBudget
    from accordion_hvd.privacy import TopAgg as TopAgg
    from accordion_hvd.resolve import as_policy as as_policy
    from accordion_hvd.resolve import parse as parse
    from accordion_hvd.simulation import simulate as simulate

__version__ = "0.1.0"

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


if not TYPE_CHECKING:  # else type checkers would accept any name

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
