"""Generators that yield requests and receive results: how they run, and how they are combined."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Broadcast, Request
from accordion_hvd.ops import namespace


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
    generator: Generator[Any, Any, Any], serve: Callable[[tuple[Request, ...]], Sequence[Any]]
) -> Any:
    """Run a generator to its end; return its result. `serve` answers requests, in their order."""
    running = Running(generator)
    while not running.done:
        running.answer(serve(running.requests))
    return running.result


RequestGenerator: TypeAlias = Generator[Any, Any, Any]


def intercept(
    exchange: RequestGenerator, serve: Callable[[Any], RequestGenerator]
) -> RequestGenerator:
    """Run an exchange generator, replacing its requests; return its result.

    Given a request, or a tuple of requests, `serve` returns a generator that yields other requests
    and returns the results.
    """
    running = Running(exchange)
    while not running.done:
        running.send((yield from serve(running.asked)))
    return running.result


def within_group(group: tuple[int, ...], exchange: RequestGenerator) -> RequestGenerator:
    """Run an exchange generator among the ranks `group`, which serve as its ranks 0, 1, ..."""

    def serve(asked: Any) -> RequestGenerator:
        if isinstance(asked, tuple):
            return (yield tuple(_addressed(request, group) for request in asked))
        return (yield _addressed(asked, group))

    return intercept(exchange, serve)


def _addressed(request: Request, group: tuple[int, ...]) -> Request:
    members = group if request.group is None else tuple(group[rank] for rank in request.group)
    if isinstance(request, Broadcast):
        return replace(request, group=members, root=group[request.root])
    if isinstance(request, Allreduce) and request.sender is not None:
        return replace(request, group=members, sender=_member(group, request.sender))
    return replace(request, group=members)


def _member(group: tuple[int, ...], number: Any) -> Any:
    if check.is_integer(number):
        return group[number]
    xp = namespace(number)
    return xp.take(xp.asarray(np.array(group)), number)
