"""Detection of critical regimes by gradient norms (Agarwal et al., MLSys 2021, Algorithm 1)."""

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
    """Detector of critical regimes.

    Let n be the norm of the sum of the gradients in window e, and m the norm `interval` windows
    before. At the end of windows 0, `interval`, 2 `interval`, ... the regime is critical if
    |m - n| / m >= `threshold`, and also if e = 0, if m = 0 or if a norm is not finite. A fall of
    the learning rate begins a critical regime, too (section (b) of the authors' code).

    Args:
        threshold: relative change of the norm in a critical regime, at least 0 (the paper's eta).
        interval: windows between checks.
        lr_drop: the learning rate falls if it is at most `lr_drop` times its value one window
            before. None: if it is less than that value.

    Attributes:
        norms: name -> norm at the last check.
    """

    def __init__(self, owner: Any, threshold: float, interval: int, lr_drop: float | None) -> None:
        check.at_least(owner, "threshold", threshold, least=0)
        check.integer(owner, "interval", interval, least=1)
        if lr_drop is not None:
            check.ratio(owner, "lr_drop", lr_drop)
        self.threshold, self.interval, self.lr_drop = threshold, interval, lr_drop
        self.norms: dict[str, float] = {}

    def checks(self, window: int) -> bool:
        return window % self.interval == 0

    def judge(self, row: Decision, unclear: bool, current: int) -> None:
        """Fill in level, reason and change of a row if its window ends in a check or its lr fell.

        The norm is no evidence (`unclear`) if it is a norm of averaged gradients, and the level
        changed at the start of the window, so that the averages contain the residual of the old
        level. Then the level remains `current`.
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
        """Return whether the learning rate of a row has fallen."""
        before, now = row.previous_lr, row.lr
        return now < before and (self.lr_drop is None or now <= self.lr_drop * before)

    def remember(self, rows: Iterable[Decision]) -> None:
        """Store the norms of a check for the next check."""
        norms = {row.name: row.norm for row in rows if row.reason != CHANGED}
        self.norms = self.norms | norms  # a new dict: a state_dict holds the old one
