"""What compressors share that are made of another one."""

from __future__ import annotations

from collections.abc import Sequence

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.ops.spec import Spec


class Around(Compressor):
    """Answers as the compressor inside does, and with its state.

    Attributes:
        compressor: the one inside.
    """

    compressor: Compressor

    def accept(self, spec: Spec, name: str) -> None:
        """What the compressor accepts."""
        self.compressor.accept(spec, name)

    def variant(self, step: int) -> int:
        """That of the compressor."""
        return self.compressor.variant(step)

    @property
    def phases(self) -> bool:
        """Those of the compressor."""
        return self.compressor.phases

    @property
    def settling(self) -> int:
        """That of the compressor."""
        return self.compressor.settling

    def plain(self) -> Compressor | None:
        """That of the compressor."""
        return self.compressor.plain()

    def residual(self, state: State) -> Tensor | None:
        """What the compressor owes."""
        return self.compressor.residual(state) if state else None

    def with_residual(self, state: State, residual: Tensor) -> State:
        """The state whose compressor owes `residual`."""
        return self.compressor.with_residual(state, residual)

    def report(self, state: State) -> dict[str, Tensor]:
        """What the compressor says, where it has a state."""
        return self.compressor.report(state) if state else {}

    def park(self, state: State) -> State:
        """What the compressor keeps."""
        return self.compressor.park(state)

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """What the compressor makes of its states."""
        return self.compressor.rescale(states, spec, info)

    def foreign(self, state: State, spec: Spec, info: Info) -> State:
        """What the compressor makes of its state."""
        return self.compressor.foreign(state, spec, info)
