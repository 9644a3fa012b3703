"""Tests of Accordion's other levers: growing batches, byte budgets and averages of models."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from decisions import decide
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import SHAPE, several, step

from accordion_hvd import (
    COLD,
    DPSGD,
    FP16,
    QSGD,
    WAGMA,
    Accordion,
    Dense,
    Fixed,
    LocalSGD,
    PowerSGD,
    RandomK,
    Replay,
    SignSGD,
    TopK,
    parse,
    simulate,
)
from accordion_hvd.core.base import Info
from accordion_hvd.optimizers import OnebitAdam
from accordion_hvd.policies.accordion import BATCH, HIGH, LOW, MODEL, OVER, affordable
from accordion_hvd.policies.cost_model import averaging_share, bytes_sent
from accordion_hvd.resolve import staged
from accordion_hvd.simulation.one_process import World


class Owner:
    """Stands for an exchange."""


OWNER = Owner()


def growing(**options: Any) -> Accordion:
    policy = Accordion(**{"batch_size": (8, 32), "window": 4, "interval": 1, **options})
    policy.complete()
    return policy


def drive(
    policy: Accordion, norms: Sequence[Mapping[str, float]], lrs: Sequence[float]
) -> list[int]:
    """Return the micro-batches of each exchange, for a policy with these norms and learning rates.

    There is one window more than `norms`; the policy decides nothing after it.
    """
    policy.bind(OWNER, ["w"])
    told, exchanges = iter(norms), []
    while True:
        rates = {"w": lrs[min(policy._epoch + policy.due({}), len(lrs) - 1)]}
        if policy.due(rates):
            now = next(told, None)
            if now is None:
                return exchanges
            decide(policy, now, rates)
        policy.tick(rates)
        exchanges.append(policy.observers.weight)


# --------------------------------------------------------------------------------------- the rule
def oracle(
    norms: Sequence[float], lrs: Sequence[float], interval: int, threshold: float
) -> int | None:
    """Return the window after which batches are large, or None if they stay small."""
    known: dict[int, float] = {}
    for window, norm in enumerate(norms):
        known[window] = norm
        if window % interval or window == 0:
            continue
        before = known[window - interval]
        steady = before > 0 and abs(before - norm) / before < threshold
        fell = lrs[window + 1] <= 0.5 * lrs[window]
        if steady and not fell:
            return window
    return None


@settings(max_examples=200, deadline=None)
@given(
    norms=st.lists(st.sampled_from([0.0, 1.0, 1.3, 2.0, 3.5]), min_size=1, max_size=12),
    drops=st.sets(st.integers(1, 12)),
    interval=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.3, 0.5, 2.0]),
    window=st.integers(4, 11),
)
def test_batches_grow_as_the_oracle_says(
    norms: list[float], drops: set[int], interval: int, threshold: float, window: int
) -> None:
    lrs = [0.1 * 0.5 ** sum(drop <= w for drop in drops) for w in range(14)]
    policy = growing(interval=interval, threshold=threshold, window=window)
    parts = [{"w": 0.6 * norm, "b": 0.8 * norm} for norm in norms]  # of one norm, norm
    exchanges = drive(policy, parts, lrs)
    grown = oracle(norms, lrs, interval, threshold)
    windows = len(norms) + 1
    small = window * (windows if grown is None else grown + 1)
    assert exchanges[:small] == [1] * small
    assert set(exchanges[small:]) <= {4}, "once large, never back"
    assert policy.large == (grown is not None)
    rows = [row for row in policy.history if row["name"] == BATCH]
    assert [row["level"] for row in rows if row["level"] == HIGH] == [HIGH] * policy.large
    assert sum(exchanges) in range(window * windows, window * windows + 4)


def test_the_papers_timeline() -> None:
    """With steady norms, batches are small in epochs 0 to 10 and large from then on.

    The falls of the learning rate come later, and do not make batches small again.
    """
    policy = Accordion(batch_size=(512, 4096), window=98)
    policy.complete()
    lrs = [0.4] * 152 + [0.04] * 100 + [0.004] * 50
    exchanges = drive(policy, [{"w": 1.0}] * 300, lrs)
    assert exchanges[: 11 * 98] == [1] * (11 * 98)
    assert set(exchanges[11 * 98 :]) == {8}
    assert abs(sum(exchanges) - 301 * 98) < 8
    assert [row["level"] for row in policy.history] == [LOW, HIGH]


def test_windows_keep_their_pace() -> None:
    """If a window ends within a large batch, the rest of the batch counts for the next window."""
    policy = growing(window=10, interval=1, low=TopK(0.1), high=TopK(0.01))
    exchanges = drive(policy, [{"w": 1.0}] * 12, [0.1])
    assert exchanges == [1] * 20 + [4] * 28
    ends = [row["step"] for row in policy.history if row["name"] == "w"]
    assert ends == [10, 20, 32, 40, 52, 60, 72, 80, 92, 100, 112, 120]


def test_levels_are_as_without_batches() -> None:
    norms = [{"w": n} for n in (1.0, 1.2, 3.0, 3.0, 0.5, 0.5)]
    one = growing(low=PowerSGD(4), high=PowerSGD(1), window=4)
    two = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=4, interval=1)
    for policy in (one, two):
        drive(policy, norms, [0.1])
    keys = ("step", "window", "name", "level", "compressor", "norm", "change", "reason")
    rows = [[{k: r[k] for k in keys} for r in p.history if r["name"] == "w"] for p in (one, two)]
    assert repr(rows[0]) == repr(rows[1])


def test_the_state_is_kept() -> None:
    policy, twin = growing(), growing()
    drive(policy, [{"w": 1.0}] * 3, [0.1])
    assert policy.large
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert (twin.large, twin.observers.weight, twin.observers.accumulated) == (True, 4, 4)
    assert json.dumps(twin.state_dict()) == json.dumps(policy.state_dict())
    twin.growth.loader = True
    assert (twin.observers.weight, twin.observers.accumulated) == (4, 1)


def test_loaders_follow_when_they_can() -> None:
    policy = growing()
    policy.growth.loader = True
    drive(policy, [{"w": 1.0}] * 3, [0.1])
    assert policy.large and policy.observers.weight == 1
    policy.growth.resize()
    assert policy.observers.weight == 4


# ------------------------------------------------------------------------- in a world of ranks
def small_batches(ranks: int, count: int) -> list[list[dict[str, np.ndarray]]]:
    return several(ranks, count)


def accumulate(world: World, framework: Framework, stream: Any, lr: float = 0.1) -> Any:
    """Take a step with the mean of as many small batches of `stream` as the world asks for.

    Return these small batches, and the averages of all ranks.
    """
    used = [next(stream)]
    if not world.exchanges:
        world._build({k: framework.tensor(x) for k, x in used[0][0].items()})
    used += [next(stream) for _ in range(world.micro_batches(lr) - 1)]
    ranks = range(len(used[0]))
    mean = [{k: np.mean([now[r][k] for now in used], 0) for k in used[0][r]} for r in ranks]
    return used, step(world, framework, mean, lr)


@pytest.mark.parametrize("signal", ["local", "reduced"])
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_one_norm_for_all_small_batches(framework: Framework, signal: str) -> None:
    """A norm is that of the sum of a window's gradients, whatever the size of batches.

    A large batch counts as its small batches do, for local gradients and for averages. The norm
    that decides about batches includes small tensors.
    """
    policy = Accordion(
        TopK(0.1), TopK(0.1), batch_size=(8, 32), window=8, interval=1, threshold=99, signal=signal
    )
    world, stream = simulate(policy, 2), iter(small_batches(2, 40))
    windows: list[dict[str, Any]] = []
    count = 0
    while count < 33:
        used, means = accumulate(world, framework, stream)
        if count % 8 == 0:
            windows.append(dict.fromkeys(used[0][0], 0.0))
        count += len(used)
        for name, total in windows[-1].items():
            local = sum(now[0][name].astype(float) for now in used)
            averages = len(used) * means[0][name].astype(float)
            windows[-1][name] = total + (local if signal == "local" else averages)
    norms = [{k: np.linalg.norm(x) for k, x in sums.items()} for sums in windows]
    history = world.exchanges[0].policy.history
    assert world.exchanges[0].policy.large and world.exchanges[1].policy.large
    batch = [row for row in history if row["name"] == BATCH]
    assert [row["window"] for row in batch] == [0, 1]
    for row in batch:
        wanted = math.hypot(*norms[row["window"]].values())
        np.testing.assert_allclose(row["norm"], wanted, rtol=1e-5)
    rows = [row for row in history if row["name"] == "w"]
    assert {row["window"] for row in rows} >= {0, 1, 2}
    for row in rows:
        np.testing.assert_allclose(row["norm"], norms[row["window"]]["w"], rtol=1e-5)


@dataclass(frozen=True)
class Rated(Dense):
    """Compressor that returns averages multiplied by the learning rate that it sees."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        mean, state = yield from super().exchange(grad, state, info)
        return mean * info.lr, state


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_large_batches_have_the_rate_of_their_small_ones(framework: Framework) -> None:
    """Compressors see the learning rate with which the optimizer steps.

    For a large batch, it is the rate of a small batch times the number of small batches.
    """
    policy = Accordion(Rated(), Rated(), batch_size=(8, 32), window=4, interval=1, threshold=99)
    world, stream, counts = simulate(policy, 2), iter(small_batches(2, 40)), []
    for lr in [0.1] * 9 + [0.06] * 2:
        used, means = accumulate(world, framework, stream, lr)
        counts.append(len(used))
        average = np.mean([now[rank]["w"] for now in used for rank in (0, 1)], 0, dtype=float)
        np.testing.assert_allclose(means[0]["w"], lr * len(used) * average, rtol=1e-4, atol=1e-6)
    assert set(counts) == {1, 4}


def test_stats_say_how_large_batches_are() -> None:
    world, stream = simulate(growing(threshold=99), 2), iter(small_batches(2, 24))
    sizes = []
    for _ in range(10):
        accumulate(world, NUMPY, stream)
        sizes.append(world.exchanges[1].stats()["batch_size"])
    assert sizes == [8] * 8 + [32] * 2
    assert "batch_size" not in simulate_once(Dense()).exchanges[0].stats()
    assert world.exchanges[0].levels()["w"] == "Dense()"


def simulate_once(compression: Any, ranks: int = 2) -> World:
    world = simulate(compression, ranks)
    step(world, NUMPY, several(ranks, 1)[0])
    return world


# ---------------------------------------------------------------------------------------- budgets
PRICED = [
    Dense(),
    FP16(),
    TopK(0.05),
    RandomK(0.05),
    PowerSGD(2),
    QSGD(4),
    SignSGD(),
    parse("twolevel:topk:0.05"),
]


@pytest.mark.parametrize("compressor", PRICED, ids=repr)
@pytest.mark.parametrize("ranks", [2, 4])
def test_prices_are_what_is_counted(compressor: Any, ranks: int) -> None:
    """Predicted bytes equal the counted bytes, except for flags and padding.

    Flags are 8 bytes a message, before the collective. Packed bits have padding.
    """
    world = simulate_once(compressor, ranks)
    exchange = world.exchanges[0]
    buckets = [entry.bucket for entry in exchange.bucket_states]
    levels = [entry.levels[entry.level] for entry in exchange.bucket_states]
    priced = sum(
        bytes_sent(level, b.shape, b.dtype, ranks) for level, b in zip(levels, buckets, strict=True)
    )
    flags = 8 * (ranks - 1) * len(exchange.layout.groups)
    padding = 4 * (ranks - 1) * len(buckets) if isinstance(compressor, QSGD) else 0
    assert priced - padding <= exchange.stats()["sent"] <= priced + flags
    assert bytes_sent(compressor, SHAPE, "float32", 1) == 0


@settings(max_examples=200, deadline=None)
@given(
    prices=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    wants=st.lists(st.integers(0, 1), min_size=6, max_size=6),
    urgency=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    room=st.integers(0, 60),
)
def test_what_is_affordable(
    prices: list[tuple[int, int]], wants: list[int], urgency: list[int], room: int
) -> None:
    names = [str(i) for i in range(len(prices))]
    told = dict(zip(names, prices, strict=True))
    wanted, urgent = (dict(zip(names, x, strict=False)) for x in (wants, urgency))
    chosen = affordable(wanted, told, urgent, room)
    spent = sum(told[name][level] for name, level in chosen.items())
    least = sum(map(min, prices))
    assert spent <= max(room, least)
    for name in names:  # a level that was wanted and not granted must not fit
        if chosen[name] != wanted[name]:
            assert told[name][chosen[name]] < told[name][wanted[name]]
            assert spent - told[name][chosen[name]] + told[name][wanted[name]] > room
    if room >= sum(told[name][level] for name, level in wanted.items()):
        assert chosen == wanted


def test_the_most_urgent_get_the_room() -> None:
    """The room for one bucket is the most urgent one's; one of unknown urgency comes first."""
    wanted, prices = dict.fromkeys("abc", 1), dict.fromkeys("abc", (1.0, 5.0))
    for urgency, first in (
        ({"a": 1.0, "b": 3.0, "c": 2.0}, "b"),
        ({"a": -1.0, "b": -3.0, "c": -2.0}, "a"),
        ({"a": 1.0, "b": 3.0}, "c"),
    ):
        chosen = affordable(wanted, prices, urgency, 7.0)
        assert chosen == {name: int(name == first) for name in "abc"}


def costs(level: Any, ranks: int = 2) -> float:
    """Return the MB that a step of the tests' gradients sends, without flags."""
    world = simulate_once(level, ranks)
    buckets = [(s.levels[0], s.bucket) for s in world.exchanges[0].bucket_states]
    return sum(bytes_sent(c, b.shape, b.dtype, ranks) for c, b in buckets) / 1e6


def test_a_budget_caps_levels() -> None:
    mild, strong = costs(PowerSGD(4)), costs(PowerSGD(1))
    for budget, allowed in ((mild, {LOW}), ((mild + strong) / 2, {LOW, HIGH}), (strong, {HIGH})):
        policy = Accordion(
            PowerSGD(4), PowerSGD(1), window=2, interval=1, threshold=0, budget=budget
        )
        world = simulate(policy, 2)
        for gradients in several(2, 7):
            before = world.exchanges[0].stats()["sent"] if world.exchanges else 0.0
            step(world, NUMPY, gradients)
            exchange = world.exchanges[0]
            flags = 8 * len(exchange.layout.groups)
            assert exchange.stats()["sent"] - before <= 1e6 * budget + flags
        levels = {exchange.policy.level(name) for name in ("w", "v")}
        assert levels == allowed
        reasons = [row["reason"] for row in exchange.policy.history]
        assert any(reason.endswith(OVER) for reason in reasons) == (allowed != {LOW})


def test_a_budget_makes_batches_large() -> None:
    dense = costs(Dense())
    world = simulate(growing(budget=0.3 * dense), 2)
    stream = iter(small_batches(2, 12))
    for _ in range(3):
        accumulate(world, NUMPY, stream)
    exchange = world.exchanges[0]
    assert exchange.policy.large and next(stream, None) is None
    assert exchange.stats()["sent"] / 12e6 <= 0.3 * dense + 1e-5
    rows = [row for row in exchange.policy.history if row["name"] == BATCH]
    assert [(row["level"], row["reason"]) for row in rows] == [(HIGH, OVER)]


def test_large_batches_make_room_in_the_window_that_decides_them() -> None:
    """The model's norm is steady, so that batches grow by 4; that of "w" is not.

    LOW of "w" costs 2 MB, the budget is 1 MB for each small batch.
    """
    policy = growing(low=TopK(0.5), high=TopK(0.1), budget=1.0)
    policy.byte_budget.price({"w": [2e6, 0.5e6], "v": [0.4e6, 0.1e6]}, 0.0)
    policy.bind(OWNER, ["w", "v"])
    rates = {"w": 0.1, "v": 0.1}
    for norms in ({"w": 1.0, "v": 10.0}, {"w": 3.0, "v": 10.0}):
        for _ in range(4):
            policy.tick(rates)
        assert policy.due(rates)
        decide(policy, norms, rates)
    assert policy.large and policy.level("w") == LOW
    rows = {row.name: row for row in policy.history if row.window == 1}
    assert rows[BATCH].level == HIGH and not rows["w"].reason.endswith(OVER)


def test_a_budget_that_nothing_fits_in() -> None:
    for policy in (growing(budget=0.001), Accordion(TopK(0.1), TopK(0.01), budget=1e-6)):
        with pytest.raises(ValueError, match="Accordion: budget is .* but must be at least"):
            simulate_once(policy)


def test_the_least_budget_is_enough() -> None:
    with pytest.raises(ValueError, match="at least") as error:
        simulate_once(growing(budget=1e-6))
    least = float(str(error.value).split("at least ")[1].split(",")[0])
    simulate_once(growing(budget=least))


# ---------------------------------------------------------------------------- averaging models
@settings(max_examples=100, deadline=None)
@given(
    norms=st.lists(st.sampled_from([0.0, 1.0, 1.3, 3.5]), min_size=1, max_size=10),
    window=st.integers(1, 9),
    period=st.integers(1, 12),
)
def test_decisions_wait_for_averages_of_all(norms: list[float], window: int, period: int) -> None:
    """Decisions are taken only after averages of all ranks.

    They follow the rule, for the whole model at once.
    """
    policy = Accordion(low=TopK(0.1), high=LocalSGD(period), window=window, interval=1)
    policy.bind(OWNER, ["w", "v"])
    assert policy.levels("w") == (TopK(0.1),)
    told, own, before, expected = iter(norms), 0, None, []
    for _ in range(200):
        rates = {"w": 0.1, "v": 0.1}
        if policy.due(rates):
            assert policy.alternation.equal
            now = next(told, None)
            if now is None:
                break
            was = policy.alternation.averaging_models
            decide(policy, {"w": 0.6 * now, "v": 0.8 * now}, rates)
            expected.append(bool(before) and abs(now - before) / before < 0.5)
            before, own = now, own if was else 0
        policy.tick(rates)
        models = policy.alternation
        own += models.averaging_models
        models.equal = not models.averaging_models or own % period == 0
    rows = [row for row in policy.history if row["name"] == MODEL]
    assert len(rows) == len(policy.history) == len(expected)
    assert [row["level"] for row in rows] == expected
    assert all(
        row["compressor"] == repr((TopK(0.1), LocalSGD(period))[row["level"]]) for row in rows
    )
    twin = Accordion(low=TopK(0.1), high=LocalSGD(period), window=window, interval=1)
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert twin.alternation.averaging_models == policy.alternation.averaging_models


@pytest.mark.parametrize("ranks", [4, 6])
def test_shares_of_averages(ranks: int) -> None:
    """The share of a model's bytes that a step sends is the one in the methods' docstrings."""
    ring = 2 * (ranks - 1) / ranks
    for method, share in (
        (LocalSGD(1), ring),
        (LocalSGD(8), ring / 8),
        (WAGMA(2, 10), (9 * 1 + ring) / 10),
        (DPSGD("ring"), 2.0),
    ):
        np.testing.assert_allclose(averaging_share(method, ranks), share, rtol=1e-2)
    assert averaging_share(LocalSGD(2), 1) == 0


@pytest.mark.parametrize(
    ("budget", "levels", "start"), [(2.0, [0, 1, 0], 0), (0.5, [1, 1, 1], 1), (9.0, [0, 1, 0], 0)]
)
def test_a_budget_caps_what_is_averaged(budget: float, levels: list[int], start: int) -> None:
    """A budget between the two costs permits only averages of models.

    Averages of gradients cost 1 MB, averages of models 0.25 MB.
    The norms ask for levels 0, 1, 0.
    """
    policy = Accordion(
        low=Dense(), high=LocalSGD(4), window=4, interval=1, threshold=0.5, budget=budget
    )
    policy.byte_budget.price({"w": [0.9e6]}, 0.1e6, 0.25e6)
    policy.bind(OWNER, ["w"])
    assert policy.alternation.averaging_models == bool(start)
    drive_models(policy, [1.0, 1.0, 3.0])
    rows = [row for row in policy.history if row["name"] == MODEL]
    assert [row["level"] for row in rows] == levels
    assert [row["reason"].endswith(OVER) for row in rows] == [budget < 1, False, budget < 1]
    with pytest.raises(ValueError, match="budget is 0.1, but must be at least 0.25"):
        poor = Accordion(low=Dense(), high=LocalSGD(4), budget=0.1)
        poor.byte_budget.price({"w": [1e6]}, 0.0, 0.25e6)


def drive_models(policy: Accordion, norms: Sequence[float]) -> None:
    for norm in norms:
        for _ in range(4):
            policy.tick({"w": 0.1})
        assert policy.due({"w": 0.1})
        decide(policy, {"w": norm}, {"w": 0.1})


def test_who_averages_no_models() -> None:
    policy = parse("Accordion(low=Dense(), high=WAGMA(4), batch_size=(8, 64))")
    assert (policy.alternation.method, policy.high) == (WAGMA(4), WAGMA(4))
    for options, name in (
        ({"gate": "auto"}, "gate"),
        ({"signal": "reduced"}, "signal"),
        ({"high": COLD("ring", 0.5, TopK(0.5))}, "high"),
    ):
        with pytest.raises(ValueError, match=f"Accordion: {name} is"):
            Accordion(**{"low": Dense(), "high": LocalSGD(4), **options})
    with pytest.raises(ValueError, match="simulate: compression is .* never averages models"):
        simulate(policy, 2)
    with pytest.raises(TypeError, match="must be a Compressor"):
        Accordion(low=3, high=LocalSGD(4))
    with pytest.raises(ValueError, match="output"):
        Accordion(low=LocalSGD(4), high=Dense())


# ------------------------------------------------------------------------------------------ words
WRONG = [
    ({"batch_size": 512}, "batch_size"),
    ({"batch_size": (512,)}, "batch_size"),
    ({"batch_size": (512, 1000)}, "batch_size is .* multiple"),
    ({"batch_size": (512, 256)}, "batch_size is .* multiple"),
    ({"batch_size": (0, 8)}, "batch_size"),
    ({"batch_size": (8.0, 16.0)}, "batch_size"),
    ({"batch_size": (True, 8)}, "batch_size"),
    ({"batch_size": (8, 64), "window": 4}, "window is 4, but must be at least 8"),
    ({"budget": 0}, "budget"),
    ({"budget": "much"}, "budget"),
    ({"budget": math.inf}, "budget"),
    ({"budget": 1, "gate": "auto"}, "gate"),
]


@pytest.mark.parametrize(("options", "match"), WRONG, ids=str)
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"Accordion: {match}"):
        Accordion(**{"low": Dense(), "high": TopK(0.1), **options})


def test_who_refuses() -> None:
    for policy, match in (
        (Accordion(batch_size=(8, 16)), "batch_size is .* None where it serves a compressed"),
        (Accordion(budget=1), "budget is .* None where it serves a compressed"),
    ):
        with pytest.raises(ValueError, match=match):
            staged(OnebitAdam(), policy)
    with pytest.raises(ValueError, match="low is missing"):
        Accordion(budget=1).complete()
    policy = growing(threshold=99)
    drive(policy, [{"w": 1.0}] * 3, [0.1])
    with pytest.raises(ValueError, match="batch sizes"):
        Replay(policy.history)


def test_words_say_all_of_it() -> None:
    policy = parse("Accordion(low=PowerSGD(4), high=PowerSGD(1), batch_size=(512, 4096), budget=2)")
    assert (policy.growth.sizes, policy.byte_budget.megabytes) == ((512, 4096), 2)
    assert repr(parse(repr(policy))) == repr(policy)
    assert "batch" not in repr(Accordion(Dense(), Dense()))
    assert not Fixed(Dense()).observers
