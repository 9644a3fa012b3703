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
    """One bit an element and two values a column, with error feedback.

    Of gradient + error, seen as a matrix, each element is told to be negative or not (threshold
    zero, as in the paper), and each column the means of its negative elements and of the others,
    which minimise the squared error. What that leaves waits in the error. The matrix is that of
    `PowerSGD`: (n, m), whose columns have n elements.

    The paper's ranks each add one slice and send its sum on in one bit again; here (ours) all
    ranks get all bits and add them alike, so the mean has no second error.

    Sent: an allgather of n m / 8 + 8 m bytes a matrix, so traffic grows with the ranks.
    """

    batching: ClassVar[str] = "alike"
    contractive: ClassVar[bool] = True

    def layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return (n, m)."""
        return matrix_shape(shape)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Bits and the columns' values, (2, m)."""
        xp = namespace(x)
        bits = xp.pack_signs(x)
        return bits, xp.column_means(x, bits)

    def mean(self, messages: Sequence[Message], like: Tensor, info: Info) -> Tensor:
        """Add up the values of the bits."""
        return namespace(like).sum_columns(*shares(messages), like)

    def remove(self, total: Tensor, message: Message, info: Info) -> Tensor:
        """Subtract in place."""
        return namespace(total).subtract_columns(total, *message)
