"""Drop-in replacement for `horovod.tensorflow.keras.elastic`, for Keras 3."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras.elastic as _horovod
from horovod.tensorflow.keras.elastic import *  # noqa: F403

from accordion_hvd.tensorflow.elastic import TensorFlowKerasState
from accordion_hvd.tensorflow.elastic import run as run


class KerasState(TensorFlowKerasState):
    """State of a Keras model and its optimizer; see `TensorFlowKerasState`."""


__all__ = sorted({*_horovod.__all__, "KerasState", "TensorFlowKerasState"})


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)
