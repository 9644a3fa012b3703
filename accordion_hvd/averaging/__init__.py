"""Averaging of models instead of gradients: one file a method."""

from accordion_hvd.averaging.diloco import DiLoCo, Nesterov
from accordion_hvd.averaging.local_sgd import LocalSGD
from accordion_hvd.averaging.wagma import WAGMA

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "WAGMA"]
