"""Tests of Goodput: the level with most progress per second serves, unless residuals forbid it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decisions import rows_of
from frameworks import Framework, parameters

from accordion_hvd import FP16, Dense, Fixed, Goodput, PowerSGD, TopK, parse, simulate
from accordion_hvd.policies import gate as gates
from accordion_hvd.policies.displacement import RelativeResidual
from accordion_hvd.policies.gate import Cost, Gate, Link
from accordion_hvd.policies.goodput import FIRST_TRIAL, LEAST, Efficiency, EfficiencyWeights

LADDER = (Dense(), FP16(), PowerSGD(4), PowerSGD(1))
DENSE, HALF, MILD, STRONG = range(4)
BOUND = 0.06
"""Bound for which the residuals below were chosen."""
NAMES = ("w", "v", "u")


class Owner:
    """Stands for an exchange."""


class Job:
    """A rank whose steps and residuals are those of a model.

    A bucket has 1 MB. Each level has a fraction of the bytes, work in seconds per bucket, an
    efficiency, and a residual relative to the weights.
    """

    SENT = (1.0, 0.5, 0.05, 0.02)

    def __init__(
        self,
        bandwidth: float,
        work: float = 1e-3,
        residuals: tuple[float, float] = (0.0, 0.0),
        efficiencies: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.bandwidth, self.work = bandwidth, (0.0, 0.0, work, work)
        self.residuals = (0.0, 0.0, *residuals)
        self.efficiencies = (1.0, 1.0, *efficiencies)
        self.lr, self.now, self.step = 0.1, 0.0, 0
        self.policy, self.owner = Goodput(LADDER, bound=BOUND, window=10), Owner()
        self.policy.bind(self.owner, NAMES)
        self.served: list[int] = []  # of each step, by the first bucket

    @property
    def gate(self) -> Gate:
        assert self.policy.gate is not None
        return self.policy.gate

    def seconds(self, level: int) -> float:
        """Return the duration of a step in which a level serves all buckets."""
        return 0.02 + len(NAMES) * (self.work[level] + self.SENT[level] * 1e6 / self.bandwidth)

    def costs(self) -> dict[str, Cost]:
        sent = {repr(x): 1e6 * part for x, part in zip(LADDER, self.SENT, strict=True)}
        found = {}
        for name in NAMES:
            level = self.policy.level(name)
            found[name] = Cost(self.work[level], 1e6 * self.SENT[level], 1e6, sent)
        return found

    def seen(self) -> dict[str, dict[str, float]]:
        """Return the evidence of a window."""
        serving = {name: self.policy.serving(name) for name in NAMES}
        return {
            RelativeResidual.key: {n: self.residuals[level] for n, level in serving.items()},
            EfficiencyWeights.key: {n: 2.0 for n, level in serving.items() if level >= MILD},
            Efficiency.key: {n: self.efficiencies[x] for n, x in serving.items() if x >= MILD},
        }

    def run(self, steps: int) -> int:
        """Train; return the level that serves in the end."""
        for _ in range(steps):
            lr = dict.fromkeys(NAMES, self.lr)
            if self.policy.due(lr):
                self.policy.apply(self.policy.decide(self.seen(), lr))
            wanted = {name: self.policy.level(name) for name in NAMES}
            if self.gate.due(self.step, wanted):
                link = Link(self.bandwidth, 1e-4) if self.gate.probes(wanted) else None
                names = {name: repr(LADDER[level]) for name, level in wanted.items()}
                decision = self.gate.decide(self.step, wanted, names, self.costs(), link)
                self.gate.apply(json.loads(json.dumps(decision)), wanted)
            self.gate.tick(self.step)
            self.policy.tick(lr)
            levels = [self.policy.serving(name) for name in NAMES]
            self.served.append(levels[0])
            self.now += sum(map(self.seconds, levels)) / len(levels)
            self.step += 1
        return self.served[-1]


Make = Callable[..., Job]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*args: Any, **options: Any) -> Job:
        job = Job(*args, **options)
        monkeypatch.setattr(gates.time, "perf_counter", lambda: job.now)
        return job

    return make


@pytest.mark.parametrize("bandwidth", [2.5e6, 25e6, 125e6, 1.25e9, 1e11])
@pytest.mark.parametrize("work", [1e-4, 1e-3, 1e-2])
def test_the_fastest_level_serves(clocked: Make, bandwidth: float, work: float) -> None:
    job = clocked(bandwidth, work)
    level = job.run(300)
    assert job.seconds(level) <= gates.MARGIN * min(map(job.seconds, range(4)))


@pytest.mark.parametrize(
    ("residuals", "strongest", "reason"),
    [
        ((0.1, 0.5), STRONG, "between the bounds"),
        ((0.01, 0.1), STRONG, "the strongest level"),
        ((0.1, 1.0), MILD, "the next level would displace"),
        ((0.4, 0.5), MILD, "between the bounds"),
        ((1.0, 3.0), MILD, "displaced"),
    ],
)
def test_a_level_that_displaces_does_not_serve(
    clocked: Make, residuals: tuple[float, float], strongest: int, reason: str
) -> None:
    """On a slow link, the strongest level that is permitted is the fastest."""
    job = clocked(2.5e6, residuals=residuals)
    job.run(300)
    assert job.policy.level("w") == strongest
    assert job.run(200) == strongest
    assert max(job.served[300:]) == strongest  # a forbidden level is not tried again
    assert job.policy.history[-1].reason == reason


def test_a_forbidden_level_returns_when_the_rate_has_fallen(clocked: Make) -> None:
    job = clocked(2.5e6, residuals=(0.1, 1.0))
    assert job.run(300) == MILD
    job.lr = 0.07  # 0.007 is still too much
    assert job.run(100) == MILD
    job.lr = 0.01
    assert job.run(100) == STRONG


def test_the_level_follows_the_link(clocked: Make) -> None:
    job = clocked(2.5e6)
    assert job.run(200) == STRONG
    job.bandwidth = 1e11
    assert job.run(1200) == DENSE  # steps are not slower, so only the next measurement tells
    job.bandwidth = 2.5e6
    before = job.step
    assert job.run(120) == STRONG
    assert STRONG in job.served[before : before + 2 * gates.CHECK]


@pytest.mark.parametrize("bandwidth", [2.5e6, 25e6, 60e6, 125e6, 1.25e9])
@pytest.mark.parametrize("efficiencies", [(0.95, 0.9), (0.9, 0.5), (0.8, 0.8), (0.3, 0.2)])
def test_progress_per_second_decides(
    clocked: Make, bandwidth: float, efficiencies: tuple[float, float]
) -> None:
    job = clocked(bandwidth, efficiencies=efficiencies)
    level = job.run(300)
    goodput = [e / job.seconds(x) for x, e in enumerate(job.efficiencies)]
    assert goodput[level] * gates.MARGIN >= max(goodput), (level, goodput)
    text = f", of which {job.efficiencies[level]:.0%} count" if level >= MILD else " ms a step"
    assert job.gate.verdict.endswith(text)


def test_a_level_that_did_not_pay_is_tried_again_after_twice_the_windows(clocked: Make) -> None:
    """Each time that a level does not pay, twice as many windows pass before its next trial.

    The strongest level is faster, but makes too little progress; each trial costs a window.
    """
    job = clocked(2.5e6, efficiencies=(1.0, 0.4))
    job.run(600)
    tried = {row.window + 1 for row in job.policy.history if row.efficiency == 0.4}
    assert tried == {5, 9, 17, 33}  # the windows after 4, 8, 16 and 32
    assert min(tried) == FIRST_TRIAL + 1
    job.efficiencies = (0.0, 0.0, 1.0, 0.9)
    assert job.run(200) == STRONG  # the 65th window finds that it pays now


def test_efficiencies_of_windows_are_combined(clocked: Make) -> None:
    policy = clocked(2.5e6).policy
    lr = dict.fromkeys(NAMES, 0.1)
    assert policy.efficiency({}) == 1.0
    for weight, found in ((4.0, 0.5), (2.0, 1.0)):
        weights, efficiencies = {"w": weight, "v": 3.0}, {"w": found, "v": 2.0}
        seen = {EfficiencyWeights.key: weights, Efficiency.key: efficiencies}
        policy.apply(policy.decide(seen, lr))
    w, v = (2.0 / 2 + 2.0) / (4.0 / 2 + 2.0), 1.0  # v made more progress than possible: noise
    assert policy.efficiency({}) == pytest.approx((4.0 * w + 4.5 * v) / 8.5)
    assert policy.efficiency({"w": 2}) == pytest.approx((4.0 + 4.5) / 8.5)  # FP16 serves w
    strongest = dict.fromkeys(NAMES, 0)  # not tried yet, so that it counts as the level before it
    assert policy.efficiency(strongest) == policy.efficiency({})
    seen = {EfficiencyWeights.key: {"w": 8.0}, Efficiency.key: {"w": -1.0}}
    policy.apply(policy.decide(seen, lr))
    assert policy.history[-len(NAMES)].efficiency == LEAST


def test_windows_begin_after_trials(clocked: Make) -> None:
    """A window contains no steps of trials, because residuals of other levels are no evidence."""
    job = clocked(125e6, residuals=(0.1, 0.5))
    while not job.policy.history:
        job.run(1)
    first = job.policy.history[0].step
    assert all(level == MILD for level in job.served[first - 9 : first])
    assert len(set(job.served)) > 1


@pytest.mark.parametrize("framework", parameters())
def test_ranks_follow_and_nothing_is_lost(framework: Framework) -> None:
    """Levels change while training; averages and residuals add up to the gradients."""
    policy = Goodput([Dense(), TopK(0.5), TopK(0.1)], bound=0.05, window=5)
    world, rng = simulate(policy, 2), np.random.default_rng(0)
    weights = {"w": framework.tensor(np.ones((24, 50), np.float32))}
    given, averaged, levels = np.zeros((24, 50)), np.zeros((24, 50)), set()
    for step in range(90):
        mine = [rng.standard_normal((24, 50)).astype(np.float32) for _ in range(2)]
        given += np.mean(mine, 0)
        with framework.running():
            lr = 0.1 if step < 40 else 1e-3
            means = world.step([{"w": framework.tensor(x)} for x in mine], lr, [weights] * 2)
        ranks = [framework.array(mean["w"]) for mean in means if mean is not None]
        np.testing.assert_array_equal(ranks[0], ranks[1])
        averaged += ranks[0]
        assert len({repr(exchange.levels()) for exchange in world.exchanges}) == 1
        levels |= set(world.exchanges[0].levels().values())
    assert levels >= {"Dense()", "TopK(ratio=0.5)"}
    carried = np.zeros((24, 50))
    for exchange in world.exchanges:
        (entry,) = exchange.bucket_states
        residual = entry.residual(exchange.info(entry))
        if residual is not None:
            carried += framework.array(residual) / 2
    np.testing.assert_allclose(averaged + carried, given, atol=1e-3)
    first, second = (exchange.policy for exchange in world.exchanges)
    assert rows_of(first) == rows_of(second) and first.history
    assert first.state_dict()["_ratios"] == second.state_dict()["_ratios"]


def test_resumed_in_the_middle(clocked: Make) -> None:
    one = clocked(2.5e6, residuals=(0.1, 1.0))
    one.run(150)
    two = Goodput(LADDER, bound=BOUND, window=10)
    two.bind(one.owner, NAMES)
    two.load_state_dict(json.loads(json.dumps(one.policy.state_dict())))
    assert json.dumps(two.state_dict()) == json.dumps(one.policy.state_dict())
    assert two.level("w") == MILD
    two._steps, two.gate = 10, one.gate
    assert two.efficiency({}) == one.policy.efficiency({})
    lr = {name: 0.1 for name in NAMES}
    rows = two.decide({RelativeResidual.key: dict.fromkeys(NAMES, 0.1)}, lr)
    assert {row.reason for row in rows} == {"the next level would displace"}


def test_unknown_residuals_count_as_harm() -> None:
    policy, owner = Goodput(LADDER, bound=BOUND, window=2), Owner()
    policy.bind(owner, ["w"])
    policy.current["w"] = STRONG
    (row,) = policy.decide({}, {"w": 0.1})
    assert (row.level, row.reason) == (MILD, "displaced") and math.isnan(row.norm)
    policy.apply([row])
    assert policy.level("w") == MILD


def test_arguments() -> None:
    for levels in ([PowerSGD(1)], "powersgd", 3):
        with pytest.raises(ValueError, match="Goodput: levels is .* two or more compressors"):
            Goodput(levels)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Compressor"):
        Goodput([Dense(), "topk"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="bound is 0, but must be a number above 0"):
        Goodput(LADDER, bound=0)
    with pytest.raises(ValueError, match="release is 2"):
        Goodput(LADDER, release=2)
    text = "Goodput([Dense(), FP16(), PowerSGD(4), PowerSGD(1)], window=5)"
    assert repr(parse(text)) == repr(Goodput(LADDER, window=5))
    assert Goodput([TopK(0.1), TopK(0.01)]).start("w") == 0
    assert Goodput([Dense(), FP16()]).start("w") == 1
    assert Goodput(LADDER).levels("w") == LADDER and not isinstance(Goodput(LADDER), Fixed)
