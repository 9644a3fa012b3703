"""Drop-in replacement for `horovod.tensorflow`, with an optimizer and a tape that compress.

```python
import accordion_hvd.tensorflow as hvd
from accordion_hvd import PowerSGD

hvd.init()
with tf.GradientTape() as tape:
    loss = ...
tape = hvd.DistributedGradientTape(tape, compression=PowerSGD(2))
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accordion_hvd import check
from accordion_hvd.comm.horovod.tensorflow import hvd as _horovod
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.tensorflow import elastic
from accordion_hvd.tensorflow.functions import broadcast_global_variables, broadcast_variables, init
from accordion_hvd.tensorflow.optimizer import DistributedOptimizer
from accordion_hvd.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "broadcast_global_variables",
    "broadcast_variables",
    "elastic",
    "init",
    "load_state",
    "save_state",
]
if not TYPE_CHECKING:  # `__getattr__` returns more names, without types
    __all__ = sorted({name for name in dir(_horovod) if not name.startswith("_")} | set(__all__))


def __getattr__(name: str) -> Any:
    return check.attribute(__name__, _horovod, name)


def __dir__() -> list[str]:
    return __all__
