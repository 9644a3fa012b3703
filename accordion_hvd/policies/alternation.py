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
        apart: whether models are averaged now, so that ranks' may differ.
        turned: whether `apart` has changed since `turn` was called.
        equal: whether ranks' models are equal now; else no decision is due. To be kept up to
            date by what averages them.
    """

    decides_ahead = True
    every_step = True

    def __init__(self, policy: Any, method: Averaging) -> None:
        self.policy, self.method = policy, method
        self.apart = self.turned = False
        self.equal = True

    @property
    def withholds(self) -> bool:  # type: ignore[override]
        """Return whether gradients stay with their ranks now."""
        return self.apart

    @property
    def over(self) -> bool:
        """Return whether a window has ended, so that models must be made equal."""
        return self.policy.over

    def switch(self, level: int) -> None:
        """Average models from now on (HIGH), or gradients (LOW)."""
        self.turned |= self.apart != (level == HIGH)
        self.apart = level == HIGH

    def turn(self) -> bool:
        """Return whether `apart` has changed since the last call."""
        turned, self.turned = self.turned, False
        return turned
