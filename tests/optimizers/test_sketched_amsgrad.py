"""Tests of SketchedAMSGrad: only the largest elements move, and the others are not lost."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import laws
import numpy as np
import pytest
import rules
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, Ranks, combined, parameters, same_bits

from accordion_hvd import StepSchedule, simulate
from accordion_hvd.core.base import Info
from accordion_hvd.ops import count_sketch, random
from accordion_hvd.optimizers import SketchedAMSGrad, sketched_amsgrad
from accordion_hvd.optimizers.sketched_amsgrad import FlooredAMSGrad
from accordion_hvd.simulation.one_process import World

XP = NUMPY.xp
SHAPE, SIZE = (27, 43), 1161
RULE = SketchedAMSGrad(ratio=0.02, columns=3.0, candidates=4, warmup_steps=0, eps=1e-4)
COUNT = RULE.kept(SIZE)


def gradients_of(ranks: int, steps: int, shape: Any = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, ranks, *shape))


def step(world: World, gradients: Sequence[np.ndarray], lr: float, framework: Any = NUMPY) -> Any:
    """Take a step; return the direction for "w", equal on all ranks, as an fp64 vector."""
    found = laws.step(world, framework, [{"w": g} for g in gradients], lr)
    assert all(mine is not None and same_bits(mine["w"], found[0]["w"]) for mine in found)
    return found[0]["w"].reshape(-1).astype(np.float64)


def states(world: World) -> list[dict[str, np.ndarray]]:
    """Return copies of each rank's state of "w" in NumPy."""
    return arrays(world, NUMPY)


def arrays(world: World, framework: Framework) -> list[dict[str, np.ndarray]]:
    """Return copies of each rank's state of "w"."""
    entries = [exchange.bucket_states[0] for exchange in world.exchanges]
    return [{key: framework.array(x) for key, x in entry.state.items()} for entry in entries]


# ----------------------------------------------------------------------------- what AMSGrad it is
@pytest.mark.parametrize(
    "framework, ranks", combined({NUMPY: (1, 4), TORCH: (3,), TENSORFLOW: (2,)})
)
def test_the_dense_stage_is_amsgrad_that_begins_at_eps(framework: Framework, ranks: int) -> None:
    world = simulate(FlooredAMSGrad((0.8, 0.9), 1e-3), ranks)
    oracle = rules.FlooredOracle(ranks, SIZE, (0.8, 0.9), 1e-3)
    for gradients in gradients_of(ranks, 6):
        wanted = oracle.step(gradients.reshape(ranks, -1), 0.1)
        np.testing.assert_allclose(step(world, gradients, 0.1, framework), wanted, atol=1e-12)


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("columns", [100, 1161])
def test_it_is_amsgrad_if_all_elements_move(
    framework: Framework, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With k = d, directions are AMSGrad's, even if the sketch is far too small."""
    rule = SketchedAMSGrad(ratio=1.0, warmup_steps=0, eps=1e-4)
    monkeypatch.setattr(SketchedAMSGrad, "width", lambda self, size: columns)
    world, oracle = simulate(rule, 3), rules.FlooredOracle(3, SIZE, eps=1e-4)
    for gradients, lr in zip(gradients_of(3, 6), (1.0, 0.1, 0.1, 0.3, 0.0, 0.2), strict=True):
        wanted = oracle.step(gradients.reshape(3, -1), lr)
        found = step(world, gradients, lr, framework)
        if lr:
            assert np.abs(found - wanted).max() < 1e-10
        assert all((s["apart"] == 1).all() for s in arrays(world, framework))
        assert not any(s["error"].any() for s in arrays(world, framework))


def test_one_rank_takes_the_step_that_it_owes() -> None:
    """After a change to one rank, its first step applies the old ranks' mean residual in full."""
    states_before = run_for(3, 6)[1]
    spec, info = XP.spec(np.zeros(SIZE)), Info(size=1)
    state = RULE.rescale(states_before, spec, info)
    twin = {**state, "error": 0 * state["error"]}
    carried = np.mean([s["error"] for s in states_before], 0)
    alone = Ranks(RULE, 1)
    for number, gradient in enumerate(gradients_of(1, 3, (SIZE,), seed=5)[:, 0]):
        (ours, state), (theirs, twin) = (
            alone.exchange([gradient.copy()], [x])[0] for x in (state, twin)
        )
        wanted = carried / np.sqrt(twin["vmax"]) / 0.1 * (number == 0)  # the rate of `Ranks`
        np.testing.assert_allclose(ours - theirs, wanted, atol=1e-12)
        assert not state["error"].any()


# ------------------------------------------------------------------------------- nothing is lost
def run_for(ranks: int, steps: int, rule: Any = RULE, lr: float = 0.1) -> Any:
    world = simulate(rule, ranks)
    for gradients in gradients_of(ranks, steps):
        step(world, gradients, lr)
    return world, states(world)


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_what_moves_and_what_waits_is_all(framework: Framework) -> None:
    """Moved elements and residuals add up to the momentum and the old residuals.

    Exactly k elements move, and none at a learning rate of 0. v learns at the candidates only.
    """
    rates, ranks = (0.1, 0.1, 0.01, 0.0, 0.02, 0.1), 3
    world, before = simulate(RULE, ranks), []
    for gradients, lr in zip(gradients_of(ranks, 6), rates, strict=True):
        direction = step(world, gradients.copy(), lr, framework)
        flat, after = gradients.reshape(ranks, -1), arrays(world, framework)
        before = before or [init() for _ in range(ranks)]
        for mine, was, g in zip(after, before, flat, strict=True):
            np.testing.assert_allclose(mine["m"], 0.9 * was["m"] + 0.1 * g, atol=1e-15)
            assert same_bits(mine["vmax"], after[0]["vmax"])
        given = np.mean([lr * s["m"] for s in after] + 0 * flat, 0)
        given += np.mean([s["error"] for s in before], 0)
        moved = lr * direction * np.sqrt(after[0]["vmax"])
        waits = np.mean([s["error"] for s in after], 0)
        np.testing.assert_allclose(moved + waits, given, atol=1e-15)
        assert np.count_nonzero(direction) == (COUNT if lr else 0)
        assert all((s["error"][direction != 0] == 0).all() for s in after)
        learned = after[0]["v"] - 0.99 * before[0]["v"]
        seen = np.abs(learned) > 1e-12
        assert np.count_nonzero(seen) == 4 * COUNT and seen[direction != 0].all()
        np.testing.assert_allclose(learned[seen], 0.01 * flat.mean(0)[seen] ** 2, atol=1e-15)
        before = after


def init() -> dict[str, np.ndarray]:
    return RULE.init(XP.spec(np.zeros(SIZE)), Info())


def test_a_fall_of_the_learning_rate_discards_nothing() -> None:
    """Residuals move the weights later, scaled by the learning rate of the steps that made them."""
    rule = SketchedAMSGrad((0.0, 0.9), 10.0, 0.05, columns=4.0, rows=3, warmup_steps=0)
    world, before = run_for(3, 5, rule)
    carried = np.mean([s["error"] for s in before], 0) / np.sqrt(before[0]["vmax"])
    moved = np.zeros(SIZE)
    for number in range(100):
        lr = 0.0 if number == 3 else 1e-3
        moved += lr * step(world, np.zeros((3, *SHAPE)), lr)
    assert not any(state["error"].any() for state in states(world))
    np.testing.assert_allclose(moved, carried, atol=1e-12)


def test_tables_are_those_of_a_server_that_holds_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The averaged tables are sketches of all momentum less those of the elements that have moved.

    Here, hashes are the same in all steps, as on a server that holds the error.
    """
    key, unsketch, tables = random.key("fixed"), XP.unsketch, []
    monkeypatch.setattr(sketched_amsgrad, "random", SimpleNamespace(key=lambda *_: key))

    def recorded(table: Any, *rest: Any) -> Any:
        tables.append(table.astype(float))
        return unsketch(table, *rest)

    monkeypatch.setattr(XP, "unsketch", recorded)
    world, columns, held = simulate(RULE, 3), RULE.width(SIZE), np.zeros((5, RULE.width(SIZE)))
    codes = count_sketch.hashes(XP, SIZE, 5, columns, key)
    momenta = np.zeros((3, SIZE))
    for number, gradients in enumerate(gradients_of(3, 20)):
        lr = 0.1 if number < 10 else 0.01
        momenta = 0.9 * momenta + 0.1 * gradients.reshape(3, -1)
        direction = step(world, gradients, lr)
        held = held + sketch(lr * momenta.mean(0), codes, columns)
        assert len(tables) == 3 * (number + 1), "one for each rank"
        np.testing.assert_allclose(tables[-1], held, atol=1e-6)
        held -= sketch(lr * direction * np.sqrt(states(world)[0]["vmax"]), codes, columns)


def recall(rule: SketchedAMSGrad, kind: str, size: int = 100_000) -> float:
    """Return the share of the k largest elements of a vector that are among the candidates."""
    shares, k = [], rule.kept(size)
    for seed in range(4):
        draw = np.random.default_rng(seed)
        x = draw.normal(size=size)
        if kind == "peaked":  # k elements, ten times the standard deviation of the others
            x[draw.choice(size, k, replace=False)] = draw.choice([-10, 10], k)
        elif kind == "embedding":  # a third of the rows of 100 have gradients, by Zipf's law
            rows = np.arange(1, size // 100 + 1) ** -0.5 * (draw.random(size // 100) < 0.33)
            x *= np.repeat(draw.permutation(rows), 100)
        x = x.astype(np.float32)
        columns = rule.width(size)
        codes = count_sketch.hashes(XP, size, rule.rows, columns, random.key(kind, seed))
        scores = np.abs(XP.unsketch(XP.sketch(x, codes, columns), codes, np.empty_like(x)))
        found = np.argsort(-scores)[: rule.candidates * k]
        shares.append(np.isin(np.argsort(-np.abs(x))[:k], found).mean())
    return float(np.mean(shares))


RECALL = {
    "peaked": {4.0: 0.15, 16.0: 0.68},
    "embedding": {4.0: 0.38, 16.0: 0.94},
    "normal": {4.0: 0.02, 16.0: 0.07},
}
"""By kind and `columns`, as docs/optimizer-details.md has them."""


@pytest.mark.parametrize("kind", RECALL)
@pytest.mark.parametrize("columns", [4.0, 16.0])
def test_how_many_of_the_largest_elements_are_found(kind: str, columns: float) -> None:
    """The candidates contain the documented share of the largest elements, far from all of them."""
    assert SketchedAMSGrad().columns == 4
    assert abs(recall(SketchedAMSGrad(columns=columns), kind) - RECALL[kind][columns]) < 0.05


def test_a_sketch_serves_where_it_sends_less() -> None:
    for size in range(1, 300):
        kept, columns = RULE.kept(size), RULE.width(size)
        wanted = min(int(RULE.columns * kept), size)
        sent = RULE.rows * wanted + 2 * min(RULE.candidates * kept, size)
        assert columns == (wanted if sent < size else 0)
    assert RULE.width(23) == 0 and RULE.width(24) == 3  # 23 elements: a sketch would send 23


def sketch(x: np.ndarray, codes: np.ndarray, columns: int) -> np.ndarray:
    """Return the count sketch of a vector, computed element by element in fp64."""
    block, within = np.divmod(np.arange(x.size), columns)
    table = np.zeros((len(codes), columns))
    for row, mine in zip(table, codes[:, block], strict=True):
        np.add.at(row, (within + mine // 2) % columns, (1 - 2 * (mine % 2)) * x)
    return table


# -------------------------------------------------------------------------- stages, ranks, graphs
def test_momentum_goes_through_both_stages() -> None:
    """The mean of the ranks' m is the momentum of all mean gradients, in both stages.

    In a dense stage m is equal on all ranks. Residuals wait until the next sketched stage.
    """
    schedule = StepSchedule({0: RULE.dense(), 3: RULE}, window=1)
    world, mean, errors = simulate(schedule, 3), np.zeros(SIZE), []
    for number, gradients in enumerate(gradients_of(3, 12)):
        if number in (6, 9):
            for exchange in world.exchanges:
                exchange.switch(exchange.bucket_states[0], int(number == 9))
        mean = 0.9 * mean + 0.1 * gradients.reshape(3, -1).mean(0)
        before, flat = states(world), gradients.reshape(3, -1).mean(0)
        direction = step(world, gradients.copy(), 0.1)
        after = states(world)
        np.testing.assert_allclose(np.mean([s["m"] for s in after], 0), mean, atol=1e-14)
        if number in (0, 1, 2, 6, 7, 8):
            assert all(same_bits(s["m"], after[0]["m"]) and not s["apart"].any() for s in after)
            np.testing.assert_allclose(direction, mean / np.sqrt(after[0]["vmax"]), atol=1e-12)
            assert "error" not in after[0]
        if number == 6:  # the first after a sketched one: v waits
            assert same_bits(after[0]["v"], before[0]["v"])
        elif number in (1, 7):
            wanted = 0.99 * before[0]["v"] + 0.01 * flat**2
            np.testing.assert_allclose(after[0]["v"], wanted, atol=1e-15)
        if number == 5:
            errors = [s["error"] for s in after]
        if number == 9:
            given = 0.1 * mean + np.mean(errors, 0)
            waits = np.mean([s["error"] for s in after], 0)
            moved = 0.1 * direction * np.sqrt(after[0]["vmax"])
            np.testing.assert_allclose(moved + waits, given, atol=1e-15)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_means_are_kept_on_another_number_of_ranks(ranks: int) -> None:
    before, spec = run_for(3, 6)[1], XP.spec(np.zeros(SIZE))
    made = [RULE.rescale(before, spec, Info(rank=r, size=ranks)) for r in range(ranks)]
    for key in ("m", "error"):
        wanted = np.mean([s[key] for s in before], 0)
        np.testing.assert_allclose(np.mean([s[key] for s in made], 0), wanted, atol=1e-16)
    other = RULE.rescale_from_one(before[0], spec, Info(rank=1, size=2))
    assert same_bits(other["m"], before[0]["m"]) and not other["error"].any()


@pytest.mark.skipif("not __import__('frameworks').installed(TENSORFLOW)")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", [RULE, RULE.dense()], ids=repr)
def test_traced(rule: Any, dtype: str) -> None:
    """In a graph that is traced once, directions are NumPy's.

    The step and the learning rate are tensors.
    """
    import tensorflow as tf

    ours, oracle = Ranks(rule, 2, TENSORFLOW), simulate(rule, 2)
    traces = []

    @tf.function(autograph=False)
    def exchange(tensors: Any, states: Any, step: Any, lr: Any) -> Any:
        traces.append(1)
        ours.info = lambda rank, step_=None: Info(step, rank, 2, "w", lr)  # type: ignore[method-assign]
        return ours.exchange(tensors, states, step)

    state = ours.init(tf.zeros((SIZE,), dtype))
    for number, gradients in enumerate(gradients_of(2, 5).astype(dtype)):
        lr = (0.5, 0.25, 0.25, 0.0, 0.125)[number]
        tensors = [tf.constant(g.reshape(-1)) for g in gradients]
        clock = tf.constant(number, tf.int64), tf.constant(lr)
        results = exchange(tensors, state, *clock)
        state, wanted = [new for _, new in results], step(oracle, gradients, lr)
        for mean, _ in results:
            wrong = np.abs(mean.numpy().reshape(-1) - wanted) > (
                1e-10 if dtype == "float64" else 1e-3
            )
            assert wrong.mean() <= (0.0 if dtype == "float64" else 0.01)
    assert len(traces) == 1


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties_are_broken_alike(framework: Framework, dtype: str) -> None:
    """If all elements are equally large, all ranks and frameworks move the same ones."""
    ours, theirs = simulate(RULE, 2), simulate(RULE, 2)
    signs = np.sign(gradients_of(1, 4)).astype(dtype)
    for gradients in np.concatenate([signs, signs], 1):
        mine = step(ours, gradients.copy(), 0.5, framework)
        wanted = step(theirs, gradients.copy(), 0.5)
        np.testing.assert_array_equal(mine != 0, wanted != 0)


# ------------------------------------------------------------------------------------------ bytes
def test_bytes_do_not_grow_with_the_model() -> None:
    """For a fixed k, the payload is rows x columns and twice the candidates, for any size."""
    sent = {}
    for size in (10_000, 100_000, 1_000_000):
        rule = SketchedAMSGrad(ratio=50 / size, columns=10.0, candidates=4, warmup_steps=0)
        world = simulate(rule, 2)
        for gradients in gradients_of(2, 2, (size // 100, 100)).astype(np.float32):
            step(world, gradients, 0.1)
        sent[size] = world.exchanges[0].stats()["payload"]
    assert set(sent.values()) == {2 * (4 * (5 * 500 + 2 * 4 * 50) + 8)}


def test_the_default_sends_a_16th() -> None:
    rule, size = SketchedAMSGrad(), 2_000_000
    sent = rule.rows * rule.width(size) + 2 * rule.candidates * rule.kept(size)
    assert 16 < size / sent < 17


def test_small_tensors_stay_in_the_dense_stage() -> None:
    world = simulate(RULE, 2)
    shapes = {"a": (40, 50), "bias": (50,), "b": (30, 100)}
    world.step([{k: np.ones(s, np.float32) for k, s in shapes.items()} for _ in range(2)], lr=0.1)
    assert set(world.exchanges[0].levels().values()) == {repr(RULE), repr(RULE.dense())}


# ---------------------------------------------------------------------------------------- training
def descend(rule: Any, steps: int, lr: float) -> tuple[float, float, World]:
    """Train a quadratic on two ranks with different optima.

    The condition number is 10. Return the loss before, the loss after, and the world.
    """
    draw, size = np.random.default_rng(0), 2000
    scale, targets = np.linspace(0.1, 1, size), 3 * draw.normal(size=(2, size))
    x, best = 3 * draw.normal(size=size), targets.mean(0)
    world, first = simulate(rule, 2), float((scale * (x - best) ** 2).sum())
    for _ in range(steps):
        gradients = [{"x": (scale * (x - t)).reshape(40, 50)} for t in targets]
        found = world.step(gradients, lr=lr)[0]
        assert found is not None
        x -= lr * found["x"].reshape(-1)
    return first, float((scale * (x - best) ** 2).sum()), world


def test_it_descends_and_says_what_waits() -> None:
    rule = SketchedAMSGrad(ratio=0.05, columns=2.0, rows=3, warmup_steps=0, eps=1e-4)
    first, last, world = descend(rule, 500, 1e-2)
    assert last < 0.01 * first
    exchange = world.exchanges[0]
    state = arrays(world, NUMPY)[0]
    waiting = exchange.stats()["reports"]["x"]["waiting"]
    assert np.isclose(waiting, np.linalg.norm(state["error"] / np.sqrt(state["vmax"])), rtol=1e-6)


def test_what_runs_away_does_not_if_it_is_bounded() -> None:
    """With a rate that is too large for so few elements, training diverges unless it is bounded."""
    options: dict[str, Any] = {"ratio": 0.01, "columns": 20.0, "rows": 3, "warmup_steps": 0}
    first, last, _ = descend(SketchedAMSGrad(**options), 250, 0.1)
    assert last > 30 * first
    first, last, _ = descend(SketchedAMSGrad(**options, bounded=True), 250, 0.1)
    assert last < first
