"""Hard-threshold sparsification with error feedback (Sahu et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import SparseCodec, decode, encode
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.codec import Message, Reader
from accordion_hvd.ops import namespace


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """Send what is at least as large as a value, keep the rest for later.

    How much is sent follows the gradient: much while it is large, nothing at all if nothing
    reaches the value. "Rethinking gradient sparsification as total error minimization" shows that,
    for the same number of elements sent over all of training, this keeps the smallest error.
    Average + error = gradient.

    Sent: by a rank that sends k elements, about 5.2 k (n - 1) bytes in a ring of n ranks, as with
    `TopK`; besides, ranks tell each other how much. As sizes are values, a TensorFlow graph calls
    Python for it, and a GPU is waited for.

    Args:
        value: the least magnitude of gradient + error that is sent, a number of at least 0;
            0 sends all that is not zero. The default is ours: useful values depend on the model.
    """

    uneven: ClassVar[bool] = True

    value: float = 0.01

    def __post_init__(self) -> None:
        """Raises: ValueError when value is no finite number of at least 0."""
        if not check.is_number(self.value) or self.value < 0:
            check.refuse(self, "value", self.value, "a number of at least 0")

    def encode_accumulating(self, error: Tensor, x: Tensor, info: Info) -> tuple[Message, Tensor]:
        """Positions and values, as one vector of bytes."""
        xp, size = namespace(error), math.prod(namespace(error).shape(error))
        total, index = xp.accumulate_reaching(error, x, self.value)
        return (encode(index, xp.take(xp.reshape(total, (-1,)), index), size),), total

    def readers(self, shape: tuple[int, ...]) -> tuple[Reader]:
        """Parse positions and values, however many."""
        return (partial(decode, size=math.prod(shape)),)
