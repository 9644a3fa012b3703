"""Policies that decide at the end of windows of batches, normally epochs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.decision import Decision

PATIENCE = 1000
"""Batches after which a policy warns if no window has ended yet and their length is unknown."""


class Windowed(Policy):
    """Base class of policies that count steps and windows and decide at the end of a window.

    If an exchange has several micro-batches, or averages the gradients of several backward passes,
    the policy counts these. An exchange belongs to the window in which it takes place; its
    micro-batches beyond the end of the window count for the next window. A decision that must wait
    (`ready`) prolongs its window, possibly by several lengths.

    Args:
        window: batches (backward passes) in a window, such as `len(loader)`. None if calls of
            `end_window` end the windows.
    """

    KEPT: ClassVar[tuple[str, ...]] = ("_epoch", "_steps", "_step", "_ended", "_by_hand", "_lr")

    def __init__(self, window: int | None) -> None:
        super().__init__()
        if window is not None:
            check.integer(self, "window", window, least=1)
        self.window = window
        self._epoch = 0  # windows ended so far
        self._steps = 0  # batches of the exchanges in this window
        self._step = 0  # batches of all exchanges
        self._ended = False  # whether end_window has ended this window
        self._by_hand = False  # whether end_window was ever called
        self._lr: dict[str, float] = {}  # learning rates at the start of the window

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether a decision is due: at the first exchange after the end of a window.

        Only then is the next learning rate known.
        """
        return self.ready and self.over

    @property
    def ready(self) -> bool:
        """Return whether a decision is possible now; otherwise the window is prolonged."""
        return True

    @property
    def steps(self) -> int:
        """Return the number of batches of all exchanges so far."""
        return self._step

    @property
    def over(self) -> bool:
        """Return whether the window has ended."""
        complete = self.window is not None and self._steps >= self.window
        return self._steps > 0 and (self._ended or complete)

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange; store the learning rates at the start of a window."""
        if Windowed.due(self, lr):
            self._roll()  # the window ended without a decision
        if self._steps == 0 or not self._lr:
            self._lr = dict(lr)
        batches = self.observers.weight * self.passes
        self._steps += batches
        self._step += batches
        unknown = self.window is None and not self._by_hand
        if unknown and 0 <= self._step - PATIENCE - 1 < batches:
            name = type(self).__name__
            warnings.warn(
                f"{name}: after {PATIENCE} batches no window (epoch) has ended, and without one "
                f"there is no decision. Pass {name}(..., window=<batches per epoch>), or call "
                "optimizer.end_window() after each epoch; in Keras, pass "
                "BroadcastGlobalVariablesCallback to fit().",
                RuntimeWarning,
                stacklevel=2,
            )

    def end_window(self) -> None:
        """End the current window.

        A call before the first step declares that later calls will end the windows.
        """
        self._by_hand = True
        self._ended = self._steps > 0

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions, and begin the next window."""
        super().apply(decisions)
        self._roll()

    def _roll(self) -> None:
        beyond = 0 if self._ended or self.window is None else self._steps % self.window
        self._epoch += 1
        self._steps, self._ended, self._lr = beyond, False, {}
