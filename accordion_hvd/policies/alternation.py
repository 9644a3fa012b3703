"""Switching between averaged gradients and averaged models."""

from __future__ import annotations

from typing import Any

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.critical_regimes import HIGH

MODEL = "(model)"
"""Name of decisions about model averaging."""


class Alternation(Observer):
    """Switches between averaging gradients in each step and averaging models by `method`.

    The windows of `policy`, which decides, last until the models are equal.

    Attributes:
        averaging_models: whether the ranks average models now, so that models may differ.
        mode_changed: whether `averaging_models` has changed since `take_mode_change` was called.
        equal: whether the models of all ranks are equal now; no decision is due while they differ.
            The model averager keeps this attribute up to date.
    """

    decides_ahead = True
    every_step = True

    def __init__(self, policy: Any, method: Averaging) -> None:
        self.policy, self.method = policy, method
        self.averaging_models = self.mode_changed = False
        self.equal = True

    @property
    def withholds(self) -> bool:  # type: ignore[override]
        return self.averaging_models

    @property
    def over(self) -> bool:
        """Return whether a window has ended, so that the ranks must make their models equal."""
        return self.policy.over

    def switch(self, level: int) -> None:
        """Average models (HIGH) or gradients (LOW) from now on."""
        self.mode_changed |= self.averaging_models != (level == HIGH)
        self.averaging_models = level == HIGH

    def take_mode_change(self) -> bool:
        """Return whether `averaging_models` has changed since the last call."""
        changed, self.mode_changed = self.mode_changed, False
        return changed
