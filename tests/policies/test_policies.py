"""Laws of all policies, in simulated trainings of two ranks whose windows end every four steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import numpy as np
import pytest
from decisions import rows_of
from policies import POLICIES

from accordion_hvd import Policy, TopK, policies, simulate
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.policies import Gate, Replay
from accordion_hvd.policies.evidence import StepTimes
from accordion_hvd.simulation.one_process import World

SHAPES = {"in": (64, 48), "out": (48, 30), "b": (30,)}
every_policy = pytest.mark.parametrize(
    "policy", [policy for policy, _ in POLICIES], ids=lambda policy: repr(policy)[:40]
)


def steps(policy: Policy) -> Iterator[tuple[World, np.ndarray, np.ndarray]]:
    """Yield the world, the mean gradient of "in" and the ranks' result, after each step."""
    world, draw = simulate(policy, 2), np.random.default_rng(0)
    for number in range(48):
        size = 1 + 3 * (number // 12 % 2)
        given = [
            {name: draw.normal(size, 1, x).astype(np.float32) for name, x in SHAPES.items()}
            for _ in range(2)
        ]
        mean = np.mean([mine["in"] for mine in given], 0, np.float64)
        weights = [{name: np.ones(x, np.float32) for name, x in SHAPES.items()} for _ in range(2)]
        found = world.step(given, lr=0.1 if number < 30 else 0.01, weights=weights)
        np.testing.assert_array_equal(found[0]["in"], found[1]["in"])  # type: ignore[index]
        yield world, mean, found[0]["in"]  # type: ignore[index]
        if number % 4 == 3:
            world.end_window()


def test_every_policy_has_a_row() -> None:
    kinds = {type(policy) for policy, _ in POLICIES} | {Gate, Replay, Policy}
    assert kinds == {getattr(policies, name) for name in policies.__all__}


@every_policy
def test_ranks_decide_alike_within_the_levels(policy: Policy) -> None:
    """All ranks have equal levels and histories, and each level is one of the policy's."""
    for world, _, _ in steps(policy):
        one, two = world.exchanges
        assert one.levels() == two.levels()
        assert rows_of(one.policy) == rows_of(two.policy)
        for entry in one.bucket_states:
            named = one.policy.choices(entry.bucket)
            assert repr(entry.compressor) in map(repr, named), entry.bucket.name


@every_policy
def test_equal_gradients_lead_to_equal_decisions(policy: Policy) -> None:
    """A training that is repeated is the same to the bit, unless its times decide."""
    if policy.gate or any(isinstance(kind, StepTimes) for kind in policy.evidence):
        return
    pairs = list(zip(steps(policy), steps(policy), strict=True))
    for (_, _, one), (_, _, two) in pairs:
        np.testing.assert_array_equal(one, two)
    (world, _, _), (again, _, _) = pairs[-1]
    assert rows_of(world.exchanges[0].policy) == rows_of(again.exchanges[0].policy)


@every_policy
def test_a_resumed_policy_is_where_it_was(policy: Policy) -> None:
    """The state survives JSON: another policy then has the same state, history and levels.

    A gate measures again, so that levels behind it may differ.
    """
    for number, (world, _, _) in enumerate(steps(policy)):
        if number % 5 == 0:
            exchange = world.exchanges[0]
            one, two = exchange.policy, copy.deepcopy(policy)
            buckets = [entry.bucket for entry in exchange.bucket_states]
            two.bind(exchange, [bucket.name for bucket in buckets])
            two.load_state_dict(json.loads(json.dumps(one.state_dict())))
            assert json.dumps(two.state_dict()) == json.dumps(one.state_dict())
            assert rows_of(two) == rows_of(one)
            if policy.gate is None:
                assert [*map(two.choice, buckets)] == [*map(one.choice, buckets)]


@every_policy
def test_nothing_is_lost_whatever_serves(policy: Policy) -> None:
    """The sum of results plus the mean residual is the sum of mean gradients.

    What fp16 rounds is lost, and optimizers return directions.
    """
    given, got, served = np.zeros(SHAPES["in"]), np.zeros(SHAPES["in"]), set()
    for world, mean, result in steps(policy):
        given, got = given + mean, got + result
        (first,) = [x for x in world.exchanges[0].bucket_states if x.bucket.name == "in"]
        served.add(first.compressor)
    if any(level.output != "gradient" or isinstance(level, UpdateRule) for level in served):
        return
    assert np.abs(given - got - carried(world)).max() < 0.1


def carried(world: World) -> np.ndarray:
    """Return the mean over ranks of what they carry of "in"."""
    total = np.zeros(SHAPES["in"])
    for exchange in world.exchanges:
        (entry,) = [entry for entry in exchange.bucket_states if entry.bucket.name == "in"]
        owed = [entry.residual(exchange.info(entry)), entry.carried]
        total += sum(np.reshape(x, total.shape) for x in owed if x is not None) / 2
    return total


def test_a_lost_residual_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "remove", lambda self, total, *_: total * 0)
    with pytest.raises(AssertionError):
        test_nothing_is_lost_whatever_serves(POLICIES[3][0])
