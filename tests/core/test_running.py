"""Tests of `Running` and `drive`: answers reach their requests, and ends and errors the caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accordion_hvd.core.base import Allgather, Allreduce
from accordion_hvd.core.running import Running, drive, intercept


def exchange(closed: list[bool]) -> Any:
    """Ask for one result, then for two, then for a tuple of one; return all of them."""
    try:
        one = yield Allreduce(np.array([1.0]))
        two, three = yield Allreduce(np.array([2.0])), Allgather(np.array([3.0]))
        (four,) = yield (Allreduce(np.array([4.0])),)
        return one, two, three, four
    finally:
        closed.append(True)


def tensors(requests: Any) -> list[float]:
    return [float(request.tensor[0]) for request in requests]


def test_results_go_where_they_were_asked_for() -> None:
    running, rounds = Running(exchange([])), []
    while not running.done:
        rounds.append(tensors(running.requests))
        running.answer([10 * value for value in rounds[-1]])
    assert rounds == [[1.0], [2.0, 3.0], [4.0]]
    assert running.result == (10.0, 20.0, 30.0, 40.0) and running.requests == ()
    assert drive(exchange([]), tensors) == (1.0, 2.0, 3.0, 4.0)


def test_a_generator_that_asks_for_nothing_is_done_at_once() -> None:
    def silent() -> Any:
        return 5
        yield

    running = Running(silent())
    assert running.done and running.result == 5 and running.requests == ()


def test_closing_ends_the_generator_where_it_is() -> None:
    closed: list[bool] = []
    running = Running(exchange(closed))
    assert not closed
    running.close()
    assert closed == [True]


def test_errors_of_the_generator_reach_the_caller() -> None:
    def failing() -> Any:
        yield Allreduce(np.zeros(1))
        raise ValueError("no such thing")

    running = Running(failing())
    with pytest.raises(ValueError, match="no such thing"):
        running.answer([np.zeros(1)])


def test_sent_tensors_are_released_while_the_generator_goes_on() -> None:
    held: list[Any] = []

    def looking() -> Any:
        yield Allreduce(np.zeros(1))
        held.append(running.asked)

    running = Running(looking())
    running.answer([np.zeros(1)])
    assert held == [None]


def test_translated_requests_may_take_rounds_of_their_own() -> None:
    def once() -> Any:
        return (yield Allreduce(np.array([1.0])))

    def serve(asked: Any) -> Any:
        first = yield asked
        return (yield Allreduce(first + 1))

    found = drive(intercept(once(), serve), lambda requests: [requests[0].tensor])
    assert found == [2.0]
