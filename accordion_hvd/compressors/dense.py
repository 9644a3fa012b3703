"""No compression: the plain average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, Message
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


class AllElements(Codec):
    """Sends every element, in the gradient's own dtype or in one of 16 bits.

    Attributes:
        wire: the dtype of 16 bits, or None.
    """

    batching: ClassVar[str] = "any"
    feedback: ClassVar[bool] = False
    wire: ClassVar[str | None] = None

    def accept(self, spec: Spec, name: str) -> None:
        """See that `name` has real floating-point numbers; any number of them, none too."""
        check.real(self, name, spec.dtype)

    def encode(self, x: Tensor, info: Info) -> Message:
        """Return the tensor, or bytes of 16-bit values."""
        xp = namespace(x)
        return (xp.to_wire([x], self.wire, math.prod(xp.shape(x))) if self.wire else x,)

    def decode(self, message: Message, like: Tensor, info: Info) -> Tensor:
        """Invert `encode`, but for rounding."""
        xp = namespace(like)
        if self.wire:
            return xp.from_wire(message[0], self.wire, [xp.cast(like, "float32")])[0]
        return xp.reshape(message[0], xp.shape(like))

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allreduce of the gradient; there is no state, so rounding errors are lost."""
        mean = yield Allreduce(grad, wire=self.wire, reuse=True)
        return mean, state


@dataclass(frozen=True)
class Dense(AllElements):
    """The plain average, in the gradient's own dtype; the mildest level there is."""

    summed: ClassVar[bool] = True
