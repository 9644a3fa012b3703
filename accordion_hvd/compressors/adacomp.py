"""AdaComp: adaptive residual gradient compression (Chen et al., AAAI 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Chosen, SparseCodec
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Message, Reader
from accordion_hvd.ops import bins, namespace


@dataclass(frozen=True)
class AdaComp(SparseCodec):
    """In each bin of a tensor, send as many elements as are active; of each, only the sign.

    With r the error and g the gradient, G = r + g is cut into bins. Sent is each element whose
    magnitude, were g added once more (r + 2 g, the paper's factor), reaches the bin's largest
    |G|; so a bin may send several elements, or none. Every element stands for its sign of G times
    one scale for the tensor, the mean of the bins' largest |G|. What that leaves stays in the
    error: average + error = gradient. A bin of zeros sends nothing.

    Sent: by a rank that sends k elements, (n - 1) (k + 4) bytes in a ring of n ranks, or twice k
    in bins of more than 63 (the paper: more than 64), and the same for each bin that sends
    nothing; besides, ranks tell each other how much. About 5 elements a bin are sent after the
    first steps, which send more: 40 times less than dense for bins of 50, about 200 times less for
    bins of 500. As sizes are values, a TensorFlow graph calls Python for it, and on a GPU the
    chosen positions visit the host.

    Args:
        bin: elements of a bin, the paper's L_T: 50 for convolutions and 500 for dense and
            recurrent layers there; at most 16383. Use `overrides` to give layers their own.
    """

    uneven: ClassVar[bool] = True

    bin: int = 50

    def __post_init__(self) -> None:
        """Raises: ValueError when bin is no integer from 1 to 16383."""
        check.integer(self, "bin", self.bin, least=1, most=bins.LONG)

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Scales, positions and signs, as bytes; for the paper's choice, r and g count apart."""
        xp, shape = namespace(error), namespace(error).shape(error)
        total, index, scale = xp.accumulate_outgrown(error, x, self.bin)
        values = xp.take(xp.reshape(total, (-1,)), index)
        signs = xp.pack_bins(index, values, shape, self.bin)
        return (xp.concat([xp.to_bytes(scale), signs]),), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader]:
        """Parse positions, and signs times their row's scale."""
        rows = math.prod(shape[:-1])

        def read(payload: Tensor) -> tuple[Chosen, Tensor]:
            xp = namespace(payload)
            if xp.shape(payload)[0] < 4 * rows:
                raise ValueError(f"{xp.shape(payload)[0]} bytes do not hold {rows} scales")
            scale = xp.from_bytes(payload[: 4 * rows], "float32", (rows,))
            index, signs = xp.unpack_bins(payload[4 * rows :], shape, self.bin)
            values = signs * xp.take(scale, index // shape[-1])
            return (index, values), xp.invalid_index(index, math.prod(shape))

        return (read,)
