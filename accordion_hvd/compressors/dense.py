"""No compression: the plain average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, Conversation, Info, State, Tensor
from accordion_hvd.ops.spec import Spec


@dataclass(frozen=True)
class Dense(Compressor):
    """The plain average, in the gradient's own dtype; the mildest level there is."""

    stacks: ClassVar[str] = "any"

    def accept(self, spec: Spec, name: str) -> None:
        """See that `name` has real floating-point numbers; any number of them, none too."""
        check.real(self, name, spec.dtype)

    def exchange(self, grad: Tensor, state: State, info: Info) -> Conversation:
        """One allreduce of the gradient; no state."""
        mean = yield Allreduce(grad, reuse=True)
        return mean, state
