"""What sparsifiers with error feedback share."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd import check
from accordion_hvd.base import Compressor, Info, Spec, State


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Sends a part of a tensor's elements and keeps the rest for later.

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

    def kept(self, size: int) -> int:
        """How many of `size` elements are sent: rounded down, but at least one."""
        return max(1, int(self.ratio * size))
