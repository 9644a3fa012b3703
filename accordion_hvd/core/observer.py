"""Observers: features that follow an exchange instead of being built into it."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar


class Observer:
    """Follows the exchange of a policy. Methods are events; by default nothing happens.

    Attributes:
        weight: batches that the gradients of the next exchange stand for.
        accumulated: batches that a framework accumulates for that exchange.
        withholds: whether gradients stay with their ranks in the present step.
        decides_ahead: whether a decision may change the step whose gradients are ready, so that
            none may leave before it.
        measures: whether it wants to know what the calls of the present step take.
        every_step: whether Python code must run in each step, so that no graph may hold several.
        needed_alone: whether a job of one rank needs an exchange, too.
        needs_dense: whether sparse gradients must be exchanged like dense ones.
    """

    weight: int = 1
    accumulated: int = 1
    withholds: bool = False
    decides_ahead: bool = False
    measures: bool = False
    every_step: bool = False
    needed_alone: bool = False
    needs_dense: bool = False

    def extending(self, exchange: Any, buckets: Sequence[Any]) -> None:
        """Tensors are about to be added. Raises: ValueError to refuse them.

        Args:
            exchange: the exchange, without them.
            buckets: all buckets, those of the new tensors included.
        """

    def opening(self, exchange: Any, lr: Mapping[str, float]) -> None:
        """Handle the event that a step is about to begin, with these learning rates by bucket."""

    def closed(self, exchange: Any, step: Any) -> None:
        """Handle the event that a step's collectives are done, or were given up."""

    def due(self, exchange: Any) -> bool:
        """Return whether there is something to decide before the next step; equal on all ranks."""
        return False

    def decide(self, exchange: Any) -> Generator[Any, Any, None]:
        """Decide; a generator of collectives, run on all ranks."""
        yield from ()

    def affords(self) -> bool:
        """Return whether another step may be taken."""
        return True

    def stats(self) -> dict[str, Any]:
        """Return entries of `Exchange.stats`."""
        return {}

    def agreement(self) -> str:
        """Return a line that ranks must agree on, besides the policy; "" for none."""
        return ""


O = TypeVar("O", bound=Observer)  # noqa: E741


class Observers(tuple[Observer, ...]):
    """The observers of one policy, taken together."""

    __slots__ = ()

    def find(self, kind: type[O]) -> O | None:
        """Return the observer of a class; None if there is none."""
        return next((observer for observer in self if isinstance(observer, kind)), None)

    @property
    def weight(self) -> int:
        """See `Observer.weight`."""
        return math.prod(observer.weight for observer in self)

    @property
    def accumulated(self) -> int:
        """See `Observer.accumulated`."""
        return math.prod(observer.accumulated for observer in self)

    def any(self, attribute: str) -> bool:
        """Return whether an attribute of `Observer` is true for one of them."""
        return any(getattr(observer, attribute) for observer in self)

    def stats(self) -> dict[str, Any]:
        """Return the entries of all."""
        return {key: value for observer in self for key, value in observer.stats().items()}
