"""Drop-in replacement for `horovod.tensorflow.keras`, for Keras 3.

```python
import accordion_hvd.tensorflow.keras as hvd
from accordion_hvd import Accordion, PowerSGD

hvd.init()
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.1), compression=Accordion(low=PowerSGD(4), high=PowerSGD(1))
)
model.compile(optimizer, loss="mse")
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accordion_hvd import check
from accordion_hvd.comm.horovod.keras import hvd as _horovod
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.tensorflow.functions import broadcast_global_variables, init
from accordion_hvd.tensorflow.keras import callbacks, compressed, elastic
from accordion_hvd.tensorflow.keras.callbacks import AccordionDataset
from accordion_hvd.tensorflow.keras.compressed import *  # noqa: F403
from accordion_hvd.tensorflow.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from accordion_hvd.tensorflow.keras.saving import load_model

__all__ = [
    "AccordionDataset",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "init",
    "load_model",
    "load_state",
    "save_state",
]
__all__ += compressed.__all__
if not TYPE_CHECKING:  # `__getattr__` returns more names, without types
    __all__ = sorted({name for name in dir(_horovod) if not name.startswith("_")} | set(__all__))


def __getattr__(name: str) -> Any:
    return check.attribute(__name__, _horovod, name)


def __dir__() -> list[str]:
    return __all__
