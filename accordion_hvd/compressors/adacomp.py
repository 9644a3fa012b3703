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
    """Adaptive residual compression: send the signs of the most active elements of each bin.

    Each rank cuts its tensor into bins, selects the active elements of each bin, and sends their
    indices and signs with one scale per tensor. All ranks gather all messages and average them.
    The parts that a rank did not send stay in its residual.

    With residual r and gradient g, a rank computes G = r + g and selects each element with
    |r + 2 g| >= max |G| over its bin (2 is the paper's factor). A bin may thus send several
    elements or none, and a bin of zeros sends none. Each selected element is sent as sign(G) times
    the scale, which is the mean of the bins' largest |G|. Then r <- G - (the values sent), so
    nothing is lost.

    Args:
        bin: number of elements per bin, the paper's L_T, from 1 to 16383. The paper uses 50 for
            convolutions and 500 for dense and recurrent layers. `overrides` sets the bin of
            single layers.

    Traffic: a rank that selects k elements sends (N - 1) (k + 4) bytes in a ring of N ranks. With
    bins of more than 63 elements (64 in the paper), elements take two bytes instead of one. A bin
    that sends nothing costs as much as one element. Ranks also exchange the sizes of their
    messages. After the first steps, which send more, bins of 50 send 40 times fewer bytes than
    dense, and bins of 500 about 200 times fewer. Because sizes depend on values, a TensorFlow
    graph calls Python, and on a GPU the selected indices are copied to the CPU.
    """

    uneven: ClassVar[bool] = True

    bin: int = 50

    def __post_init__(self) -> None:
        """Raise ValueError if `bin` is not an integer from 1 to 16383."""
        check.integer(self, "bin", self.bin, least=1, most=bins.LONG)

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return scales, indices and signs as bytes, and the sum.

        The residual and the gradient are separate arguments because the selection weighs them
        differently.
        """
        xp, shape = namespace(error), namespace(error).shape(error)
        total, index, scale = xp.accumulate_outgrown(error, x, self.bin)
        values = xp.take(xp.reshape(total, (-1,)), index)
        signs = xp.pack_bins(index, values, shape, self.bin)
        return (xp.concat([xp.to_bytes(scale), signs]),), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader]:
        """Return a parser of indices, and of signs times the scale of their row."""
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
