"""Optimizers that exchange something else than gradients: one file per paper.

Here are the algorithms; `accordion_hvd.torch` and `accordion_hvd.tensorflow.keras` have optimizers
of the same names, which are what a training script uses.
"""

from accordion_hvd.optimizers.adam import Adam, AMSGrad
from accordion_hvd.optimizers.base import Rule
from accordion_hvd.optimizers.onebit_adam import OnebitAdam
from accordion_hvd.optimizers.onebit_lamb import Lamb, OnebitLamb
from accordion_hvd.optimizers.zero_one_adam import ZeroOneAdam

__all__ = ["AMSGrad", "Adam", "Lamb", "OnebitAdam", "OnebitLamb", "Rule", "ZeroOneAdam"]
