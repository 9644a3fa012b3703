"""Drop-in replacement for `horovod.torch`, with a `DistributedOptimizer` that compresses.

```python
import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD

hvd.init()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader)),
)
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accordion_hvd import check
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.torch import compressed
from accordion_hvd.torch import engines as _engines
from accordion_hvd.torch.compressed import *  # noqa: F403
from accordion_hvd.torch.functions import (
    AccordionBatchSampler,
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
    shutdown,
)
from accordion_hvd.torch.optimizer import DistributedOptimizer

__all__ = [
    "AccordionBatchSampler",
    "DistributedOptimizer",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "load_state",
    "save_state",
    "shutdown",
]
__all__ += compressed.__all__
_OURS = frozenset(__all__)
if not TYPE_CHECKING:
    del __all__  # `__getattr__` returns it, with the names of the engine


def __getattr__(name: str) -> Any:
    engine = _engines.interface()
    if name == "elastic" and _engines.coordinator() == "horovod":
        return importlib.import_module("accordion_hvd.torch.elastic")
    if name == "__all__":
        return __dir__()
    return check.attribute(__name__, engine, name)


def __dir__() -> list[str]:
    engine = {name for name in dir(_engines.interface()) if not name.startswith("_")}
    return sorted(engine | _OURS)
