"""The driver of generators that yield requests and receive results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from accordion_hvd.core.base import Request


class Running:
    """A generator, run to its first request at once, with its pending request or its result.

    Attributes:
        asked: what it yielded last; None once it has returned.
        requests: the pending requests, launched together; () once it has returned.
        result: what it returned.
    """

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self.asked: Any = None
        self.requests: tuple[Request, ...] = ()
        self.result: Any = None
        self.done = False
        self._generator = generator
        self.send(None)

    def answer(self, results: Sequence[Any]) -> None:
        """Resume the generator with the results of `requests`, in their order."""
        self.send(tuple(results) if isinstance(self.asked, tuple) else results[0])

    def send(self, value: Any) -> None:
        """Resume the generator with `value`, the complete answer to `asked`."""
        self.asked, self.requests = None, ()  # so that the memory of sent tensors can be freed
        try:
            self.asked = asked = self._generator.send(value)
            self.requests = asked if isinstance(asked, tuple) else (asked,)
        except StopIteration as stop:
            self.done, self.result = True, stop.value

    def close(self) -> None:
        self._generator.close()


def drive(
    generator: Generator[Any, Any, Any],
    serve: Callable[[tuple[Request, ...]], Sequence[Any]],
) -> Any:
    """Run a generator to its end; return its result. `serve` answers requests, in their order."""
    running = Running(generator)
    while not running.done:
        running.answer(serve(running.requests))
    return running.result
