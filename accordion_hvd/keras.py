"""A second name of `accordion_hvd.tensorflow.keras`, as Horovod has `horovod.keras`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accordion_hvd.tensorflow import keras

if TYPE_CHECKING:
    from accordion_hvd.tensorflow.keras import *  # noqa: F403

# Otherwise an import of `accordion_hvd.keras.callbacks` would load its file a second time.
for _name in [name for name in sys.modules if name.startswith(f"{keras.__name__}.")]:
    sys.modules[__name__ + _name.removeprefix(keras.__name__)] = sys.modules[_name]
sys.modules[__name__] = keras
