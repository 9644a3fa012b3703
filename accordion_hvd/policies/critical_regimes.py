"""Finds critical regimes by the norms of gradients (Agarwal et al., MLSys 2021, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from accordion_hvd import check
from accordion_hvd.policies.decision import Decision

LOW, HIGH = 0, 1
"""Levels of low compression, for critical regimes, and of high compression."""

CHANGED = "level changed in this window"
FELL = "learning rate fell"


class CriticalRegimes:
    """Says whether a training is in a critical regime.

    Let n be the norm of the gradients' sum over window e, and m the norm `interval` windows
    before. At the end of windows 0, `interval`, 2 `interval`, ... the regime is critical if e = 0,
    or m = 0, or a norm is not finite, or |m - n| / m >= `threshold`. A learning rate that falls
    begins a critical regime (section (b) of the authors' code).

    Args:
        owner: the policy, named in error messages.
        threshold: the paper's eta, at least 0; a relative change.
        interval: windows between checks.
        lr_drop: a learning rate falls when it is at most `lr_drop` times what it was a window
            before; None: when it is less.

    Attributes:
        norms: by name, at the last check.
    """

    def __init__(self, owner: Any, threshold: float, interval: int, lr_drop: float | None) -> None:
        check.at_least(owner, "threshold", threshold, least=0)
        check.integer(owner, "interval", interval, least=1)
        if lr_drop is not None:
            check.ratio(owner, "lr_drop", lr_drop)
        self.threshold, self.interval, self.lr_drop = threshold, interval, lr_drop
        self.norms: dict[str, float] = {}

    def checks(self, window: int) -> bool:
        """Return whether norms are compared at the end of a window."""
        return window % self.interval == 0

    def judge(self, row: Decision, unclear: bool, current: int) -> None:
        """Fill in level, reason and change of a row, if its window is checked or its rate fell.

        Args:
            row: has `window`, `norm` and `previous`, `lr` and `previous_lr`.
            unclear: whether the level changed within the window, so that its norm, of averages
                that pay what the old level carried, is no evidence.
            current: the level that stays where the norm is no evidence.
        """
        if self.checks(row.window):
            self._compare(row, unclear, current)
        if self.fell(row):
            row.level, row.reason = LOW, FELL

    def _compare(self, row: Decision, unclear: bool, current: int) -> None:
        norm, previous = row.norm, row.previous
        if row.window == 0:
            row.level, row.reason = LOW, "first window"
        elif unclear:
            row.level, row.reason = current, CHANGED
        elif not (math.isfinite(norm) and math.isfinite(previous)):
            row.level, row.reason = LOW, "norm not finite"
        elif previous == 0:
            row.level, row.reason = LOW, "previous norm was zero"
        else:
            row.change = abs(previous - norm) / previous
            critical = row.change >= self.threshold
            row.level = LOW if critical else HIGH
            row.reason = "norm changed" if critical else "norm steady"

    def fell(self, row: Decision) -> bool:
        """Return whether a row's learning rate has fallen."""
        before, now = row.previous_lr, row.lr
        return now < before and (self.lr_drop is None or now <= self.lr_drop * before)

    def remember(self, rows: Iterable[Decision]) -> None:
        """Keep the norms of a check, to compare those of the next one with."""
        seen = {row.name: row.norm for row in rows if row.reason != CHANGED}
        self.norms = self.norms | seen  # a new dict: a state_dict holds the old one
