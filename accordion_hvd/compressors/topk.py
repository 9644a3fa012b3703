"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import check
from accordion_hvd.base import (
    Allgather,
    Compressor,
    Conversation,
    Info,
    Spec,
    State,
    Tensor,
)
from accordion_hvd.ops import namespace


def kept(ratio: float, size: int) -> int:
    """How many of `size` elements a `ratio` keeps: rounded down, but at least one."""
    return max(1, int(ratio * size))


@dataclass(frozen=True)
class TopK(Compressor):
    """Send the largest magnitudes of each tensor, keep the rest for later.

    Each rank sends the `ratio` of its elements that are largest, as int32 index and fp32 value
    (8 bytes an element), to all others; the mean is over ranks. What is not sent stays in the
    error and is added to the next gradient: average + error = gradient.

    Sent: 8 k (n - 1) bytes a rank in a ring of n ranks, so traffic grows with the ranks.

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; at least one element is.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        """Raises: ValueError when ratio is outside (0, 1]."""
        check.ratio(self, "ratio", self.ratio)

    def init(self, spec: Spec, info: Info) -> State:
        """`error`: what was not sent yet, a vector with the gradient's elements."""
        if spec.size >= 2**31:
            check.refuse(self, "size of " + info.name, spec.size, "below 2^31 (indices are int32)")
        return {"error": spec.zeros((spec.size,))}

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allgather of indices and values."""
        xp = namespace(grad)
        total = xp.accumulate(state["error"], xp.reshape(grad, (-1,)))
        size = xp.shape(total)[0]
        index = xp.largest_index(total, kept(self.ratio, size))
        values = xp.take(total, index)
        error = xp.clear(total, index)
        indices, parts = yield Allgather(index), Allgather(values)
        mean = xp.zeros((size,), "float32", xp.device(grad))
        for theirs, part in zip(indices, parts, strict=True):
            mean = xp.add_at(mean, theirs, part / info.size)
        return xp.reshape(mean, xp.shape(grad)), {"error": error}
