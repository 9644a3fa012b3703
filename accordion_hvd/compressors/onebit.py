"""1-bit SGD (Seide, Fu, Droppo, Li & Yu, Interspeech 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.compressors.powersgd import matrix_shape
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Codec, Message, shares
from accordion_hvd.ops import namespace


@dataclass(frozen=True)
class OneBit(Codec):
    """1-bit SGD: one bit per element and two values per column, with error feedback.

    Each rank views residual + gradient as a matrix. It sends one bit per element, which says
    whether the element is negative, and two fp32 values per column. All ranks gather all messages
    and average them; each rank adds its quantization error to its next gradient.

    The two values of a column are the means of its negative elements and of its other elements,
    which minimize the squared error for the paper's threshold of zero. The matrix is that of
    `PowerSGD`: (n, m), with n elements per column.

    In the paper, each rank adds up one slice and sends its sum in one bit again, which is
    `DoubleSqueeze(OneBit())`. Here (ours) all ranks receive all bits, and the mean is exact.

    Traffic: an allgather of n m / 8 + 8 m bytes per matrix, so traffic grows with the number of
    ranks.
    """

    summary = "OneBit()", "n m / 8 + 8 m, by allgather", "few ranks"
    batching = "alike"
    contractive: ClassVar[bool] = True
    codes: ClassVar[tuple[int, ...]] = (1,)

    def layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return matrix_shape(shape)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the bits, and the values of the columns with shape (2, m)."""
        xp = namespace(x)
        bits = xp.pack_signs(x)
        return bits, xp.column_means(x, bits)

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        return namespace(like).sum_columns(*shares(messages), like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        return namespace(total).subtract_columns(total, *message)
