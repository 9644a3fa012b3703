"""The shelf as tables show it: each compressor in a usual setting, and what it moves.

A row of `SHELF` is all that a new compressor needs to appear in `docs/compressors.md` (written by
`volumes.py`) and in the measurements of `kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd.base import Compressor
from accordion_hvd.compressors import (
    BF16,
    FP16,
    Dense,
    PowerSGD,
    RandomK,
    SketchedSGD,
    TopK,
    TwoLevel,
)


@dataclass(frozen=True)
class Volume:
    """What a rank sends in a step, and receives.

    Attributes:
        compressor: in a usual setting.
        moved: bytes that each rank sends, a Python expression. It may use n (ranks), d (elements),
            a and b (rows and columns of the matrix that they form), k (elements that the
            compressor keeps of d), L (ranks a machine), m (machines), the compressor's arguments,
            and packed(k, d): bytes of k ascending positions below d (about 1.2 k for k = d / 100).
            Empty where it depends on the gradients' values.
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
    Volume(SketchedSGD(), "2*(n-1)/n * 4*k*(rows*columns + candidates)"),
    Volume(TwoLevel(PowerSGD(1)), "2*(L-1)/L * 4*d + 2*(m-1)/m * 4*(a/L+b)", local=2),
)
"""Every compressor, in the order of the tables."""
