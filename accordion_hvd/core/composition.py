"""Exchange generators made from other exchange generators, with other ranks or collectives."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Broadcast, Request
from accordion_hvd.core.running import Running
from accordion_hvd.ops import namespace

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
