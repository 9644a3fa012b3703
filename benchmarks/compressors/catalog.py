"""Compressors in usual settings, which the benchmarks of compressors measure."""

from __future__ import annotations

from accordion_hvd import compressors
from accordion_hvd.compressors import LGC, AdaComp
from accordion_hvd.core.base import Compressor
from accordion_hvd.resolve import parse

SETTINGS = """
Dense()
FP16()
BF16()
PowerSGD(1)
PowerSGD(4)
PowerSGD(4, alternate=True)
PowerSGD(4, wire='float16')
RandomK(0.01)
TopK(0.01)
TopK(0.01, 'float16')
STC(0.01)
TopAgg(200, None, 700.0, 0.1)
Threshold(3.0)
ScaleCom(0.01)
AdaComp(50)
AdaComp(500)
DGC(0.001)
LGC(0.001, dense=1, training=1)
SketchedSGD()
QSGD(4)
TernGrad()
Natural()
Int8()
SignSGD()
EFSignSGD()
OneBit()
ErrorFeedback(Natural())
EF21(TopK(0.01))
Diana(QSGD(4))
Gathered(EFSignSGD())
DoubleSqueeze(QSGD(4))
DoubleSqueeze(Int8())
DoubleSqueeze(EFSignSGD())
DoubleSqueeze(OneBit())
DoubleSqueeze(TopK(0.01))
Momentum(Natural())
TwoLevel(PowerSGD(1))
"""
"""Spec strings of several or other settings than those of `Compressor.summary`."""


def usual() -> tuple[Compressor, ...]:
    """Return the `SETTINGS`, and each compressor without one in the setting of its `summary`."""
    chosen = [parse(line) for line in SETTINGS.split("\n") if line]
    kinds = [getattr(compressors, name) for name in compressors.__all__]
    others = [parse(x.summary[0]) for x in kinds if not any(type(y) is x for y in chosen)]
    return (*chosen, *others)


CATALOG = usual()
"""The measured compressors, in the order of the tables."""


def first_usual_step(compressor: Compressor) -> int:
    """Return the first step whose messages are not those of a warm-up, nor of empty residuals."""
    return 2 if isinstance(compressor, AdaComp | LGC) else 0
