"""Base class of compressors that contain another compressor."""

from __future__ import annotations

from collections.abc import Sequence

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.ops.spec import Spec


class CompressorWrapper(Compressor):
    """Compressor that delegates to an inner compressor and uses its state.

    Attributes:
        compressor: the inner compressor.
    """

    compressor: Compressor

    def accept(self, spec: Spec, name: str) -> None:
        """Refuse tensors that the inner compressor refuses."""
        self.compressor.accept(spec, name)

    def variant(self, step: int) -> int:
        """Return the inner compressor's variant."""
        return self.compressor.variant(step)

    @property
    def phases(self) -> bool:
        """Return whether the inner compressor has phases."""
        return self.compressor.phases

    @property
    def period(self) -> int:
        """Return the period of the inner compressor's phases."""
        return self.compressor.period

    @property
    def startup_steps(self) -> int:
        """Return the inner compressor's number of startup steps."""
        return self.compressor.startup_steps

    def plain(self) -> Compressor | None:
        """Return the compressor that serves small and exempt tensors."""
        return self.compressor.plain()

    def residual(self, state: State) -> Tensor | None:
        """Return the inner compressor's residual."""
        return self.compressor.residual(state) if state else None

    def with_residual(self, state: State, residual: Tensor) -> State:
        """Return the state whose inner residual is `residual`."""
        return self.compressor.with_residual(state, residual)

    def report(self, state: State) -> dict[str, Tensor]:
        """Return the inner compressor's report, or {} without a state."""
        return self.compressor.report(state) if state else {}

    def deactivate(self, state: State) -> State:
        """Return the state that the inner compressor retains while another level serves."""
        return self.compressor.deactivate(state)

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Return the inner compressor's state for another number of ranks."""
        return self.compressor.rescale(states, spec, info)

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return the inner compressor's state, computed from the state of one rank."""
        return self.compressor.rescale_from_one(state, spec, info)
