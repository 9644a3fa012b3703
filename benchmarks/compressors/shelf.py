"""The shelf as tables show it: each compressor in a usual setting, and what it moves.

A row of `SHELF` is all that a compressor needs to appear in `docs/compressors.md` (written by
`volumes.py`) and in the measurements of `kernels.py`. A new compressor gets its row when it is
measured; until then the benchmarks name it as missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import compressors
from accordion_hvd.compressors import (
    BF16,
    DGC,
    EF21,
    FP16,
    LGC,
    QSGD,
    STC,
    AdaComp,
    Dense,
    Diana,
    EFSignSGD,
    ErrorFeedback,
    Gathered,
    Int8,
    Momentum,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    ScaleCom,
    SignSGD,
    SketchedSGD,
    TernGrad,
    Threshold,
    TopK,
    TwoLevel,
)
from accordion_hvd.core.base import Compressor
from accordion_hvd.privacy.topagg import TopAgg


@dataclass(frozen=True)
class Volume:
    """What a rank sends in a step, and receives.

    Attributes:
        compressor: in a usual setting.
        moved: bytes that each rank sends, a Python expression. It may use n (ranks), d (elements),
            a and b (rows and columns of the matrix that they form), k (elements that the
            compressor keeps of d), L (ranks a machine), m (machines), the arguments of the
            compressor and of the codec in it, and packed(k, d): bytes of k ascending positions
            below d (about 1.2 k for k = d / 100). Empty where it depends on the gradients' values.
        local: ranks a machine.
        after: steps before the one that is counted (warm-ups send something else).
    """

    compressor: Compressor
    moved: str
    local: int = 1
    after: int = 0


SHELF = (
    Volume(Dense(), "2*(n-1)/n * 4*d"),
    Volume(FP16(), "2*(n-1)/n * 2*d"),
    Volume(BF16(), "2*(n-1)/n * 2*d"),
    Volume(PowerSGD(1), "2*(n-1)/n * 4*rank*(a+b)"),
    Volume(PowerSGD(4), "2*(n-1)/n * 4*rank*(a+b)"),
    Volume(RandomK(0.01), "2*(n-1)/n * 4*k"),
    Volume(TopK(0.01), "(n-1) * (4*k + packed(k, d))"),
    Volume(TopK(0.01, "float16"), "(n-1) * (2*k + packed(k, d))"),
    Volume(STC(0.01), "(n-1) * (4 + (k+7)//8 + packed(k, d))"),
    Volume(TopAgg(200, None, 700.0, 0.1), "2*(n-1)/n * 2*d"),
    Volume(Threshold(3.0), ""),
    Volume(ScaleCom(0.01), "(n-1)/n * packed(k, d) + 2*(n-1)/n * 4*k"),
    Volume(AdaComp(), "", after=2),
    Volume(AdaComp(500), "", after=2),
    Volume(DGC(0.001), "(n-1) * (4*k + packed(k, d))"),
    Volume(
        LGC(0.001, dense=1, training=1),
        "2*(n-1)/n * (4*k + 4 + 16*((k - 31 + 15) // 16 + 1))",
        after=2,
    ),
    Volume(SketchedSGD(), "2*(n-1)/n * 4*k*(rows*columns + candidates)"),
    Volume(QSGD(4), "(n-1) * (bits*d/8 + 4*d/bucket)"),
    Volume(TernGrad(), "(n-1)/n * d/4 + (n-1)/n * d/8 * (2*n).bit_length()"),
    Volume(Natural(), "(n-1) * 9*d/8"),
    Volume(Int8(), "(n-1) * (d + 4*d/block)"),
    Volume(SignSGD(), "2 * (n-1)/n * d/8"),
    Volume(EFSignSGD(), "(n-1) * (d/8 + 4)"),
    Volume(OneBit(), "(n-1) * (d/8 + 8*b)"),
    Volume(ErrorFeedback(Natural()), "(n-1) * 9*d/8"),
    Volume(EF21(TopK(0.01)), "(n-1) * (4*k + packed(k, d))"),
    Volume(Diana(QSGD(4)), "(n-1) * (bits*d/8 + 4*d/bucket)"),
    Volume(Gathered(EFSignSGD()), "(n-1) * (d/8 + 4)"),
    Volume(Momentum(Natural()), "(n-1) * 9*d/8"),
    Volume(TwoLevel(PowerSGD(1)), "2*(L-1)/L * 4*d + 2*(m-1)/m * 4*(a/L+b)", local=2),
)
"""The measured compressors, in the order of the tables."""


def missing() -> list[str]:
    """Return the names of compressors that have no row yet."""
    listed = {type(volume.compressor).__name__ for volume in SHELF}
    return [name for name in compressors.__all__ if name not in listed]
