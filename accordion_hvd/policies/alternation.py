"""Averaging models at times instead of gradients."""

from __future__ import annotations

from typing import Any

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.critical_regimes import HIGH

MODEL = "(model)"
"""The name of decisions about averaging models."""


class Alternation(Observer):
    """Switches between averages of gradients, in each step, and of models.

    Args:
        policy: decides which; its windows last until models are equal.
        method: averages the models.

    Attributes:
        averaging_models: whether models are averaged now, so that ranks' may differ.
        mode_changed: whether `averaging_models` has changed since `take_mode_change` was called.
        equal: whether ranks' models are equal now; else no decision is due. To be kept up to
            date by what averages them.
    """

    decides_ahead = True
    every_step = True

    def __init__(self, policy: Any, method: Averaging) -> None:
        self.policy, self.method = policy, method
        self.averaging_models = self.mode_changed = False
        self.equal = True

    @property
    def withholds(self) -> bool:  # type: ignore[override]
        """Return whether gradients stay with their ranks now."""
        return self.averaging_models

    @property
    def over(self) -> bool:
        """Return whether a window has ended, so that models must be made equal."""
        return self.policy.over

    def switch(self, level: int) -> None:
        """Average models from now on (HIGH), or gradients (LOW)."""
        self.mode_changed |= self.averaging_models != (level == HIGH)
        self.averaging_models = level == HIGH

    def take_mode_change(self) -> bool:
        """Return whether `averaging_models` has changed since the last call."""
        turned, self.mode_changed = self.mode_changed, False
        return turned
