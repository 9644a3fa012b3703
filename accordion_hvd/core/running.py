"""The one driver of generators: algorithms that ask for collectives, programs that ask for more."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from accordion_hvd.core.base import Request


class Running:
    """A running generator: holds its last request, and in the end its result.

    Args:
        generator: runs to its first request at once.

    Attributes:
        asked: the object yielded last; None once the generator has returned.
        done: whether the generator has returned.
        result: the object returned; None before.
    """

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self.asked: Any = None
        self.result: Any = None
        self.done = False
        self._generator = generator
        self.send(None)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return the requests that leave together now; none once the generator has returned."""
        if self.done:
            return ()
        return self.asked if isinstance(self.asked, tuple) else (self.asked,)

    def answer(self, results: Sequence[Any]) -> None:
        """Go on with the results of `requests`, in their order."""
        self.send(tuple(results) if isinstance(self.asked, tuple) else results[0])

    def send(self, value: Any) -> None:
        """Go on with an object that stands for all of `asked`."""
        self.asked = None  # so that the memory of tensors that were sent can be freed
        try:
            self.asked = self._generator.send(value)
        except StopIteration as stop:
            self.done, self.result = True, stop.value

    def close(self) -> None:
        """End the generator at its last request."""
        self._generator.close()


def drive(
    generator: Generator[Any, Any, Any],
    serve: Callable[[tuple[Request, ...]], Sequence[Any]],
) -> Any:
    """Run a generator to its end and return its result.

    Args:
        generator: of an algorithm.
        serve: returns the results of requests, in their order.
    """
    running = Running(generator)
    while not running.done:
        running.answer(serve(running.requests))
    return running.result
