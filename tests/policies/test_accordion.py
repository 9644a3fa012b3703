"""Tests of Accordion: the rule of the paper, and equal decisions on all ranks and frameworks."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from alternating import Alternating
from cases import CASES, FIRST, Case
from decisions import decide, rows_of
from frameworks import (
    NUMPY,
    POISONED,
    TENSORFLOW,
    TORCH,
    Framework,
    combined,
    parameters,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import SHAPE, several, step

from accordion_hvd import (
    FP16,
    LGC,
    Accordion,
    Compressor,
    Dense,
    Fixed,
    Policy,
    PowerSGD,
    RandomK,
    Replay,
    StepSchedule,
    TopK,
    simulate,
)
from accordion_hvd.compressors.autoencoder import Autoencoder
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.policies.accordion import CHANGED, HIGH, LOW
from accordion_hvd.policies.base import PATIENCE
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, World

MILD, STRONG = PowerSGD(4), PowerSGD(1)
SOCIABLE = [case for case in CASES if not case.private]  # private ones serve alone


class Owner:
    """Stands for an exchange."""


OWNER, OTHER = Owner(), Owner()


def accordion(**options: Any) -> Accordion:
    return Accordion(**{"low": MILD, "high": STRONG, "window": 1, "interval": 1, **options})


def drive(
    policy: Policy,
    norms: Sequence[Mapping[str, float] | float],
    lrs: Sequence[float] | float = 0.1,
    steps: int = 1,
) -> list[dict[str, int]]:
    """Return the levels in each window, for a policy with these norms and learning rates.

    The last item has the levels after the last window.
    """
    levels, told = [], {}
    for window, norm in enumerate(norms):
        lr = lrs if isinstance(lrs, float) else lrs[window]
        names = norm if isinstance(norm, Mapping) else {"w": norm}
        if not policy.current:
            policy.bind(OWNER, list(names))
        rates = dict.fromkeys(policy.current, lr)
        for _ in range(steps):
            if policy.due(rates):
                decide(policy, told, rates)
            policy.tick(rates)
        levels.append(dict(policy.current))
        told = dict(names)
    rates = dict.fromkeys(policy.current, lr)
    decide(policy, told, rates)
    return [*levels, dict(policy.current)]


def of(levels: Sequence[Mapping[str, int]], name: str = "w") -> list[int]:
    return [level[name] for level in levels]


# ------------------------------------------------------------------------------- the paper's rule
GOLDEN = {  # norms at the ends of windows 0, 10, 20, 30; levels after them; relative changes
    "A": ([10, 4, 3, 2], [LOW, LOW, HIGH, HIGH], [0.6, 0.25, 1 / 3]),
    "B": ([1, 1.6, 0.8, 0.8], [LOW, LOW, LOW, HIGH], [0.6, 0.5, 0]),
    "C": ([0, 2, 1.01, 1], [LOW, LOW, HIGH, HIGH], [math.nan, 0.495, 1 / 101]),
}


@pytest.mark.parametrize("trace", GOLDEN)
def test_golden_traces(trace: str) -> None:
    norms, wanted, changes = GOLDEN[trace]
    between = [1e9 * (window % 3) for window in range(9)]  # norms of other windows do not matter
    stream = [n for norm in norms for n in [float(norm), *between]]
    policy = accordion(interval=10)
    levels = of(drive(policy, stream))
    assert [levels[10 * i + 1] for i in range(4)] == wanted
    assert [row["level"] for row in policy.history] == wanted
    np.testing.assert_allclose([row["change"] for row in policy.history[1:]], changes, atol=1e-12)
    assert levels[0] == LOW


def authors_lr(epoch: int, workers: int = 4) -> float:
    """Return an epoch's learning rate by the authors' schedule (evaluated at the epoch before)."""
    done = epoch - 1
    if done < 0:
        return 0.1
    factor = 1 + (workers - 1) * min(done / 5, 1)
    return 0.1 * factor * (0.01 if done > 250 else 0.1 if done > 150 else 1)


@pytest.mark.parametrize("lr_drop", [None, 0.5])
def test_timeline_of_the_learning_rate(lr_drop: float | None) -> None:
    policy = accordion(interval=10, lr_drop=lr_drop)
    levels = of(drive(policy, [3.0] * 300, [authors_lr(epoch) for epoch in range(300)]))[:300]
    mild = [epoch for epoch, level in enumerate(levels) if level == LOW]
    assert mild == [*range(0, 11), *range(152, 161), *range(252, 261)]


def cosine(window: int, windows: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * window / windows))


def test_cosine_schedule() -> None:
    """A cosine schedule falls in every window.

    By the authors' rule all windows are critical, by default none of windows 11 to 94.
    """
    lrs = [cosine(window, 100) for window in range(100)]
    assert of(drive(accordion(interval=10, lr_drop=None), [1.0] * 100, lrs))[:100] == [LOW] * 100
    levels = of(drive(accordion(interval=10), [1.0] * 100, lrs))
    assert levels[11:95] == [HIGH] * 84


def test_warm_up_is_no_fall() -> None:
    for lr_drop in (None, 0.5, 1.0):
        policy = accordion(lr_drop=lr_drop)
        levels = of(drive(policy, [1.0] * 6, [0.1, 0.2, 0.3, 0.3, 0.3, 0.3]))
        assert levels == [LOW, LOW, *[HIGH] * 5]


def test_lr_drop_is_a_ratio() -> None:
    for lr_drop, wanted in [(None, LOW), (1.0, LOW), (0.6, LOW), (0.5, HIGH)]:
        lrs = [0.1, 0.1, 0.1, 0.06, 0.06]
        levels = of(drive(accordion(lr_drop=lr_drop, interval=2), [1.0] * 5, lrs))
        assert levels[3] == wanted  # no check at the end of window 2 says otherwise ...
        assert levels[1] == LOW
    levels = of(drive(accordion(lr_drop=0.5), [1.0] * 4, [0.1, 0.1, 0.1, 0.05]))
    assert levels[3] == LOW  # ... and equality is a fall


def test_a_fall_is_from_window_to_window() -> None:
    """Falls are measured from one window to the next, not from step to step.

    A learning rate that falls by a tenth at every step has fallen far within a window.
    """
    for factor, wanted in [(0.9, LOW), (0.99, HIGH)]:  # to a third in ten steps, or by a tenth
        policy = accordion(window=10)
        policy.bind(OWNER, ["w"])
        for number in range(35):
            rates = {"w": factor**number}
            if policy.due(rates):
                decide(policy, {"w": 1.0}, rates)
            policy.tick(rates)
        assert [row["level"] for row in policy.history] == [LOW, wanted, wanted]
        assert policy.history[1]["lr"] == factor**20
        assert policy.history[1]["previous_lr"] == factor**10


def test_a_fall_lasts_until_the_next_check() -> None:
    lrs = [1.0] * 5 + [0.1] * 5
    levels = of(drive(accordion(interval=4), [1.0] * 10, lrs))
    assert levels == [LOW] * 5 + [LOW] * 4 + [HIGH] * 2
    lrs = [1.0] * 7 + [0.1] * 5
    levels = of(drive(accordion(interval=4), [1.0] * 12, lrs))
    assert levels == [LOW] * 5 + [HIGH] * 2 + [LOW] * 2 + [HIGH] * 4


def test_equality_is_critical() -> None:
    assert of(drive(accordion(), [1.0, 1.5]))[-1] == LOW
    assert of(drive(accordion(), [1.0, 0.5]))[-1] == LOW
    assert of(drive(accordion(), [1.0, 1.4999]))[-1] == HIGH
    assert of(drive(accordion(), [1.0, 0.5001]))[-1] == HIGH


def test_threshold_zero_and_infinity() -> None:
    norms = [1.0, 1.0, 5.0, 5.0, 0.1]
    assert set(of(drive(accordion(threshold=0), norms))) == {LOW}
    assert of(drive(accordion(threshold=math.inf), norms)) == [LOW, LOW, *[HIGH] * 4]


def test_zero_previous_norm_is_critical() -> None:
    policy = accordion(threshold=math.inf)
    assert of(drive(policy, [0.0, 0.0, 2.0, 2.0])) == [LOW, LOW, LOW, LOW, HIGH]
    assert [row["reason"] for row in policy.history][1:3] == ["previous norm was zero"] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite_are_critical(value: float) -> None:
    policy = accordion()
    assert of(drive(policy, [1.0, 1.0, value, 1.0, 1.0])) == [LOW, LOW, HIGH, LOW, LOW, HIGH]


def test_layers_are_independent() -> None:
    one, two = [1.0, 1.0, 9.0, 9.0], [1.0, 3.0, 3.0, 1.0]
    both = drive(accordion(), [{"one": a, "two": b} for a, b in zip(one, two, strict=True)])
    assert of(both, "one") == of(drive(accordion(), one))
    assert of(both, "two") == of(drive(accordion(), two))
    assert of(both, "one") != of(both, "two")


norm_lists = st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.5, 2.0, 0.7, 1e-6, 40.0]), min_size=1)
random_norms = st.lists(st.floats(0, 100), min_size=1, max_size=25)


def oracle(
    norms: Sequence[float],
    lrs: Sequence[float],
    interval: int,
    threshold: float,
    lr_drop: float | None,
) -> list[int]:
    """Return the levels by an independent implementation of the rule in the authors' code."""
    level, history, levels = LOW, {}, []
    for epoch, norm in enumerate(norms):
        levels.append(level)
        history[epoch] = norm
        if epoch % interval == 0:
            old = history.get(epoch - interval, 0.0)  # epoch 0 is critical, as is a zero norm
            level = LOW if old == 0 or abs(old - norm) / old >= threshold else HIGH
        if epoch + 1 < len(norms):
            fell = lrs[epoch + 1] < lrs[epoch]
            if fell and (lr_drop is None or lrs[epoch + 1] <= lr_drop * lrs[epoch]):
                level = LOW
    return [*levels, level]


@settings(max_examples=300, deadline=None)
@given(
    norms=st.one_of(norm_lists, random_norms),
    lrs=st.lists(st.sampled_from([0.4, 0.2, 0.1, 0.09, 0.01]), min_size=25, max_size=25),
    interval=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.0]),
    lr_drop=st.sampled_from([None, 0.5, 0.9]),
    steps=st.integers(1, 3),
)
def test_same_as_the_oracle(
    norms: list[float],
    lrs: list[float],
    interval: int,
    threshold: float,
    lr_drop: float | None,
    steps: int,
) -> None:
    norms = norms[:25]
    options = {"interval": interval, "threshold": threshold, "lr_drop": lr_drop, "window": steps}
    levels = of(drive(accordion(**options), norms, lrs, steps))
    assert levels == oracle(norms, lrs, interval, threshold, lr_drop)


@settings(max_examples=100, deadline=None)
@given(norms=norm_lists, power=st.integers(-20, 20), interval=st.integers(1, 3))
def test_scale_does_not_matter(norms: list[float], power: int, interval: int) -> None:
    scaled = [norm * 2.0**power for norm in norms]  # exact in floating point
    levels = drive(accordion(interval=interval), norms)
    assert drive(accordion(interval=interval), scaled) == levels


@settings(max_examples=100, deadline=None)
@given(norms=random_norms, thresholds=st.tuples(st.floats(0, 3), st.floats(0, 3)))
def test_a_higher_threshold_compresses_more(
    norms: list[float], thresholds: tuple[float, float]
) -> None:
    lower, higher = sorted(thresholds)
    mild, strong = (of(drive(accordion(threshold=t), norms)) for t in (lower, higher))
    assert all(a <= b for a, b in zip(mild, strong, strict=True))


# ----------------------------------------------------------------------------------------- history
ROW = {"step", "window", "name", "level", "compressor", "norm", "previous", "change", "lr"}
ROW |= {"previous_lr", "reason", "ratio", "efficiency", "weight"}


def test_history_is_complete_and_plain() -> None:
    policy = accordion(interval=2, window=3)
    norms = [{"w": float(n), "v": float(n * n)} for n in (1, 1, 2, 2, 3, 3, 3)]
    drive(policy, norms, [0.1] * 4 + [0.01] * 3, steps=3)
    assert json.loads(json.dumps(rows_of(policy))) is not None
    for row in policy.history:
        assert set(row.keys()) == ROW
        assert row["compressor"] == repr((MILD, STRONG)[row["level"]])
        assert row["step"] == 3 * (row["window"] + 1)
        assert row["reason"]
    checks = [row for row in policy.history if row["reason"] != "learning rate fell"]
    assert [(r["window"], r["name"]) for r in checks] == [
        (w, n) for w in (0, 2, 4, 6) for n in "wv"
    ]
    falls = [row for row in policy.history if row["reason"] == "learning rate fell"]
    assert [(row["window"], row["lr"], row["previous_lr"]) for row in falls] == [(3, 0.01, 0.1)] * 2


def test_state_dict_resumes_in_the_middle() -> None:
    """A policy that is resumed through JSON, at any step, continues as if it had not stopped."""
    norms = [1.0, 1.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0]
    lrs = [0.1] * 6 + [0.01] * 2

    def steps(policy: Accordion, first: int, last: int) -> None:
        for number in range(first, last):
            rates = {"w": lrs[number // 3]}
            if policy.due(rates):
                decide(policy, {"w": norms[number // 3 - 1]}, rates)
            policy.tick(rates)

    whole = accordion(window=3, interval=2)
    whole.bind(OWNER, ["w"])
    steps(whole, 0, 24)
    for cut in range(24):
        first, second = accordion(window=3, interval=2), accordion(window=3, interval=2)
        first.bind(OWNER, ["w"])
        second.bind(OWNER, ["w"])
        steps(first, 0, cut)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        steps(second, cut, 24)
        assert json.dumps(rows_of(second)) == json.dumps(rows_of(whole))
        assert second.current == whole.current
        assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


def test_a_state_dict_is_a_snapshot() -> None:
    policy = accordion()
    drive(policy, [1.0, 1.0])
    saved = policy.state_dict()
    text = json.dumps(saved)
    drive(policy, [5.0, 3.0])
    assert json.dumps(saved) == text


def test_a_copy_serves_anew_and_shares_nothing() -> None:
    policy = accordion()
    drive(policy, [1.0, 1.0])
    twin = copy.deepcopy(policy)
    before = json.dumps(policy.state_dict())
    drive(twin, [7.0, 1.0, 30.0])
    assert json.dumps(policy.state_dict()) == before
    twin.bind(OTHER, ["v"])


# ----------------------------------------------------------------------------------------- windows
def test_a_missing_window_gives_a_warning_after_a_while() -> None:
    policy = Accordion(low=MILD, high=STRONG)
    policy.bind(OWNER, ["w"])
    for _ in range(PATIENCE):
        assert not policy.due({"w": 0.1})
        policy.tick({"w": 0.1})
    with pytest.warns(
        RuntimeWarning, match=r"window=<batches per epoch>.*end_window\(\).*Callback"
    ):
        policy.tick({"w": 0.1})
    policy.tick({"w": 0.1})  # without another one, which would be an error here


@pytest.mark.parametrize("passes", [1, 4])
def test_windows_count_backward_passes(passes: int) -> None:
    """`window=len(loader)` is an epoch, however many passes an exchange averages."""
    policy = Accordion(low=MILD, high=STRONG, window=8)
    policy.bind(OWNER, ["w"])
    policy.passes = passes
    for _ in range(8 // passes):
        assert not policy.over
        policy.tick({"w": 0.1})
    assert policy.over


def test_windows_ended_by_hand() -> None:
    world = simulate(Accordion(low=MILD, high=STRONG, interval=1), 2)
    gradients = several(2, 12)
    for number, now in enumerate(gradients):
        step(world, NUMPY, now)
        if number in (3, 7, 8):  # windows of four, four and one step
            world.end_window()
            world.end_window()  # a second call changes nothing
    history = world.exchanges[0].policy.history
    assert [(r["window"], r["step"]) for r in history if r["name"] == "w"] == [
        (0, 4),
        (1, 8),
        (2, 9),
    ]
    norms = [row["norm"] for row in history if row["name"] == "w"]
    sums = [sum(now[0]["w"] for now in gradients[a:b]) for a, b in ((0, 4), (4, 8), (8, 9))]
    np.testing.assert_allclose(norms, [np.linalg.norm(x) for x in sums], rtol=1e-5)


def test_by_hand_once_before_the_first_step_is_patient() -> None:
    policy = Accordion(low=MILD, high=STRONG)
    policy.bind(OWNER, ["w"])
    policy.end_window()
    for _ in range(PATIENCE + 5):
        assert not policy.due({"w": 0.1})
        policy.tick({"w": 0.1})


WRONG = [
    ({"threshold": -1}, "threshold"),
    ({"threshold": math.nan}, "threshold"),
    ({"threshold": "a"}, "threshold"),
    ({"threshold": True}, "threshold"),
    ({"window": 0}, "window"),
    ({"window": 1.5}, "window"),
    ({"interval": 0}, "interval"),
    ({"interval": None}, "interval"),
    ({"signal": "both"}, "signal"),
    ({"lr_drop": 0}, "lr_drop"),
    ({"lr_drop": 1.5}, "lr_drop"),
    ({"lr_drop": True}, "lr_drop"),
]


@pytest.mark.parametrize(("options", "name"), WRONG, ids=str)
def test_wrong_arguments(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"Accordion: {name} is .* must be"):
        accordion(**options)


def test_wrong_levels() -> None:
    class Flat(Dense):
        scope = "flat"

    with pytest.raises(ValueError, match="high is missing"):
        Accordion(low=MILD)
    with pytest.raises(ValueError, match="low is missing"):
        Accordion(high=MILD)
    with pytest.raises(TypeError, match="must be a Compressor"):
        Accordion(low=4, high=MILD)
    with pytest.raises(ValueError, match="agree in scope"):
        Accordion(low=Flat(), high=MILD)
    with pytest.raises(ValueError, match="agree in scope"):
        Fixed(TopK(), overrides={"w": Flat()})
    assert Accordion(low=Dense(), high=Flat()).scope == "flat"  # Dense takes any vector
    assert Accordion(low=Dense, high=TopK).high == TopK()  # a class stands for its default


def test_one_policy_for_two_exchanges_is_refused() -> None:
    policy = accordion()
    communicator = SimulatedCommunicator(Hub(1), 0, NUMPY.xp)
    tensors = [TensorInfo("w", SHAPE, "float32")]
    first = Exchange(communicator, policy, tensors)
    with pytest.raises(ValueError, match="another optimizer"):
        Exchange(communicator, policy, tensors)
    assert first.levels() == {"w": repr(MILD)}


# ------------------------------------------------------------------------------ in a world of ranks
def scaled(
    scales: Sequence[Sequence[float]], window: int, seed: int = 0
) -> list[list[dict[str, np.ndarray]]]:
    """Return steps of gradients with a fixed direction for each rank, scaled in each window."""
    rng = np.random.default_rng(seed)
    direction = [rng.standard_normal(SHAPE).astype(np.float32) for _ in scales[0]]
    return [
        [{"w": (d * s).astype(np.float32)} for d, s in zip(direction, now, strict=True)]
        for now in scales
        for _ in range(window)
    ]


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_0_decides_for_all(framework: Framework, ranks: int) -> None:
    """All ranks follow rank 0, although their own norms would lead to other decisions."""
    for mine, wanted in [([1, 1, 1, 1], [LOW, HIGH, HIGH]), ([1, 3, 9, 9], [LOW, LOW, LOW])]:
        others = [1, 3, 9, 9] if mine[1] == 1 else [1, 1, 1, 1]
        scales = [[m, *[o] * (ranks - 1)] for m, o in zip(mine, others, strict=True)]
        world = simulate(accordion(window=2, interval=1), ranks)
        for gradients in scaled(scales, window=2):
            means = step(world, framework, gradients)
            levels = [exchange.levels() for exchange in world.exchanges]
            assert all(level == levels[0] for level in levels)
            assert all(same_bits(mean["w"], means[0]["w"]) for mean in means)
        for exchange in world.exchanges:
            assert [row["level"] for row in exchange.policy.history] == wanted
            summed = [entry.evidence for entry in exchange.bucket_states if entry.evidence]
            assert not summed or exchange.communicator.rank == 0  # only rank 0 pays for a copy


@pytest.mark.parametrize("signal", ["local", "reduced"])
@pytest.mark.parametrize("framework", parameters())
def test_frameworks_decide_alike(framework: Framework, signal: str) -> None:
    """All frameworks take NumPy's decisions on the same gradients, for the same reasons."""
    scales = [[s, s] for s in (1, 1, 2.5, 2.5, 2.5, 2.6, 0.4, 0.4, 0.4, 0.4)]
    options: dict[str, Any] = {"low": Dense(), "high": TopK(0.1), "signal": signal}
    worlds = [simulate(accordion(**options, window=4, interval=1), 2) for _ in range(2)]
    for number, gradients in enumerate(scaled(scales, window=4)):
        for world, which in zip(worlds, (framework, NUMPY), strict=True):
            step(world, which, gradients, lr=0.1 if number < 30 else 0.01)
    ours, oracles = (world.exchanges[1].policy.history for world in worlds)
    assert {row["level"] for row in ours} == {LOW, HIGH}
    assert len(ours) == len(oracles) == 9
    for row, wanted in zip(ours, oracles, strict=True):
        for key in ROW - {"norm", "previous", "change", "ratio", "efficiency", "weight"}:
            assert row[key] == wanted[key]
        for key in ("norm", "previous", "change"):
            np.testing.assert_allclose(row[key], wanted[key], rtol=1e-5, atol=1e-6)


STEADY = [
    case
    for case in SOCIABLE
    if case.compressor.period == 1 and "server" not in case.compressor.per_rank_state
]
"""Phases count the steps that a level has served, so that levels with phases are not equal.

At a switch, what the owner of a part owes joins the next gradient, and is compressed with it.
"""


@pytest.mark.seldom(where=lambda case: case not in FIRST)
@pytest.mark.parametrize(
    ("case", "framework", "signal"),
    [
        pytest.param(case, *where.values, id=f"{where.id}-{case.name}", marks=where.marks)
        for where in combined(
            {POISONED: ["local", "reduced"], TORCH: ["local"], TENSORFLOW: ["reduced"]}
        )
        for case in STEADY
        if where.values[0] is POISONED or not case.bitwise  # `laws.worlds_agree` shows the others
    ],
)
def test_equal_levels_are_the_static_compressor(
    case: Case, framework: Framework, signal: str
) -> None:
    """Averages equal those of the static compressor bit for bit, although levels change."""
    both = accordion(low=case.compressor, high=case.compressor, window=2, signal=signal)
    world, twin = simulate(both, 2), simulate(case.compressor, 2)
    for number, gradients in enumerate(several(2, 14)):
        scale = (1.0, 1.0, 4.0)[number // 2 % 3]
        gradients = [{k: g * np.float32(scale) for k, g in mine.items()} for mine in gradients]
        ours, theirs = (step(w, framework, gradients) for w in (world, twin))
        for mine, wanted in zip(ours, theirs, strict=True):
            assert all(same_bits(mine[name], wanted[name]) for name in wanted)
    if signal == "local":
        assert {row["level"] for row in world.exchanges[0].policy.history} == {LOW, HIGH}


def test_equal_levels_with_phases_are_the_static_compressor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an exact codec, both send the leader's elements, although the levels' phases differ."""
    monkeypatch.setattr(Autoencoder, "encode", lambda self, weights, x: x)
    monkeypatch.setattr(Autoencoder, "decode", lambda self, weights, codes, innovations: codes)
    lgc = LGC(0.05, dense=0, training=2)
    world = simulate(accordion(low=lgc, high=lgc, window=2), 2)
    twin, phases = simulate(lgc, 2), set()
    for number, gradients in enumerate(several(2, 14)):
        scale = (1.0, 1.0, 4.0)[number // 2 % 3]
        gradients = [{k: g * np.float32(scale) for k, g in mine.items()} for mine in gradients]
        ours, theirs = (step(w, NUMPY, gradients) for w in (world, twin))
        phases.add((*world.exchanges[0].layout.phases, lgc.variant(number)))
        for mine, wanted in zip(ours, theirs, strict=True):
            for name in wanted:
                np.testing.assert_allclose(mine[name], wanted[name], atol=1e-4)
    assert {row["level"] for row in world.exchanges[0].policy.history} == {LOW, HIGH}
    assert any(own != other for own, other in phases)


def carried(world: World, framework: Framework, name: str) -> np.ndarray:
    """Return the mean over ranks of all residuals of bucket `name`."""
    parts = []
    for exchange in world.exchanges:
        (entry,) = [entry for entry in exchange.bucket_states if entry.bucket.name == name]
        debts = [entry.residual(exchange.info(entry))]
        debts += [state.get("error") for state in entry.inactive.values()]
        parts.append(
            sum(framework.array(x).astype(float).reshape(-1) for x in debts if x is not None)
            + np.zeros(entry.bucket.size)
        )
    return np.mean(parts, 0)


LEVELS = [Dense(), FP16(), TopK(0.1), RandomK(0.1), PowerSGD(1), PowerSGD(4)]
ROUND = list(zip(LEVELS, [*LEVELS[1:], LEVELS[0]], strict=True))


# In TensorFlow, each level is the low and the high one in `make test`.
@pytest.mark.seldom(tensorflow=lambda low, high: (low, high) not in ROUND)
@pytest.mark.parametrize(
    ("low", "high", "framework"),
    [
        pytest.param(
            *pair, *where.values, id=f"{pair[0]!r}-{pair[1]!r}-{where.id}", marks=where.marks
        )
        for where in parameters()
        for pair in itertools.product(LEVELS, LEVELS)
    ],
)
def test_nothing_is_lost_at_a_switch(
    low: Compressor, high: Compressor, framework: Framework
) -> None:
    """The sum of averages plus the mean residual is the sum of mean gradients, at any switch.

    This also holds if the step after a switch is taken back.
    """
    world = simulate(Alternating(low, high, [2, 4, 5, 6, 9]), 2)
    loss = 2 * 2**-11 * 30 if FP16() in (low, high) else 3e-6
    stateless = {low, high} <= {Dense(), FP16()}
    total = {"w": 0.0, "v": 0.0}
    for number, gradients in enumerate(several(2, 12)):
        bad = number == 4  # right after a switch
        if bad:
            gradients[1]["v"][3, 3] = np.nan
        means = step(world, framework, gradients)
        for name in total:
            if means[0] is not None:
                mean = np.mean([g[name] for g in gradients], 0) - means[0][name]
                total[name] = total[name] + mean.reshape(-1)
            difference = np.abs(total[name] - carried(world, framework, name)).max()
            if not (bad and stateless):
                assert difference <= loss * 20, f"{name} at step {number}"
        if bad and stateless:
            return  # without state, a bad step is not taken back


KEEPERS = list(
    {
        type(level): level
        for level in (c.compressor for c in reversed(CASES) if c.feedback and not c.loss)
        if level.output == "gradient" and level.scope == "tensor"
    }.values()
)
"""What keeps an error and may stand beside gradients: a row of each class."""


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("other", KEEPERS, ids=repr)
def test_nothing_is_lost_between_any_two(other: Compressor, turned: bool) -> None:
    pair = (TopK(0.1), other)
    test_nothing_is_lost_at_a_switch(pair[turned], pair[1 - turned], POISONED)


def test_levels_are_all_compressors() -> None:
    """Every compressor that returns gradients may be a level beside Dense or FP16.

    A rule that returns updates cannot be combined with a compressor of gradients.
    """
    names = {type(level).__name__ for level in KEEPERS}
    assert names >= {"Threshold", "AdaComp", "ScaleCom", "Int8", "EFSignSGD", "OneBit", "TwoLevel"}
    for case in SOCIABLE:
        level = case.compressor
        Accordion(low=level, high=level)
        if level.output == "gradient":
            Accordion(low=Dense(), high=level)
            Accordion(low=level, high=FP16())
        else:
            with pytest.raises(ValueError, match="levels must agree in output"):
                Accordion(low=Dense(), high=level)


@pytest.mark.parametrize(
    ("framework", "dtype"), combined({TORCH: ["float16", "bfloat16"], TENSORFLOW: ["bfloat16"]})
)
def test_nothing_is_lost_of_halves(framework: Framework, dtype: str) -> None:
    """Residuals of 16-bit gradients are fp32, also at a switch; only the averages are rounded."""
    ulp = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for low, high in zip(KEEPERS, [*KEEPERS[1:], KEEPERS[0]], strict=True):
        world, total, lost = simulate(Alternating(low, high, [2, 4, 5]), 2), 0.0, 2e-5
        for gradients in several(2, 7):
            halves = [{k: framework.tensor(g, dtype) for k, g in m.items()} for m in gradients]
            exact = np.mean([framework.array(mine["w"]) for mine in halves], 0, np.float64)
            (mean, *_) = world.step(halves)
            assert mean is not None
            total = total + (exact - framework.array(mean["w"])).reshape(-1)
            lost += ulp * np.abs(framework.array(mean["w"])).max()
        gap = np.abs(total - carried(world, framework, "w")).max()
        assert gap <= lost < 0.3, (low, high, gap, lost)


def test_a_switch_that_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of conservation fails if a compressor drops the residual (negative control)."""
    monkeypatch.setattr(TopK, "with_residual", lambda self, state, residual: state)
    with pytest.raises(AssertionError):
        test_nothing_is_lost_at_a_switch(PowerSGD(1), TopK(0.1), NUMPY)


@pytest.mark.parametrize("framework", parameters())
def test_powersgd_hands_over_its_factor(framework: Framework) -> None:
    world = simulate(Alternating(PowerSGD(4), PowerSGD(1), [3, 6]), 2)
    factors = []
    for gradients in several(2, 7):
        step(world, framework, gradients)
        factors.append([framework.array(e.bucket_states[0].state["q"]) for e in world.exchanges])
        assert same_bits(factors[-1][0], factors[-1][1])
    assert [q[0].shape[0] for q in factors] == [4, 4, 4, 1, 1, 1, 4]
    world = simulate(Alternating(PowerSGD(4), PowerSGD(1), [3, 6]), 2)
    ranks = []
    for number, gradients in enumerate(several(2, 6)):
        step(world, framework, gradients)
        exchange = world.exchanges[0]
        entry = exchange.bucket_states[0]
        if number in (2, 5):  # the policy would switch at the beginning of the next step
            kept = framework.array(entry.state["q"])
            with framework.running():
                exchange.switch(entry, 1 - entry.level)
            switched = framework.array(entry.state["q"])
            rows = min(len(kept), len(switched))
            assert same_bits(switched[:rows], kept[:rows])
            assert np.isfinite(switched).all() and np.abs(switched).max(1).min() > 0
            ranks.append((len(kept), len(switched)))
    assert ranks == [(4, 1), (1, 4)]


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("signal", ["local", "reduced"])
def test_a_step_taken_back_is_no_evidence(framework: Framework, signal: str) -> None:
    """The sum over a window holds the gradients of the steps that counted, and no others."""
    world = simulate(accordion(low=Dense(), high=TopK(0.1), window=4, signal=signal), 2)
    gradients = several(2, 5)
    gradients[1][1]["w"][0, 0] = np.inf  # on rank 1: rank 0's gradient is fine
    gradients[2][0]["w"][0, 0] = np.nan
    for now in gradients:
        step(world, framework, now)
    counted = [gradients[0], gradients[3]]
    ranks = [0] if signal == "local" else [0, 1]
    for row in world.exchanges[0].policy.history:
        wanted = sum(np.mean([now[r][row["name"]] for r in ranks], 0) for now in counted)
        np.testing.assert_allclose(row["norm"], np.linalg.norm(wanted), rtol=1e-5)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    ("low", "high"), [(PowerSGD(4), PowerSGD(1)), (Dense(), TopK(0.1)), (Dense(), PowerSGD(1))]
)
def test_a_change_of_level_does_not_set_it_off(
    low: Compressor, high: Compressor, interval: int
) -> None:
    """With signal="reduced" and a stationary stream of gradients, the first change is the last."""
    policy = accordion(low=low, high=high, window=20, interval=interval, signal="reduced")
    world, rng = simulate(policy, 2), np.random.default_rng(0)
    steady = rng.standard_normal(SHAPE)
    for _ in range(20 * 10 * interval):
        noise = rng.standard_normal((2, *SHAPE))
        gradients = [{"w": (steady + x).astype(np.float32)} for x in noise]
        step(world, NUMPY, gradients)
    history = world.exchanges[1].policy.history
    levels = [row["level"] for row in history]
    assert levels == [LOW, *[HIGH] * (len(levels) - 1)]
    if interval == 1:
        assert [row["reason"] for row in history].count(CHANGED) == 1


def test_learning_rates_belong_to_layers() -> None:
    world, gradients = simulate(accordion(window=2), 2), several(2, 8)
    for number, now in enumerate(gradients):
        tensors = [{k: g.copy() for k, g in gradients[number % 2][r].items()} for r in range(2)]
        rates = {entry: 0.1 for entry in ("w", "v", "b+1")}
        rates["v"] = 0.1 if number < 6 else 0.01
        assert len(now) == 2
        world.step(tensors, lr=rates)
    last = {row["name"]: row for row in world.exchanges[0].policy.history}
    assert last["w"]["level"] == HIGH and last["w"]["reason"] == "norm steady"
    assert last["v"]["level"] == LOW and last["v"]["reason"] == "learning rate fell"


def test_overrides_are_exempt() -> None:
    policy = accordion(window=1, overrides={"v*": Dense()})
    world = simulate(policy, 2)
    for gradients in several(2, 4):
        step(world, NUMPY, gradients)
    assert world.exchanges[0].levels()["v"] == "Dense()"
    history = world.exchanges[0].policy.history
    assert [row["reason"] for row in history if row["name"] == "v"] == ["override"]
    assert [row["level"] for row in history if row["name"] == "w"] == [LOW, HIGH, HIGH]


# -------------------------------------------------------------------------------------- repetition
@pytest.mark.parametrize("framework", parameters((NUMPY, POISONED)))
def test_replay_repeats(framework: Framework) -> None:
    """A replay of a history has the same levels at the same steps, and the same averages.

    The history is read from JSON, and averages are equal bit for bit.
    """
    policy = accordion(window=2, interval=2, overrides={"u*": TopK(0.1)})
    recorded, stream = simulate(policy, 2), several(2, 16)
    for number, gradients in enumerate(stream):
        for mine in gradients:
            mine["u"] = mine["v"][::-1].copy()
            mine["v"] *= 1 if number < 8 else 5
    lrs = [0.1 if number < 11 else 0.01 for number in range(16)]
    means, levels = [], []
    for gradients, lr in zip(stream, lrs, strict=True):
        means.append(step(recorded, framework, gradients, lr))
        levels.append(recorded.exchanges[1].levels())
    history = json.loads(json.dumps(rows_of(recorded.exchanges[0].policy)))
    assert len({json.dumps(now) for now in levels}) >= 3
    again = simulate(Replay(history), 2)
    for gradients, mean, level in zip(stream, means, levels, strict=True):
        replayed = step(again, framework, gradients, lr=0.0)
        assert again.exchanges[1].levels() == level
        for mine, wanted in zip(replayed, mean, strict=True):
            assert all(same_bits(mine[name], wanted[name]) for name in wanted)


def test_replay_counts_backward_passes_as_the_run_did() -> None:
    def run(policy: Policy) -> tuple[list[str], Any]:
        world, served = simulate(policy, 2), []
        for each in world._policies:
            each.passes = 2
        for number in range(10):
            rng = np.random.default_rng(number)
            made = [{"v": rng.standard_normal((40, 40)).astype("f4")} for _ in range(2)]
            step(world, NUMPY, made)
            served.append(world.exchanges[0].levels()["v"])
        return served, rows_of(world.exchanges[0].policy)

    schedule = StepSchedule({0: PowerSGD(2), 1: TopK(0.1), 2: PowerSGD(1)}, window=6)
    served, history = run(schedule)
    assert len(set(served)) == 3 and served[2] != served[3]
    assert run(Replay(history))[0][3:] == served[3:]  # its rows begin with the first change


def test_replay_refuses() -> None:
    with pytest.raises(ValueError, match="history is empty"):
        Replay([])
    with pytest.raises(ValueError, match="has no 'compressor'"):
        Replay([{"step": 1, "name": "w"}])
    replay = Replay([{"step": 1, "name": "w", "compressor": "TopK(0.1)"}])
    with pytest.raises(ValueError, match="no layer 'v'"):
        replay.levels("v")


def resnet18(classes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of the paper's ResNet-18 for small images."""
    shapes: dict[str, tuple[int, ...]] = {"stem": (64, 3, 3, 3), "stem.bn": (128,)}
    before = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"{stage}.{block}"
            shapes |= {f"{name}.1": (width, before, 3, 3), f"{name}.2": (width, width, 3, 3)}
            shapes |= {f"{name}.bn1": (2 * width,), f"{name}.bn2": (2 * width,)}
            if before != width:
                shapes |= {f"{name}.short": (width, before, 1, 1), f"{name}.bn3": (2 * width,)}
            before = width
    return shapes | {"head": (classes, 512), "head.bias": (classes,)}


@pytest.mark.parametrize(
    ("classes", "rank", "floats"),
    [(10, 1, 45_935), (10, 2, 82_260), (100, 1, 46_115), (100, 2, 82_530)],
)
def test_the_papers_network_sends_the_papers_floats(classes: int, rank: int, floats: int) -> None:
    """A step sends the number of floats from which the volumes of the paper's tables follow."""
    tensors = [TensorInfo(k, shape, "float32") for k, shape in resnet18(classes).items()]
    hub, policy = Hub(1), Fixed(PowerSGD(rank))
    exchange = Exchange(SimulatedCommunicator(hub, 0, NUMPY.xp), policy, tensors)
    exchange.begin(0.1)
    exchange.give([np.ones(tensor.shape, np.float32) for tensor in tensors])
    flags = 2 * len(exchange.layout.groups)
    exchange.finish()
    assert exchange.stats()["payload"] == 4 * (floats + flags)
