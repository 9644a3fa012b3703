"""Observers: features that subscribe to the events of an exchange."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import Bucket
    from accordion_hvd.engine.step import Step


class Observer:
    """Base class of observers, which handle events of a policy's exchange.

    By default an observer ignores all events.

    Attributes:
        weight: number of batches whose gradients the next exchange averages.
        accumulated: number of batches whose gradients the framework accumulates for that exchange.
        withholds: whether gradients stay local in the current step.
        decides_ahead: whether a decision may change the step whose gradients are ready, so that
            no gradient may be sent before the decision.
        measures: whether the exchange must time the calls of the current step.
        every_step: whether Python code must run in each step, so that no graph may contain
            several steps.
        needed_alone: whether a job of one rank needs an exchange, too.
        private: whether gradients may reach the weights through the exchange only: those of all
            ranks and of all variables, sparse ones as dense ones.
    """

    weight: int = 1
    accumulated: int = 1
    withholds: bool = False
    decides_ahead: bool = False
    measures: bool = False
    every_step: bool = False
    needed_alone: bool = False
    private: bool = False

    def extending(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        """Handle the event that tensors are about to be added.

        Args:
            exchange: the exchange, without the new tensors.
            buckets: all buckets, those of the new tensors included.

        Raises:
            ValueError: to refuse the tensors.
        """

    def opening(self, exchange: Exchange, lr: Mapping[str, float]) -> None:
        """Handle the event that a step is about to begin.

        Args:
            exchange: the exchange.
            lr: learning rate of each bucket, by name.
        """

    def closed(self, exchange: Exchange, step: Step) -> None:
        """Handle the event that a step is done or undone.

        Args:
            exchange: the exchange.
            step: the step.
        """

    def due(self, exchange: Exchange) -> bool:
        """Return whether a decision is due before the next step; equal on all ranks."""
        return False

    def decide(self, exchange: Exchange) -> Generator[Any, Any, None]:
        """Take a decision; a generator that yields requests and runs on all ranks."""
        yield from ()

    def affords(self) -> bool:
        """Return whether another step may be taken."""
        return True

    def stats(self) -> dict[str, Any]:
        """Return this observer's entries of `Exchange.stats`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return this observer's entries of `Policy.state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from a policy's `state_dict`."""

    def agreement(self) -> str:
        """Return a line that must be equal on all ranks, besides the policy; "" for none."""
        return ""


O = TypeVar("O", bound=Observer)  # noqa: E741


class Observers(tuple[Observer, ...]):
    __slots__ = ()

    def find(self, kind: type[O]) -> O | None:
        for observer in self:  # a loop costs a call less than a generator, in each step
            if isinstance(observer, kind):
                return observer
        return None

    @property
    def weight(self) -> int:
        return math.prod([observer.weight for observer in self])

    @property
    def accumulated(self) -> int:
        return math.prod([observer.accumulated for observer in self])

    def any(self, attribute: str) -> bool:
        for observer in self:
            if getattr(observer, attribute):
                return True
        return False

    def stats(self) -> dict[str, Any]:
        return {key: value for observer in self for key, value in observer.stats().items()}
