"""Drop-in replacement for `horovod.torch`, with a `DistributedOptimizer` that compresses.

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

from typing import Any

from accordion_hvd.comm.horovod.torch import hvd as _horovod
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.torch import elastic
from accordion_hvd.torch.batches import AccordionBatchSampler
from accordion_hvd.torch.functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
)
from accordion_hvd.torch.optimizer import DistributedOptimizer
from accordion_hvd.torch.optimizers import NATIVE

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
    """Return any other name from `horovod.torch`."""
    return getattr(_horovod, name)


def __dir__() -> list[str]:
    return __all__
