"""Compressors, one file per method. A new compressor takes one file and one line here."""

from accordion_hvd.compressors.adacomp import AdaComp
from accordion_hvd.compressors.dense import BF16, FP16, Dense
from accordion_hvd.compressors.dgc import DGC
from accordion_hvd.compressors.diana import Diana
from accordion_hvd.compressors.double_squeeze import DoubleSqueeze
from accordion_hvd.compressors.ef21 import EF21
from accordion_hvd.compressors.int8 import Int8
from accordion_hvd.compressors.lgc import LGC
from accordion_hvd.compressors.natural import Natural
from accordion_hvd.compressors.onebit import OneBit
from accordion_hvd.compressors.powersgd import PowerSGD
from accordion_hvd.compressors.qsgd import QSGD
from accordion_hvd.compressors.randomk import RandomK
from accordion_hvd.compressors.scalecom import ScaleCom
from accordion_hvd.compressors.signsgd import EFSignSGD, SignSGD
from accordion_hvd.compressors.sketched_sgd import SketchedSGD
from accordion_hvd.compressors.stc import STC
from accordion_hvd.compressors.terngrad import TernGrad
from accordion_hvd.compressors.threshold import Threshold
from accordion_hvd.compressors.topk import TopK
from accordion_hvd.compressors.two_level import TwoLevel
from accordion_hvd.compressors.wrappers import ErrorFeedback, Gathered, Momentum

__all__ = [
    "AdaComp",
    "BF16",
    "DGC",
    "Dense",
    "Diana",
    "DoubleSqueeze",
    "EF21",
    "EFSignSGD",
    "ErrorFeedback",
    "FP16",
    "Gathered",
    "Int8",
    "LGC",
    "Momentum",
    "Natural",
    "OneBit",
    "PowerSGD",
    "QSGD",
    "RandomK",
    "STC",
    "ScaleCom",
    "SignSGD",
    "SketchedSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoLevel",
]
