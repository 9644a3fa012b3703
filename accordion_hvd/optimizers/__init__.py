"""Update rules of optimizers that communicate quantities other than gradients, one file per paper.

This package contains the algorithms. Training scripts use the optimizers of the same names in
`accordion_hvd.torch` and `accordion_hvd.tensorflow.keras`.
"""

from accordion_hvd.optimizers.base import Adam, AMSGrad, UpdateRule
from accordion_hvd.optimizers.birder import Birder
from accordion_hvd.optimizers.cd_adam import CDAdam, CDAMSGrad
from accordion_hvd.optimizers.onebit_adam import OnebitAdam
from accordion_hvd.optimizers.onebit_lamb import Lamb, OnebitLamb
from accordion_hvd.optimizers.sketched_amsgrad import SketchedAMSGrad
from accordion_hvd.optimizers.zero_one_adam import ZeroOneAdam

__all__ = [
    "AMSGrad",
    "Adam",
    "Birder",
    "CDAMSGrad",
    "CDAdam",
    "Lamb",
    "OnebitAdam",
    "OnebitLamb",
    "UpdateRule",
    "SketchedAMSGrad",
    "ZeroOneAdam",
]

ALIASES = {"CDAMSGrad": "CDAdam"}
NATIVE = [name for name in __all__ if name[0].isupper() and name not in ("UpdateRule", *ALIASES)]
"""Rules for which each framework has an optimizer of the same name."""
