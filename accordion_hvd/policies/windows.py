"""Policies that decide at the end of windows of optimizer steps, normally epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.decision import Decision

PATIENCE = 1000
"""Exchanges after which a policy without a window length raises an error."""


class Windowed(Policy):
    """Base class of policies that count steps and windows and decide at the end of a window.

    If an exchange has several micro-batches, the policy counts these. An exchange belongs to the
    window in which it takes place; its micro-batches beyond the end of the window count for the
    next window. A decision that must wait (`ready`) prolongs its window, possibly by several
    lengths.

    Args:
        window: optimizer steps in a window. None if calls of `end_window` end the windows.
    """

    KEPT: ClassVar[tuple[str, ...]] = ("_epoch", "_steps", "_step", "_ended", "_by_hand", "_lr")

    def __init__(self, window: int | None) -> None:
        super().__init__()
        if window is not None:
            check.integer(self, "window", window, least=1)
        self.window = window
        self._epoch = 0  # windows ended so far
        self._steps = 0  # micro-batches of the exchanges in this window
        self._step = 0  # micro-batches of all exchanges
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
        """Return the number of exchanges so far, or of their micro-batches."""
        return self._step

    @property
    def over(self) -> bool:
        """Return whether the window has ended."""
        complete = self.window is not None and self._steps >= self.window
        return self._steps > 0 and (self._ended or complete)

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange; store the learning rates at the start of a window.

        Raises:
            RuntimeError: if the length of a window is still unknown after `PATIENCE` steps.
        """
        if Windowed.due(self, lr):
            self._roll()  # the window ended without a decision
        if self._steps == 0 or not self._lr:
            self._lr = dict(lr)
        batches = self.observers.weight
        self._steps += batches
        self._step += batches
        if self.window is None and not self._by_hand and self._step > PATIENCE:
            name = type(self).__name__
            raise RuntimeError(
                f"{name}: after {PATIENCE} steps the length of a window (an epoch) is still "
                f"unknown, so no decision is possible. Pass {name}(..., window=<optimizer steps "
                "per epoch>), or call optimizer.end_window() after each epoch (and once before the "
                f"first epoch if epochs have more than {PATIENCE} steps); in Keras, pass "
                "BroadcastGlobalVariablesCallback to fit()."
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
