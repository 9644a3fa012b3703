"""Levels by the clock."""

from __future__ import annotations

from collections.abc import Mapping

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies.base import Seen, agree
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.windows import Windowed


class StepSchedule(Windowed):
    """One compressor for all until a given window (an epoch), then another, whatever happens.

    `StepSchedule({0: PowerSGD(4), 30: PowerSGD(1)})` serves epochs 0 to 29 mildly. With `window=1`
    the keys are optimizer steps.

    Args:
        schedule: from the beginning of which window (counted from 0) which compressor serves;
            0 must be among them.
        window: optimizer steps in a window. In Keras the callbacks fill it in; in PyTorch give it
            or call `optimizer.end_window()` after each epoch.

    Attributes:
        history: a row for each change and layer.
    """

    def __init__(self, schedule: Mapping[int, Compressor], *, window: int | None = None) -> None:
        super().__init__(window)
        if not isinstance(schedule, Mapping) or 0 not in schedule:
            allowed = "windows and compressors with a key 0, such as {0: PowerSGD(4), 30: TopK()}"
            check.refuse(self, "schedule", schedule, allowed)
        for key in schedule:
            check.integer(self, "a key of schedule", key, least=0)
        self.schedule = {key: schedule[key] for key in sorted(schedule)}
        agree(self, list(self.schedule.values()))

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return all compressors, in the order in which they serve."""
        return tuple(self.schedule.values())

    def start(self, name: str) -> int:
        """Return the level of the present window."""
        return self._turn(self._epoch)

    def due(self, lr: Mapping[str, float]) -> bool:
        """At the end of the windows before the given ones."""
        return super().due(lr) and self._epoch + 1 in self.schedule

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per layer."""
        level = self._turn(self._epoch + 1)
        known = level, self._step, self._epoch, repr(self.levels("")[level]), "schedule"
        return [Decision(name, *known, lr=lr[name]) for name in self.current]

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"StepSchedule({self.schedule!r}, window={self.window!r})"

    def _turn(self, window: int) -> int:
        return sum(1 for key in self.schedule if key <= window) - 1
