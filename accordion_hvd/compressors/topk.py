"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd.base import Allgather, Conversation, Info, State, Tensor
from accordion_hvd.compressors.sparsifier import Sparsifier
from accordion_hvd.ops import namespace


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Send the largest magnitudes of each tensor, keep the rest for later.

    Each rank sends the `ratio` of its elements that are largest, as int32 index and fp32 value
    (8 bytes an element), to all others; the mean is over ranks. What is not sent stays in the
    error and is added to the next gradient: average + error = gradient.

    Sent: 8 k (n - 1) bytes a rank in a ring of n ranks, so traffic grows with the ranks.

    Args:
        ratio: the part of the elements that is sent, in (0, 1]; at least one element is.
    """

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allgather of indices and values."""
        xp = namespace(grad)
        total = xp.accumulate(state["error"], xp.reshape(grad, (-1,)))
        size = xp.shape(total)[0]
        index = xp.largest_index(total, self.kept(size))
        values = xp.take(total, index)
        error = xp.clear(total, index)
        indices, parts = yield Allgather(index), Allgather(values)
        mean = xp.zeros((size,), "float32", xp.device(grad))
        for theirs, part in zip(indices, parts, strict=True):
            mean = xp.add_at(mean, theirs, part / info.size)
        return xp.reshape(mean, xp.shape(grad)), {"error": error}
