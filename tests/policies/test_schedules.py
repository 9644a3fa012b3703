"""Tests of AdaQS, which follows the gradients' noise, and of StepSchedule, which counts windows."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from decisions import decide, rows_of
from frameworks import NUMPY, Framework, parameters, same_bits
from laws import SHAPE, step

from accordion_hvd import AdaQS, Dense, Policy, PowerSGD, StepSchedule, TopK, parse, simulate
from accordion_hvd.policies.adaqs import FELL, FIRST, MILDEST, STEADY, UNKNOWN
from accordion_hvd.policies.base import PATIENCE
from accordion_hvd.simulation.one_process import World

LADDER = [PowerSGD(1), PowerSGD(2), PowerSGD(4)]
ROW = {"step", "window", "name", "level", "compressor", "norm", "ratio", "previous", "change"}
ROW |= {"lr", "previous_lr", "reason", "efficiency", "weight"}


class Owner:
    """Stands for an exchange."""


OWNER = Owner()


def gradients(
    mean: float, noise: float, ranks: int, steps: int, seed: int = 0
) -> Iterator[list[dict[str, np.ndarray]]]:
    """Yield gradients: one direction of norm `mean`, plus new noise of norm `noise` each step."""
    rng = np.random.default_rng(seed)
    direction = np.ones(SHAPE) / math.sqrt(math.prod(SHAPE))
    for _ in range(steps):
        shaken = rng.standard_normal((ranks, *SHAPE)) / math.sqrt(math.prod(SHAPE))
        yield [{"w": (mean * direction + noise * x).astype(np.float32)} for x in shaken]


def ended(world: World) -> list[Mapping[str, Any]]:
    """Take the decision that is due; check that ranks agree, and return all decisions."""
    world._decide(0.1)
    histories = [json.dumps(rows_of(exchange.policy)) for exchange in world.exchanges]
    assert all(history == histories[0] for history in histories)
    return world.exchanges[0].policy.history


# ----------------------------------------------------------------------------------------- schedule
def run(policy: Policy, steps: int, ends: Sequence[int] = ()) -> list[int]:
    """Return the level in each step, for a policy whose windows end before the steps `ends`."""
    policy.bind(OWNER, ["w", "v"])
    levels = []
    for number in range(steps):
        rates = {"w": 0.1, "v": 0.1}
        if number in ends:
            policy.end_window()
        if policy.due(rates):
            decide(policy, {}, rates)
            assert not policy.due(rates)
        policy.tick(rates)
        assert policy.level("w") == policy.level("v")
        levels.append(policy.level("w"))
    return levels


def test_a_schedule_by_windows_and_by_steps() -> None:
    levels = {3: TopK(0.1), 0: PowerSGD(4), 4: PowerSGD(1)}  # in any order
    wanted = [0] * 3 + [1] + [2] * 3
    assert run(StepSchedule(levels, window=1), 7) == wanted
    assert run(StepSchedule(levels, window=5), 35) == [x for x in wanted for _ in range(5)]
    by_hand = run(StepSchedule(levels), 35, ends=(0, 3, 10, 11, 30))  # before the first: none
    assert by_hand == [0] * 11 + [1] * 19 + [2] * 5
    assert run(StepSchedule({0: Dense()}, window=1), 9) == [0] * 9


def test_a_schedule_is_recorded() -> None:
    policy = StepSchedule({0: PowerSGD(4), 2: PowerSGD(1)}, window=3)
    run(policy, 12)
    assert [(row["step"], row["window"], row["name"]) for row in policy.history] == [
        (6, 1, "w"),
        (6, 1, "v"),
    ]
    assert {row["compressor"] for row in policy.history} == {"PowerSGD(rank=1)"}


def test_layers_that_come_later_join_the_schedule() -> None:
    policy = StepSchedule({0: PowerSGD(4), 2: PowerSGD(1)}, window=1)
    run(policy, 5)
    policy.bind(OWNER, ["late"])
    assert policy.level("late") == 1


@pytest.mark.parametrize("framework", parameters())
def test_a_schedule_in_a_world_of_ranks(framework: Framework) -> None:
    world = simulate(StepSchedule({0: Dense(), 1: TopK(0.1), 3: PowerSGD(1)}, window=2), 2)
    names = []
    for now in gradients(1, 1, 2, 8):
        means = step(world, framework, now)
        assert same_bits(means[0]["w"], means[1]["w"])
        levels = [exchange.levels()["w"] for exchange in world.exchanges]
        assert levels[0] == levels[1]
        names.append(levels[0])
    wanted = ["Dense()"] * 2 + ["TopK(ratio=0.1)"] * 4 + ["PowerSGD(rank=1)"] * 2
    assert names == wanted


# -------------------------------------------------------------------------------------------- AdaQS
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize(("mean", "noise"), [(1, 0.5), (1, 2), (0.01, 0.04), (300, 100)])
def test_the_ratio_is_that_of_mean_and_deviation(
    mean: float, noise: float, framework: Framework
) -> None:
    world = simulate(AdaQS(LADDER, window=30), 2)
    for now in gradients(mean, noise, 2, 30):
        step(world, framework, now)
    (row,) = ended(world)
    assert row["ratio"] == pytest.approx(mean / noise, rel=0.1)
    assert row.keys() == ROW and row["reason"] == FIRST and row["step"] == 30


def test_noise_makes_it_milder_and_nothing_stronger() -> None:
    """The level becomes milder by one when the ratio falls, until it is the mildest.

    The ratio is compared with the one at which the current level was chosen.
    """
    world, seen = simulate(AdaQS(LADDER, window=30, drop=0.5), 2), []
    noises = [1, 1.5, 1, 2.5, 2.5, 3, 6, 100, 1]
    for window, noise in enumerate(noises):
        for now in gradients(1, noise, 2, 30, seed=window):
            step(world, NUMPY, now)
        seen.append(world.exchanges[1].levels()["w"])
    reasons = [row["reason"] for row in ended(world)]
    assert reasons == [FIRST, STEADY, STEADY, FELL, STEADY, STEADY, FELL, MILDEST, STEADY]
    ranks = [1, 1, 1, 1, 2, 2, 2, 4, 4]
    assert seen == [f"PowerSGD(rank={rank})" for rank in ranks]


def test_scale_does_not_matter() -> None:
    histories = []
    for scale in (1.0, 2.0**20):
        world = simulate(AdaQS(LADDER, window=12), 1)
        for window, noise in enumerate((1, 4, 4)):
            for now in gradients(scale, noise * scale, 1, 12, seed=window):
                step(world, NUMPY, now)
        histories.append([(row["ratio"], row["level"]) for row in ended(world)])
    np.testing.assert_allclose(*histories, rtol=1e-5)
    assert histories[0][-1][1] > 0


def test_equal_gradients_have_no_deviation_and_zeros_no_ratio() -> None:
    for mean, wanted, reason in [(1.0, math.inf, FIRST), (0.0, math.nan, UNKNOWN)]:
        world = simulate(AdaQS(LADDER, window=8), 1)
        for now in gradients(mean, 0, 1, 8):
            step(world, NUMPY, now)
        (row,) = ended(world)
        assert row["reason"] == reason
        assert row["ratio"] == wanted or (math.isnan(row["ratio"]) and math.isnan(wanted))
        assert row["level"] == 0


def test_pure_noise_has_a_small_ratio() -> None:
    world = simulate(AdaQS(LADDER, window=50), 1)
    for now in gradients(0, 1, 1, 50):
        step(world, NUMPY, now)
    assert ended(world)[0]["ratio"] < 0.2


def test_rank_0_decides_by_its_own_gradients() -> None:
    world = simulate(AdaQS(LADDER, window=20), 2)
    for window, noise in enumerate((1, 10, 10)):
        for mine, other in zip(
            gradients(1, noise, 1, 20, seed=window), gradients(1, 1, 1, 20), strict=True
        ):
            step(world, NUMPY, [*mine, *other])
    assert [row["reason"] for row in ended(world)] == [FIRST, FELL, STEADY]


def test_windows_that_are_too_short_tell_nothing() -> None:
    policy = AdaQS(LADDER, probes=3)
    world = simulate(policy, 1)
    for number, now in enumerate(gradients(1, 1, 1, 26)):
        if number in (2, 6, 16):  # of two steps, four and ten; and one that goes on
            world.end_window()
        step(world, NUMPY, now)
    history = world.exchanges[0].policy.history
    assert [row["reason"] for row in history] == [UNKNOWN, UNKNOWN, FIRST]


@pytest.mark.parametrize("framework", parameters())
def test_a_bad_step_is_no_evidence_and_does_no_harm(framework: Framework) -> None:
    """After a step with a NaN, the ratio is still finite and about right."""
    world = simulate(AdaQS(LADDER, window=30), 2)
    for number, now in enumerate(gradients(1, 1, 2, 30)):
        if number == 10:
            now[1]["w"][3, 3] = np.nan
        step(world, framework, now)
    assert ended(world)[0]["ratio"] == pytest.approx(1, rel=0.15)


def test_nobody_says_how_long_a_window_is() -> None:
    """There is one warning, and the first window may have any length."""
    for policy in (AdaQS(LADDER), StepSchedule({0: Dense(), 1: TopK()})):
        kind = type(policy).__name__
        with pytest.warns(
            RuntimeWarning, match=rf"{kind}: after .*{kind}\(\.\.\., window="
        ) as told:
            run(policy, PATIENCE + 100)
        assert len(told) == 1 and not policy.history
        policy.end_window()
        assert policy.over


# ---------------------------------------------------------------------------------------- both
POLICIES = [
    AdaQS(LADDER, window=7, drop=0.9, probes=2),
    StepSchedule({0: PowerSGD(4), 1: PowerSGD(1), 3: TopK(0.1)}, window=4),
]


@pytest.mark.parametrize("policy", [*POLICIES, AdaQS(LADDER), StepSchedule({0: Dense()})], ids=repr)
def test_read_back(policy: Policy) -> None:
    again = parse(repr(policy))
    assert type(again) is type(policy) and repr(again) == repr(policy)
    assert repr(pickle.loads(pickle.dumps(policy))) == repr(policy)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_resumed_in_the_middle(policy: Policy) -> None:
    """A policy that is resumed through JSON, at any step, continues as if it had not stopped."""

    def steps(policy: Policy, first: int, last: int) -> None:
        for number in range(first, last):
            rates = {"w": 0.1, "v": 0.2}
            if policy.due(rates):
                probed = number % 7 in (1, 2)
                norms = {"w": 3.0 if probed else 12 - number / 2, "v": 2.0 + number % 5}
                decide(policy, norms, rates)
            policy.tick(rates)

    whole = copy.deepcopy(policy)
    whole.bind(OWNER, ["w", "v"])
    steps(whole, 0, 24)
    for cut in range(24):
        one, two = copy.deepcopy(policy), copy.deepcopy(policy)
        one.bind(OWNER, ["w", "v"])
        two.bind(OWNER, ["w", "v"])
        steps(one, 0, cut)
        saved = one.state_dict()
        text = json.dumps(saved)
        two.load_state_dict(json.loads(text))
        steps(two, cut, 24)
        steps(one, cut, 24)
        assert json.dumps(saved) == text, "a state dict is a snapshot"
        for other in (one, two):
            assert json.dumps(other.state_dict()) == json.dumps(whole.state_dict())
    assert len({row["level"] for row in whole.history}) > 1


WRONG = [
    (lambda: AdaQS([PowerSGD(1)]), ValueError, "AdaQS: levels is"),
    (lambda: AdaQS(PowerSGD(1)), ValueError, "AdaQS: levels is"),
    (lambda: AdaQS([PowerSGD(1), 4]), TypeError, "AdaQS: level 4 must be a Compressor"),
    *[(lambda d=d: AdaQS(LADDER, drop=d), ValueError, "AdaQS: drop is") for d in (0, 2, "a")],
    *[(lambda p=p: AdaQS(LADDER, probes=p), ValueError, "AdaQS: probes is") for p in (0, 1.5)],
    *[(lambda w=w: AdaQS(LADDER, window=w), ValueError, "AdaQS: window is") for w in (0, 5, "a")],
    *[
        (lambda s=s: StepSchedule(s), ValueError, "StepSchedule: schedule is")
        for s in ({}, {1: Dense()}, None, [Dense()])
    ],
    *[
        (lambda k=k: StepSchedule({0: Dense(), k: TopK()}), ValueError, "StepSchedule: a key")
        for k in (-1, 1.5, 2.0)
    ],
    (lambda: StepSchedule({0: 4}), TypeError, "StepSchedule: level 4 must be a Compressor"),
    (lambda: StepSchedule({0: Dense()}, window=0), ValueError, "StepSchedule: window is"),
]


@pytest.mark.parametrize(("make", "error", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_wrong_arguments(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize("aspect", ["output", "scope", "batching"])
def test_a_level_whose_kind_is_misspelt_is_refused(aspect: str) -> None:
    """A compressor of a user that sets `batching = "aliek"` would serve each tensor by itself."""
    Odd = type("Odd", (TopK,), {aspect: "aliek"})
    with pytest.raises(ValueError, match=f"^Odd: {aspect} is 'aliek', but must be one of '"):
        StepSchedule({0: Odd(0.01), 4: TopK(0.01)})


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_accumulated_gradients_are_measured_one_by_one(passes: int) -> None:
    """Windows count backward passes, and an exchange has one gradient of several."""
    policy = AdaQS([PowerSGD(1), PowerSGD(2)], window=12 * passes, probes=4)
    world, rng = simulate(policy, 2), np.random.default_rng(0)
    for each in world._policies:
        each.passes = passes
    mean = rng.standard_normal((40, 40))
    for number in range(25):
        noise = 0.2 if number < 12 else 1.0
        made = [{"w": mean + noise * rng.standard_normal((40, 40))} for _ in range(2)]
        world.step([{"w": x["w"].astype("f4")} for x in made])
    ratios = [row.ratio for row in world.exchanges[0].policy.history]
    np.testing.assert_allclose(ratios, [5, 1], rtol=0.15)
