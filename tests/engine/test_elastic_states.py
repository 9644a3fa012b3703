"""Tests of states of elastic jobs whose hosts are removed, and whose rank 0 may be new."""

from __future__ import annotations

from typing import Any

import pytest

from accordion_hvd.engine.membership import FollowsRanks


class HostsChanged(Exception):
    """Stand-in for Horovod's exception for changed hosts."""

    skip_sync = True


class Horovods:
    """Stand-in for Horovod's state in a job from which a host was removed."""

    def __init__(self) -> None:
        self.roots: list[int] = []
        self._rank = lambda: 0

    def check_host_updates(self) -> None:
        raise HostsChanged

    def sync(self) -> None:
        self._bcast_object({})

    def save(self) -> None:
        pass

    def _bcast_object(self, value: Any, root_rank: int = 0) -> Any:
        self.roots.append(root_rank)
        return value


class State(FollowsRanks, Horovods):
    """Return the state of a rank of the job after `new` ranks with lower numbers have joined."""

    interrupt = HostsChanged

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new, self.member = new, Member()

    def _members(self) -> list[Any]:
        return [self.member]

    def _gather(self, value: Any) -> list[Any]:
        return [False] * self.new + [value]


class Member:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def commit(self) -> None:
        self.calls.append("commit")

    def committed_norm(self) -> float:
        return 0.0

    def hand_over(self, gather: Any) -> None:
        self.calls.append("hand over")

    def prepare_regroup(self, gather: Any, leader: int) -> None:
        self.calls.append(("prepare", leader))

    def regroup(self, gather: Any, leader: int) -> None:
        self.calls.append(("regroup", leader))


def test_ranks_synchronize_after_a_removal_too() -> None:
    """Ranks synchronize after a removal, since ranks of an added host may wait for them."""
    state = State(0)
    with pytest.raises(HostsChanged) as raised:
        state.check_host_updates()
    assert not raised.value.skip_sync
    assert state.member.calls == ["hand over"]


@pytest.mark.parametrize("new", [0, 1, 2])
def test_the_first_rank_of_the_job_leads(new: int) -> None:
    """All ranks receive the values of the job's first rank; before training, those of rank 0."""
    state = State(new)
    state.sync()
    state.sync()
    state._bcast_object({})  # outside the synchronization, values are those of rank 0
    assert state.roots == [0, new, 0]
    assert state.member.calls == [
        *[("prepare", 0), ("regroup", 0), "commit"],
        *[("prepare", new), ("regroup", new), "commit"],
    ]
