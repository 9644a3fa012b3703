"""States of elastic jobs whose ranks change again while they connect."""

from __future__ import annotations

from typing import Any

import pytest

from accordion_hvd.engine.elastic import FollowsRanks


class OperationFailed(Exception):
    """Stands in for Horovod's exception for failed operations."""


class HostsChanged(Exception):
    """Stands in for Horovod's exception for changed hosts."""

    skip_sync = True


class Horovods:
    """Stands in for Horovod's state, of a job that a host has left."""

    def __init__(self) -> None:
        self.resets = 0

    def check_host_updates(self) -> None:
        raise HostsChanged

    def reset(self) -> None:
        self.resets += 1


class State(FollowsRanks, Horovods):
    interrupt, failure = HostsChanged, OperationFailed

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.member, self.error = Member(), error

    def _members(self) -> list[Any]:
        return [self.member]

    def _gather(self, value: Any) -> list[Any]:
        return [value]

    def _regroup(self) -> None:
        raise self.error


class Member:
    def committed_norm(self) -> float:
        return 0.0

    def hand_over(self, gather: Any) -> None:
        gather(None)


def test_a_failure_while_ranks_connect_is_left_to_the_training() -> None:
    """Horovod's loop would end the rank here; it expects the next operation's failure."""
    state = State(OperationFailed())
    with pytest.raises(HostsChanged):
        state.check_host_updates()
    state.reset()
    assert state.resets == 1
    state.reset()  # the next change is not one without a synchronization
    assert state.resets == 2


def test_other_errors_while_ranks_connect_are_raised() -> None:
    state = State(KeyError("x"))
    with pytest.raises(HostsChanged):
        state.check_host_updates()
    with pytest.raises(KeyError):
        state.reset()
