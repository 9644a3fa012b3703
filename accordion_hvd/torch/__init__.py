"""Stands in for `horovod.torch`: its names, and a `DistributedOptimizer` that compresses.

```python
import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD

hvd.init()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=Accordion(low=PowerSGD(4), high=PowerSGD(1), window=steps_per_epoch),
)
```
"""

from __future__ import annotations

import importlib
from typing import Any

import horovod.torch as _horovod
from horovod.torch import *  # noqa: F403

from accordion_hvd.checkpoint import load_state, save_state
from accordion_hvd.torch.batches import AccordionBatchSampler
from accordion_hvd.torch.functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
)
from accordion_hvd.torch.optimizer import DistributedOptimizer
from accordion_hvd.torch.optimizers import NATIVE

elastic = importlib.import_module(f"{__name__}.elastic")  # the star has bound Horovod's
_OURS = {
    "AccordionBatchSampler": AccordionBatchSampler,
    "DistributedOptimizer": DistributedOptimizer,
    "broadcast_optimizer_state": broadcast_optimizer_state,
    "broadcast_parameters": broadcast_parameters,
    "elastic": elastic,
    "init": init,
    "load_state": load_state,
    "save_state": save_state,
    **NATIVE,
}
globals().update(NATIVE)
__all__ = sorted({name for name in dir(_horovod) if not name.startswith("_")} | set(_OURS))


def __getattr__(name: str) -> Any:
    """Whatever else Horovod has."""
    return getattr(_horovod, name)
