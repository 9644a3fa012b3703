"""Tests of evidence: policies are given the evidence that they declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from frameworks import NUMPY, Framework, parameters

from accordion_hvd import QSGD, Accordion, Dense, PowerSGD, TopK, namespace, simulate
from accordion_hvd.engine import layout
from accordion_hvd.ops.spec import FOLDS, Spec
from accordion_hvd.policies import goodput
from accordion_hvd.policies.base import Decision, Seen, Windowed
from accordion_hvd.policies.evidence import (
    SKETCHED,
    CompressionError,
    Evidence,
    GradientSums,
    Step,
    StepTimes,
)
from accordion_hvd.policies.goodput import FEW, SAMPLE, Efficiency, EfficiencyWeights
from examples import simulated_training
from examples.config import Settings
from examples.data.digits import load_digits

SHAPES = {"one": (40, 30), "two": (40, 30), "large": (300, 256), "small": (5,)}
WINDOW, LONGER = 3, 6


class Norms(Evidence):
    """User-defined evidence: the largest norm of an average in a window."""

    key = "largest averages"

    def zeros(self, entry: Any) -> Any:
        """Return a zero, the norm before the first step."""
        return entry.spec.zeros((1,))

    def suits(self, compressor: Any) -> bool:
        """Return whether the compressor does not pack tensors into one vector."""
        return compressor.batching != "any"

    def after(self, kept: Any, step: Step) -> Any:
        """Return the larger one of the norm so far and the norm of this average."""
        xp = namespace(kept)
        count = step.buckets or 1
        rows = xp.reshape(xp.cast(step.mean, "float32"), (count, -1))
        norms = xp.bucket_norms(rows, xp.shape(rows)[1], "l2")
        return xp.maximum(kept, xp.reshape(norms, xp.shape(kept)))

    def read(self, exchange: Any) -> Any:
        """Return the largest norm of each bucket."""
        yield from ()
        return {
            entry.bucket.name: float(exchange.xp.to_numpy(entry.evidence[self.key])[0])
            for entry in exchange.bucket_states
            if self.key in entry.evidence
        }


class Watching(Windowed):
    """Policy that stores the evidence that it is given."""

    def __init__(self, compressor: Any, *evidence: Evidence) -> None:
        super().__init__(WINDOW)
        self.compressor, self.evidence = compressor, evidence
        self.given: list[Seen] = []

    def levels(self, name: str) -> tuple[Any, ...]:
        """Return the only level."""
        return (self.compressor,)

    def observing(self) -> bool:
        """Return True, since every window is observed."""
        return True

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Store the evidence, and decide nothing."""
        self.given.append({key: dict(found) for key, found in seen.items()})
        return []


def train(policy: Watching, framework: Framework, steps: int, bad: int = -1) -> Any:
    """Return the world of ranks, all gradients, and rank 0's residuals after each step."""
    rng, world, history, errors = np.random.default_rng(0), simulate(policy, 2), [], []
    for step in range(steps):
        mine = [
            {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
            for _ in range(2)
        ]
        if step == bad:
            mine[1]["one"][0, 0] = np.inf
        history.append([{k: x.copy() for k, x in rank.items()} for rank in mine])
        with framework.running():
            world.step([{k: framework.tensor(x) for k, x in rank.items()} for rank in mine], 0.1)
        entries = [entry for entry in world.exchanges[0].bucket_states if entry.bucket.compress]
        carried = {s.bucket.name: s.compressor.residual(s.state) for s in entries}
        errors.append({k: framework.array(x).copy() for k, x in carried.items() if x is not None})
    return world, history, errors


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("compressor", [TopK(0.1), PowerSGD(2)], ids=repr)
@pytest.mark.parametrize("bad", [-1, 4])
def test_the_relative_error(compressor: Any, bad: int, framework: Framework) -> None:
    """Only steps that count enter the error, also if small tensors share a call."""
    world, gradients, errors = train(
        Watching(compressor, CompressionError()), framework, 2 * WINDOW + 1, bad
    )
    policy, other = (exchange.policy for exchange in world.exchanges)
    assert len(policy.given) == 2 and not other.given
    for window, seen in enumerate(policy.given):
        assert set(seen["errors"]) == {"one", "two", "large"}
        for name, found in seen["errors"].items():
            lost = whole = 0.0
            for step in range(window * WINDOW, (window + 1) * WINDOW):
                if step != bad:
                    before = errors[step - 1][name].reshape(-1) if step else 0.0
                    whole += np.linalg.norm(before + gradients[step][0][name].reshape(-1)) ** 2
                    lost += np.linalg.norm(errors[step][name]) ** 2
            assert found == pytest.approx((lost / whole) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("framework", parameters())
def test_evidence_of_ones_own_beside_sums(framework: Framework) -> None:
    policy = Watching(TopK(1.0), Norms(), GradientSums("reduced"))
    world, gradients, _ = train(policy, framework, WINDOW + 1)
    seen = world.exchanges[0].policy.given[0]
    for name in ("one", "two", "large"):
        means = [sum(rank[name] for rank in now) / 2 for now in gradients[:WINDOW]]
        largest = max(map(np.linalg.norm, means))
        assert seen["largest averages"][name] == pytest.approx(largest, rel=1e-4)
        assert seen["gradients"][name] == pytest.approx(np.linalg.norm(sum(means)), rel=1e-4)


def run_alone(reading: Any) -> Any:
    """Return the result of a generator that communicates nothing."""
    with pytest.raises(StopIteration) as ended:
        next(reading)
    return ended.value.value


def test_sketches_change_decisions_only_near_the_threshold() -> None:
    """Within four standard deviations of the ratio, for norms that move around the threshold."""
    size, threshold, close, agreed = 70_000, 0.5, 0, 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        bucket = SimpleNamespace(size=size, shape=(size,), name=f"layer {seed}")
        evidence = GradientSums()
        spec = Spec((size,), "float32", NUMPY.xp, "cuda:0")
        entry = SimpleNamespace(spec=spec, bucket=bucket)
        kept = evidence.zeros(entry)
        assert kept.size < 0.05 * size and (abs(kept[1]) == 1).all()  # a CPU keeps all
        on_cpu = SimpleNamespace(spec=replace(spec, device=None), bucket=bucket)
        assert evidence.zeros(on_cpu).shape == (size,)
        deviation = (2 / (kept.shape[1] - 2 * FOLDS)) ** 0.5 / 2
        common = rng.standard_normal(size).astype(np.float32)
        scale, before = 1.0, None
        for _ in range(100):
            scale = max(scale, 1e-3) * rng.choice([0.3, 0.48, 0.5, 0.52, 1.0, 1.45, 1.5, 1.55, 2])
            x = np.float32(scale) * (common + rng.standard_normal(size).astype(np.float32))
            sums = evidence.before(kept, Step(x, TopK(0.1), {}))
            entry.evidence = {"gradients": sums}
            exchange = SimpleNamespace(bucket_states=[entry], xp=NUMPY.xp)
            norms = run_alone(evidence.read(exchange))
            now = np.array([np.linalg.norm(x), norms[bucket.name]])
            if before is not None:
                change = abs(before - now) / before
                bound = 4 * deviation * 2**0.5 * now[0] / before[0]
                assert abs(change[0] - change[1]) <= bound
                close += abs(change[0] - threshold) < bound
                agreed += (change[0] >= threshold) == (change[1] >= threshold)
            before = now
    assert close > 50 and 297 - close < agreed < 297, (close, agreed)


class Sketches(GradientSums):
    """The evidence of an accelerator, on a CPU."""

    key = "sketches"

    def _sketched(self, entry: Any) -> bool:
        return bool(entry.bucket.size > SKETCHED)


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("compressor", [PowerSGD(2), TopK(0.1), QSGD(4)], ids=repr)
def test_sketches_in_stacks(
    compressor: Any, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms are those of sketches that are alone; no sketch is part of one vector."""
    shapes = {"a": (300, 256), "b": (40, 30), "c": (300, 256), "d": (256, 300)}
    found = []
    for limits in (layout.CPU, layout.ACCELERATOR):
        monkeypatch.setattr(layout, "CPU", limits)
        policy = Watching(compressor, Sketches(), GradientSums())
        world, rng = simulate(policy, 2), np.random.default_rng(0)
        for _ in range(WINDOW + 1):
            grads = {
                k: framework.tensor(rng.standard_normal(s).astype("f")) for k, s in shapes.items()
            }
            with framework.running():
                world.step([grads, {k: x + 1 for k, x in grads.items()}], 0.1)
        batches = world.exchanges[0].layout.batches
        found.append((len(batches), world.exchanges[0].policy.given[0]))
    (apart, one), (stacked, other) = found
    assert apart == 4 and stacked == (3 if compressor.batching == "alike" else 4)
    for name in shapes:
        assert other["sketches"][name] == pytest.approx(one["sketches"][name], rel=1e-5)
        assert other["sketches"][name] == pytest.approx(other["gradients"][name], rel=0.1)
        assert other["gradients"][name] == pytest.approx(one["gradients"][name], rel=1e-5)


class Study(Accordion):
    """Accordion that stores the norms of sums and of their sketches, also those of its copies."""

    norms: ClassVar[dict[str, list[tuple[float, float]]]] = {}

    def __init__(self) -> None:
        super().__init__(PowerSGD(4), PowerSGD(1), threshold=0.3, interval=1)
        self.evidence = (*self.evidence, Sketches())

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Store the norms of this window, and decide by those of the sums."""
        for name, norm in seen["gradients"].items():
            self.norms.setdefault(name, []).append((norm, seen["sketches"][name]))
        return super().decide(seen, lr)


@pytest.mark.nightly
def test_sketches_decide_as_sums_but_near_the_threshold_in_a_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On digits, with layers that are large enough to have sketches."""
    settings = Settings(
        shift=1, width=270, depth=4, epochs=36, lr=0.03, schedule="drops", drops=[24],
        output=str(tmp_path), progress=False,
    )  # fmt: skip
    monkeypatch.setattr(Settings, "policy", lambda _: Study())
    simulated_training.train(settings, load_digits(), 2)
    deviation, critical, differ, ratios = 0.022, 0, 0, []
    for name, norms in Study.norms.items():
        large = name in ("3.weight", "5.weight", "7.weight")
        ratios += [sketch / norm for norm, sketch in norms if large]
        assert large or all(sketch == norm for norm, sketch in norms)
        for before, now in zip(norms, norms[1:], strict=False):
            change = [abs(m - n) / m for m, n in zip(before, now, strict=True)]
            bound = 4 * deviation * 2**0.5 * now[0] / before[0]
            assert abs(change[0] - change[1]) <= bound * large, (name, before, now)
            critical += change[0] >= 0.3
            differ += (change[0] >= 0.3) != (change[1] >= 0.3)
    assert len(ratios) > 100 and 0.5 * deviation < np.std(ratios) < 1.2 * deviation
    assert critical > 5 and differ <= 2  # 10 or more, depending on the processor


PROGRESS = (Efficiency(), EfficiencyWeights())


def progress(framework: Framework, compressor: Any, bad: int = -1) -> tuple[Watching, list[Any]]:
    """Train with gradients that are alike from step to step; return the policy and the steps.

    A step is a pair: the gradients of both ranks, and their mean after compression.
    """
    policy = Watching(compressor, *PROGRESS)
    policy.window = LONGER
    world, rng, steps = simulate(policy, 2), np.random.default_rng(0), []
    base = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    for step in range(2 * LONGER + 1):
        mine = [
            {k: x + rng.standard_normal(x.shape).astype(np.float32) for k, x in base.items()}
            for _ in range(2)
        ]
        if step == bad:
            mine[1]["one"][0, 0] = np.inf
        given = [{k: x.copy() for k, x in rank.items()} for rank in mine]
        with framework.running():
            means = world.step(
                [{k: framework.tensor(x) for k, x in rank.items()} for rank in mine], 0.1
            )[0]
        means = means and {k: framework.array(x).copy() for k, x in means.items()}
        steps.append((given, means))
    return world.exchanges[0].policy, steps


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("compressor", [TopK(0.1), PowerSGD(2)], ids=repr)
def test_the_efficiency(compressor: Any, framework: Framework) -> None:
    """The efficiency is a ratio of inner products with the step before, summed over ranks.

    The part of <g', g> that is due to differences between the ranks is subtracted. Large buckets
    are sampled.
    """
    policy, steps = progress(framework, compressor)
    assert len(policy.given) == 2
    for window, seen in enumerate(policy.given):
        first = window * LONGER
        for name in ("one", "two", "large"):
            every = -(-np.prod(SHAPES[name]) // SAMPLE)
            own = sent = 0.0
            for step in range(first + 1, first + LONGER):
                (before, mean), (now, _) = steps[step - 1], steps[step]
                for rank in range(2):
                    g, last, u = (
                        x[name].reshape(-1)[::every] for x in (now[rank], before[rank], mean)
                    )
                    own, sent = own + g @ last / 2, sent + g @ u / 2
            samples = np.array([
                [row[name].reshape(-1)[::every] for row in now]
                for now, _ in steps[first : first + LONGER]
            ], np.float64)  # fmt: skip
            few = samples[:, :, :: -(-samples.shape[2] // FEW)]
            one, other = few[::2].sum(0), few[1::2].sum(0)
            both = (one * other).sum() / 2 - one.mean(0) @ other.mean(0)
            pairs = len(few[::2]) * len(few[1::2])
            own -= (LONGER - 1) * both / pairs * samples.shape[2] / few.shape[2]
            assert seen[EfficiencyWeights.key][name] == pytest.approx(own, rel=1e-4)
            assert seen[Efficiency.key][name] == pytest.approx(sent / own, rel=1e-4)
    assert np.prod(SHAPES["large"]) > SAMPLE


@pytest.mark.parametrize("framework", parameters())
def test_an_efficiency_is_finite_although_a_gradient_is_not(framework: Framework) -> None:
    policy, _ = progress(framework, PowerSGD(2), bad=8)
    for seen in policy.given:
        assert {"two", "large"} <= set(seen[Efficiency.key])
        assert all(np.isfinite([*found.values()]).all() for found in seen.values())


@pytest.mark.parametrize("apart", [0.0, 1.0, 4.0])
def test_unequal_shards_do_not_make_a_lossless_level_inefficient(
    apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level that loses nothing has the efficiency 1, also if the ranks' data differ."""

    def measured() -> float:
        policy = Watching(TopK(1.0), *PROGRESS)
        policy.window, ranks = 100, 4
        world, rng = simulate(policy, ranks), np.random.default_rng(0)
        shards = apart * rng.standard_normal((ranks, 40, 30))
        shards += rng.standard_normal((40, 30)) - shards.mean(0)
        for _ in range(101):
            noisy = shards + rng.standard_normal(shards.shape)
            world.step([{"w": mine.astype("f")} for mine in noisy], 0.1)
        return world.exchanges[0].policy.given[0][Efficiency.key]["w"]

    assert measured() == pytest.approx(1.0, abs=0.02)
    monkeypatch.setattr(goodput, "_inequality", lambda *sums: 0.0)
    assert measured() < 0.6 or apart == 0.0


def test_an_efficiency_that_may_be_chance_is_left_out() -> None:
    """At most a tenth of the efficiencies is reported if gradients have no common part."""
    policy = Watching(PowerSGD(2), *PROGRESS)
    world, _, _ = train(policy, NUMPY, 20 * WINDOW + 1)
    told = [len(seen[Efficiency.key]) for seen in world.exchanges[0].policy.given]
    assert sum(told) <= 0.1 * 3 * len(told)


def test_a_level_without_errors_tells_none() -> None:
    world, _, _ = train(Watching(Dense(), CompressionError()), NUMPY, WINDOW + 1)
    assert world.exchanges[0].policy.given == [{"errors": {}}]


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("level", [Dense(), PowerSGD(1)], ids=repr)
def test_switches_within_a_window_keep_the_evidence(level: Any, framework: Framework) -> None:
    """Errors from before a switch count, also if the new level packs buckets into one vector."""

    def errors(*switched: str) -> dict[str, float]:
        policy = Watching(TopK(0.1), CompressionError())
        policy.levels = lambda name: (TopK(0.1), level)  # type: ignore[method-assign]
        world, rng = simulate(policy, 2), np.random.default_rng(0)
        for step in range(WINDOW + 1):
            grads = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
            with framework.running():
                world.step([{k: framework.tensor(x) for k, x in grads.items()}] * 2, 0.1)
            for exchange in world.exchanges if step == WINDOW - 2 else ():
                for entry in exchange.bucket_states:
                    if entry.bucket.name in switched:
                        exchange.switch(entry, 1)
        return dict(world.exchanges[0].policy.given[0]["errors"])

    kept, some, most = errors(), errors("one"), errors("one", "two")
    assert set(kept) == set(some) == set(most) == {"one", "two", "large"}
    assert kept["two"] == some["two"] and kept["large"] == some["large"] == most["large"]
    assert some["one"] == most["one"] != kept["one"] and most["two"] != kept["two"]


def test_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("accordion_hvd.policies.evidence.time.perf_counter", lambda: now[0])
    times = StepTimes()
    for step, seconds in enumerate([1.0, 2.0, 7.0]):
        times.note(step)
        times.note(step)  # a second call changes nothing
        now[0] += seconds
    times.note(3)
    assert times.times == [1.0, 2.0, 7.0]
    with pytest.raises(StopIteration) as stop:
        next(times.read(None))
    assert stop.value.value == {StepTimes.JOB: 2.0}
    times.restart()
    times.note(9)
    assert not times.times
