"""Base class of compressors that contain another compressor."""

from __future__ import annotations

from collections.abc import Sequence

from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.ops.spec import Spec


class CompressorWrapper(Compressor):
    """Compressor that delegates to an inner compressor and uses its state."""

    compressor: Compressor

    def accept(self, spec: Spec, name: str) -> None:
        self.compressor.accept(spec, name)

    def variant(self, step: int) -> int:
        return self.compressor.variant(step)

    @property
    def phases(self) -> bool:
        return self.compressor.phases

    @property
    def period(self) -> int:
        return self.compressor.period

    @property
    def startup_steps(self) -> int:
        return self.compressor.startup_steps

    def plain(self) -> Compressor | None:
        return self.compressor.plain()

    def residual(self, state: State) -> Tensor | None:
        return self.compressor.residual(state) if state else None

    def with_residual(self, state: State, residual: Tensor) -> State:
        return self.compressor.with_residual(state, residual)

    def report(self, state: State) -> dict[str, Tensor]:
        return self.compressor.report(state) if state else {}

    def deactivate(self, state: State) -> State:
        return self.compressor.deactivate(state)

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        return self.compressor.rescale(states, spec, info)

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        return self.compressor.rescale_from_one(state, spec, info)
