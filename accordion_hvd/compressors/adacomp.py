"""AdaComp: adaptive residual gradient compression (Chen et al., AAAI 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import Chosen, SparseCodec
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Codec, Message, Reader
from accordion_hvd.ops import indices, namespace

CONVOLUTIONAL, DENSE = 50, 500
"""The paper's numbers of elements per bin."""


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
        bin: number of elements per bin, the paper's L_T, from 1 to 16383. Default: None, the
            paper's bins: 50 for convolutional layers, and 500 for dense and recurrent layers.
            A weight of three or more dimensions counts as convolutional, which also holds for
            the attention weights of Keras; a weight of two dimensions, such as an embedding,
            counts as dense. A vector, or a tensor of unknown shape, gets bins of 500.

    Traffic: a rank that selects k elements sends (N - 1) (k + 4) bytes in a ring of N ranks. With
    bins of more than 63 elements (64 in the paper), elements take two bytes instead of one. A bin
    that sends nothing costs as much as one element. Ranks also exchange the sizes of their
    messages. After the first steps, which send more, bins of 50 send 40 times fewer bytes than
    dense, and bins of 500 about 200 times fewer. Because sizes depend on values, a TensorFlow
    graph calls Python, and on a GPU the selected indices are copied to the CPU.
    """

    summary = "AdaComp()", "0.1 n m (convolutions) or 0.02 n m, by allgather", "few ranks; no ratio"
    uneven: ClassVar[bool] = True

    bin: int | None = None

    def __post_init__(self) -> None:
        if self.bin is not None:
            check.integer(self, "bin", self.bin, least=1, most=indices.LONG)

    @property
    def width(self) -> int:
        """Return the number of elements per bin; 500 if it depends on the tensor's shape."""
        return DENSE if self.bin is None else self.bin

    def specialize(self, info: Info) -> Codec:
        if self.bin is not None:
            return self
        return replace(self, bin=CONVOLUTIONAL if len(info.shape) > 2 else DENSE)

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Return scales, indices and signs as bytes, and the sum.

        The residual and the gradient are separate arguments because the selection weighs them
        differently.
        """
        xp, shape = namespace(error), namespace(error).shape(error)
        total, index, scale = xp.accumulate_outgrown(error, x, self.width)
        values = xp.take(xp.reshape(total, (-1,)), index)
        signs = xp.pack_bins(index, values, shape, self.width)
        return (xp.concat([xp.to_bytes(scale), signs]),), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader]:
        """Return a parser of indices, and of signs times the scale of their row."""
        rows = math.prod(shape[:-1])

        def read(payload: Tensor) -> tuple[Chosen, Tensor]:
            xp = namespace(payload)
            if xp.shape(payload)[0] < 4 * rows:
                raise ValueError(f"{xp.shape(payload)[0]} bytes do not hold {rows} scales")
            scale = xp.from_bytes(payload[: 4 * rows], "float32", (rows,))
            index, signs = xp.unpack_bins(payload[4 * rows :], shape, self.width)
            values = signs * xp.take(scale, index // shape[-1])
            return (index, values), xp.invalid_index(index, math.prod(shape))

        return (read,)
