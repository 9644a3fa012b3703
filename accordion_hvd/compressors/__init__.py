"""The shelf: one file per method. A new compressor is one file and one line here."""

from accordion_hvd.compressors.dense import Dense
from accordion_hvd.compressors.half import BF16, FP16
from accordion_hvd.compressors.lgc import LGC
from accordion_hvd.compressors.powersgd import PowerSGD
from accordion_hvd.compressors.randomk import RandomK
from accordion_hvd.compressors.topk import TopK
from accordion_hvd.compressors.two_level import TwoLevel

__all__ = ["BF16", "FP16", "LGC", "Dense", "PowerSGD", "RandomK", "TopK", "TwoLevel"]
