"""Hard-threshold sparsification with error feedback (Sahu et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.sparsifier import decode, encode, mean_of
from accordion_hvd.core.base import Allgather, Compressor, Conversation, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class Threshold(Compressor):
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

    stacks: ClassVar[str] = "alike"

    value: float = 0.01

    def __post_init__(self) -> None:
        """Raises: ValueError when value is no finite number of at least 0."""
        if not check.is_number(self.value) or self.value < 0:
            check.refuse(self, "value", self.value, "a number of at least 0")

    def init(self, spec: Spec, info: Info) -> State:
        """`error`: what was not sent yet, a vector with the gradient's elements."""
        return super().init(spec, info) | {"error": spec.zeros((spec.size,))}

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allgather of positions and values, of another length on each rank."""
        xp = namespace(grad)
        shape = xp.shape(state["error"])  # (size,); several tensors: (number, size)
        size = math.prod(shape)
        fresh = xp.reshape(grad, shape)
        total, index = xp.accumulate_reaching(state["error"], fresh, self.value)
        total = xp.reshape(total, (-1,))
        values = xp.take(total, index)
        error = xp.clear(total, index)
        payload = encode(index, values, size)
        parts = yield Allgather(payload, uneven=True, decode=partial(decode, size=size))
        return mean_of(parts, grad), {"error": xp.reshape(error, shape)}
