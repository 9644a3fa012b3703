"""1-bit SGD (Seide, Fu, Droppo, Li & Yu, Interspeech 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd.compressors.powersgd import matrix_shape
from accordion_hvd.core.base import Allgather, Compressor, Conversation, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class OneBit(Compressor):
    """One bit an element and two values a column, with error feedback.

    Of gradient + error, seen as a matrix, each element is told to be negative or not (threshold
    zero, as in the paper), and each column the means of its negative elements and of the others,
    which minimise the squared error. What that leaves waits in the error. The matrix is that of
    `PowerSGD`: (n, m), whose columns have n elements.

    The paper's ranks each add one slice and send its sum on in one bit again; here (ours) all
    ranks get all bits and add them alike, so the mean has no second error.

    Sent: an allgather of n m / 8 + 8 m bytes a matrix, so traffic grows with the ranks.
    """

    stacks: ClassVar[str] = "alike"
    contracts: ClassVar[bool] = True

    def init(self, spec: Spec, info: Info) -> State:
        """`error` (n, m): what was not sent yet."""
        return super().init(spec, info) | {"error": spec.zeros(matrix_shape(spec.shape))}

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allgather of bits and of the columns' values."""
        xp = namespace(grad)
        matrix = xp.reshape(grad, xp.shape(state["error"]))
        total = xp.accumulate(state["error"], matrix)
        bits = xp.pack_signs(total)
        means = xp.column_means(total, bits)  # (2, m)
        parts, theirs = yield Allgather(bits), Allgather(means)
        theirs = [mean * (1 / info.size) for mean in theirs]
        mean = xp.sum_columns(parts, theirs, matrix)
        error = xp.subtract_columns(total, bits, means)
        return xp.reshape(mean, xp.shape(grad)), {"error": error}
