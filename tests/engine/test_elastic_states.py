"""Tests of states of elastic jobs whose hosts are removed, and whose rank 0 may be new."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accordion_hvd import EF21, Info, Momentum, StepSchedule, TopK, simulate
from accordion_hvd.engine import checkpoint, membership
from accordion_hvd.engine.membership import FollowsRanks, Part, Regrouping
from accordion_hvd.engine.saved_state import SavedState, rescaled
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers import OnebitAdam, SketchedAMSGrad, UpdateRule


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


@pytest.mark.parametrize("rule", [OnebitAdam(warmup_steps=1), SketchedAMSGrad()], ids=repr)
def test_what_a_lost_rank_owed_is_lost_with_it(rule: UpdateRule) -> None:
    """Ranks that stay owe the mean of their own residuals and of nothing."""
    spec, made = Spec((8, 8), "float32", xp), []
    for rank, residual in enumerate((1.0, 10.0, 3.0)):
        state = rule.init(spec, Info(rank=rank, size=3, name="w"))
        made.append(SavedState(0, {0: {**state, "error": state["error"] + np.float32(residual)}}))
    entry: Any = type("Entry", (), {"levels": (rule,)})
    group = Regrouping(Part(0, 3, False, {"steps": 5, "tensors": []}, []), (0, 2), 0)
    places = membership._in_old_places([made[0], made[2]], entry, group)
    new = rescaled(places, [rule], spec, Info(rank=0, size=2, name="w"))
    np.testing.assert_allclose(new.states[0]["error"], 4 / 3, rtol=1e-6)


def test_shifts_of_a_level_that_does_not_serve_may_meet_other_ranks() -> None:
    policy = StepSchedule({0: Momentum(EF21(TopK(0.1))), 1: Momentum(TopK(0.1))}, window=3)
    gradients = [{"w": np.ones((40, 40), "f4")} for _ in range(4)]
    world, other = simulate(policy, 4), simulate(policy, 2)
    for _ in range(5):
        world.step(gradients)
    old = [checkpoint.expanded(x, checkpoint.describe(x)) for x in world.exchanges]
    other.step(gradients[:2])
    exchange = other.exchanges[0]
    checkpoint.merged(exchange, exchange.bucket_states[0], [rows[0] for rows in old])
    checkpoint._from_one(exchange, old[0])
