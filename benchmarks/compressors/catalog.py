"""Catalog of compressors in usual settings, with the bytes that each of them sends.

A compressor with a row in `CATALOG` appears in `docs/compressors.md` (written by `bytes_sent.py`)
and in the measurements of `kernels.py`. The benchmarks report compressors without a row as missing.
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
    DoubleSqueeze,
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
class CatalogRow:
    """A compressor and the bytes that a rank sends in a step.

    Attributes:
        compressor: compressor in a usual setting.
        moved: Python expression for the bytes that each rank sends. It may use n (ranks), d
            (elements), a and b (rows and columns of the gradient as a matrix), k (elements that the
            compressor selects), L (ranks per host), m (hosts), the arguments of the compressor
            and of its codec, and packed(k, d): bytes of k ascending positions below d (about 1.2 k
            for k = d / 100). Empty if the bytes depend on the gradients' values.
        local: number of ranks per host.
        after: number of steps before the counted one (warm-up steps send other messages).
    """

    compressor: Compressor
    moved: str
    local: int = 1
    after: int = 0


CATALOG = (
    CatalogRow(Dense(), "2*(n-1)/n * 4*d"),
    CatalogRow(FP16(), "2*(n-1)/n * 2*d"),
    CatalogRow(BF16(), "2*(n-1)/n * 2*d"),
    CatalogRow(PowerSGD(1), "2*(n-1)/n * 4*rank*(a+b)"),
    CatalogRow(PowerSGD(4), "2*(n-1)/n * 4*rank*(a+b)"),
    CatalogRow(PowerSGD(4, alternate=True), "2*(n-1)/n * 4*rank*(a+b)/2"),
    CatalogRow(PowerSGD(4, wire="float16"), "2*(n-1)/n * (4 + 2*rank*(a+b))"),
    CatalogRow(RandomK(0.01), "2*(n-1)/n * 4*k"),
    CatalogRow(TopK(0.01), "(n-1) * (4*k + packed(k, d))"),
    CatalogRow(TopK(0.01, "float16"), "(n-1) * (2*k + packed(k, d))"),
    CatalogRow(STC(0.01), "(n-1) * (4 + (k+7)//8 + packed(k, d))"),
    CatalogRow(TopAgg(200, None, 700.0, 0.1), "2*(n-1)/n * 2*d"),
    CatalogRow(Threshold(3.0), ""),
    CatalogRow(ScaleCom(0.01), "(n-1)/n * packed(k, d) + 2*(n-1)/n * 4*k"),
    CatalogRow(AdaComp(50), "", after=2),
    CatalogRow(AdaComp(500), "", after=2),
    CatalogRow(DGC(0.001), "(n-1) * (4*k + packed(k, d))"),
    CatalogRow(
        LGC(0.001, dense=1, training=1),
        "(n-1)/n * (4*k + 4) + 2*(n-1)/n * 16*((k - 31 + 15) // 16 + 1)",
        after=2,
    ),
    CatalogRow(SketchedSGD(), "2*(n-1)/n * 4*k*(rows*columns + candidates)"),
    CatalogRow(QSGD(4), "(n-1) * (bits*d/8 + 4*d/bucket)"),
    CatalogRow(
        TernGrad(), "(n-1)/n * d/4 + (n-1)/n * d/8 * ((2*n).bit_length() if n < 128 else 16)"
    ),
    CatalogRow(Natural(), "(n-1) * 9*d/8"),
    CatalogRow(Int8(), "(n-1) * (d + 4*d/block)"),
    CatalogRow(SignSGD(), "2 * (n-1)/n * d/8"),
    CatalogRow(EFSignSGD(), "(n-1) * (d/8 + 4)"),
    CatalogRow(OneBit(), "(n-1) * (d/8 + 8*b)"),
    CatalogRow(ErrorFeedback(Natural()), "(n-1) * 9*d/8"),
    CatalogRow(EF21(TopK(0.01)), "(n-1) * (4*k + packed(k, d))"),
    CatalogRow(Diana(QSGD(4)), "(n-1) * (bits*d/8 + 4*d/bucket)"),
    CatalogRow(Gathered(EFSignSGD()), "(n-1) * (d/8 + 4)"),
    CatalogRow(DoubleSqueeze(QSGD(4)), "2*(n-1)/n * (bits*d/8 + 4*d/bucket)"),
    CatalogRow(DoubleSqueeze(Int8()), "2*(n-1)/n * (d + 4*d/block)"),
    CatalogRow(DoubleSqueeze(EFSignSGD()), "2*(n-1)/n * (d/8 + 4*n)"),
    CatalogRow(DoubleSqueeze(OneBit()), "2*(n-1)/n * (d/8 + 8*n*(b//n + 1))"),
    CatalogRow(
        DoubleSqueeze(TopK(0.01)), "2*(n-1) * (4*((k+n//2)//n) + packed((k+n//2)//n, d//n))"
    ),
    CatalogRow(Momentum(Natural()), "(n-1) * 9*d/8"),
    CatalogRow(TwoLevel(PowerSGD(1)), "2*(L-1)/L * 4*d + 2*(m-1)/m * 4*(a/L+b)", local=2),
)
"""The measured compressors, in the order of the tables."""


def missing() -> list[str]:
    """Return the names of compressors without a row."""
    listed = {type(row.compressor).__name__ for row in CATALOG}
    return [name for name in compressors.__all__ if name not in listed]
