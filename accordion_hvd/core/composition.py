"""Exchanges made of other exchanges, with other members or other collectives."""

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
    conversation: RequestGenerator, serve: Callable[[Any], RequestGenerator]
) -> RequestGenerator:
    """Wrap an exchange: `serve` answers each of its requests, or tuples of requests.

    Args:
        conversation: whose result it has.
        serve: given what was asked, a conversation that returns the answer.
    """
    running = Running(conversation)
    while not running.done:
        running.send((yield from serve(running.asked)))
    return running.result


def within_group(group: tuple[int, ...], conversation: RequestGenerator) -> RequestGenerator:
    """Let the ranks 0, 1, ... of an exchange be the members of a group.

    among the ranks of `group`.
    """

    def serve(asked: Any) -> RequestGenerator:
        if isinstance(asked, tuple):
            return (yield tuple(_addressed(request, group) for request in asked))
        return (yield _addressed(asked, group))

    return intercept(conversation, serve)


def _addressed(request: Request, group: tuple[int, ...]) -> Request:
    members = group if request.group is None else tuple(group[rank] for rank in request.group)
    if isinstance(request, Broadcast):
        return replace(request, group=members, root=group[request.root])
    if isinstance(request, Allreduce) and request.sender is not None:
        return replace(request, group=members, sender=_member(group, request.sender))
    return replace(request, group=members)


def _member(group: tuple[int, ...], number: Any) -> Any:
    """Return the rank of a member of a group, by its number in it."""
    if check.is_integer(number):
        return group[number]
    xp = namespace(number)
    return xp.take(xp.asarray(np.array(group)), number)
