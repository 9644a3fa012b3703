"""Policies that decide by windows of optimizer steps, epochs as a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.decision import Decision

PATIENCE = 1000
"""Exchanges after which somebody must have said how long a window is."""


class Windowed(Policy):
    """Counts steps and windows; what is decided where one ends, subclasses say.

    Where an exchange has several micro-batches, these are counted. An exchange belongs to the
    window in which it takes place; what it has beyond the window's end counts for the next one. A
    decision that has to wait (`ready`) prolongs its window, by whole ones too.

    Args:
        window: optimizer steps in a window; None: `end_window` is called where one ends.
    """

    KEPT: ClassVar[tuple[str, ...]] = ("_epoch", "_steps", "_step", "_ended", "_by_hand", "_lr")

    def __init__(self, window: int | None) -> None:
        super().__init__()
        if window is not None:
            check.integer(self, "window", window, least=1)
        self.window = window
        self._epoch = 0  # windows ended so far
        self._steps = 0  # exchanges (their micro-batches) in this window
        self._step = 0  # exchanges in all
        self._ended = False  # the user ended the window
        self._by_hand = False  # the user ends windows
        self._lr: dict[str, float] = {}  # learning rates when the window began

    def due(self, lr: Mapping[str, float]) -> bool:
        """At the first exchange after a window, when the next learning rate is known."""
        return self.ready and self.over

    @property
    def ready(self) -> bool:
        """Return whether a decision may be taken; else the window is prolonged."""
        return True

    @property
    def steps(self) -> int:
        """Exchanges so far, or their small batches."""
        return self._step

    @property
    def over(self) -> bool:
        """Return whether the window has ended."""
        whole = self.window is not None and self._steps >= self.window
        return self._steps > 0 and (self._ended or whole)

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange; remember the learning rates at the beginning of a window.

        Raises:
            RuntimeError: nobody says how long a window is.
        """
        if Windowed.due(self, lr):
            self._roll()  # nothing was decided at its end
        if self._steps == 0 or not self._lr:
            self._lr = dict(lr)
        batches = self.observers.weight
        self._steps += batches
        self._step += batches
        if self.window is None and not self._by_hand and self._step > PATIENCE:
            name = type(self).__name__
            raise RuntimeError(
                f"{name}: after {PATIENCE} steps nobody has said how long a window (an epoch) "
                f"is, so it cannot decide anything. Pass {name}(..., window=<optimizer steps an "
                "epoch>), or call optimizer.end_window() after each epoch (and once before the "
                "first if epochs are longer than that); in Keras, give fit() the "
                "BroadcastGlobalVariablesCallback."
            )

    def end_window(self) -> None:
        """End the window. Before the first step: windows will be ended by hand."""
        self._by_hand = True
        self._ended = self._steps > 0

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Put decisions into force, and begin the next window."""
        super().apply(decisions)
        self._roll()

    def _roll(self) -> None:
        beyond = 0 if self._ended or self.window is None else self._steps % self.window
        self._epoch += 1
        self._steps, self._ended, self._lr = beyond, False, {}
