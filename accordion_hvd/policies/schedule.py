"""A schedule of compressors by epoch."""

from __future__ import annotations

from collections.abc import Mapping

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Seen, agree
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.windows import Windowed


class StepSchedule(Windowed):
    """Changes the compressor of all layers at given windows (epochs), whatever the gradients are.

    `StepSchedule({0: PowerSGD(4), 30: PowerSGD(1)})` uses `PowerSGD(4)` in epochs 0 to 29. With
    `window=1`, the keys are optimizer steps.

    Args:
        schedule: window (counted from 0) -> compressor from the start of that window on; must have
            a key 0.
        window: batches in a window. In Keras, callbacks set it; in PyTorch, pass it or call
            `optimizer.end_window()` after each epoch.

    Attributes:
        history: one row per change and layer.
    """

    def __init__(self, schedule: Mapping[int, Compressor], *, window: int | None = None) -> None:
        super().__init__(window)
        if not isinstance(schedule, Mapping) or 0 not in schedule:
            allowed = "a dict with a key 0, such as {0: PowerSGD(4), 30: PowerSGD(1)}"
            check.refuse(self, "schedule", schedule, allowed)
        for key in schedule:
            check.integer(self, "a key of schedule", key, least=0)
        self.schedule = {key: schedule[key] for key in sorted(schedule)}
        agree(self, list(self.schedule.values()))

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return tuple(self.schedule.values())

    def start(self, name: str) -> int:
        return self._level_in(self._epoch)

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether a window has ended and the next one changes the compressor."""
        return super().due(lr) and self._epoch + 1 in self.schedule

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        level = self._level_in(self._epoch + 1)
        common = level, self._step, self._epoch, repr(self.levels("")[level]), "schedule"
        return [Decision(name, *common, lr=lr[name]) for name in self.current]

    def __repr__(self) -> str:
        return f"StepSchedule({self.schedule!r}, window={self.window!r})"

    def _level_in(self, window: int) -> int:
        return sum(1 for key in self.schedule if key <= window) - 1
