"""Tests of properties that all optimizers share, for each row of `rules.py`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import laws
import numpy as np
import pytest
import rules
from frameworks import NUMPY, POISONED, TENSORFLOW, TORCH, Framework, combined, parameters
from rules import REFUSED, ROWS, Row

from accordion_hvd import StepSchedule, optimizers, simulate
from accordion_hvd.core.base import Info
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import World

SHAPE = (27, 43)  # large enough to be compressed; no multiple of 8
STEPS = 10

FIRST = {type(row.rule): row for row in reversed(ROWS)}
"""The first row of each class; TensorFlow takes the steps of the others in `make test-all`."""


def each_row(places: list[Any]) -> list[Any]:
    """Return each row with each of `places`, whose first value is a framework."""
    return [
        pytest.param(row, *place.values, id=f"{place.id}-{row.name}", marks=place.marks)
        for place in places
        for row in ROWS
    ]


FEW = [FIRST[kind] for kind in (optimizers.Adam, optimizers.OnebitAdam, optimizers.Birder)]
"""Rows for which `make test` looks at more than the steps in TensorFlow."""
few_in_tensorflow = pytest.mark.seldom(tensorflow=lambda row: row not in FEW)
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
by_row_and_framework = pytest.mark.parametrize("row, framework", each_row(parameters()))
everywhere = pytest.mark.parametrize(
    "row, framework, ranks",
    each_row(combined({NUMPY: (1, 3, 4), POISONED: (2,), TORCH: (1, 3), TENSORFLOW: (2,)})),
)


def gradients_of(ranks: int, steps: int, shape: Any = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, ranks, *shape))


def rates(steps: int) -> list[float]:
    """Return learning rates that fall once, at half of the steps."""
    return [0.1 if step < steps // 2 else 0.01 for step in range(steps)]


def directions(
    world: World, framework: Framework, gradients: np.ndarray, dtype: str, lr: float
) -> list[np.ndarray]:
    """Take a step; return the direction of each rank for the tensor "w"."""
    given = [{"w": g.astype(dtype)} for g in gradients]
    found = laws.step(world, framework, given, lr)
    return [mine["w"].astype(np.float64) for mine in found if mine is not None]


@pytest.mark.seldom(tensorflow=lambda row: FIRST[type(row.rule)] is not row)
@everywhere
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_follows_its_oracle(row: Row, framework: Framework, ranks: int, dtype: str) -> None:
    world, oracle = simulate(row.rule, ranks), row.oracle(ranks, int(np.prod(SHAPE)))
    steps = STEPS if dtype == "float64" or not row.discrete else 5
    now = zip(gradients_of(ranks, steps), rates(steps), strict=True)
    for gradients, lr in now:
        given = gradients.astype(dtype).astype(np.float64)
        if row.rule.needs_weights:
            read = laws.weights_of(world, [{"w": g.astype(dtype)} for g in gradients])
            oracle.weights = np.array([x["w"].reshape(-1) for x in read], np.float64)
        wanted = oracle.step(given.reshape(ranks, -1), lr)
        wanted = wanted.reshape(-1, *SHAPE)[0]
        found = directions(world, framework, gradients, dtype, lr)
        assert len(found) == ranks
        for mine in found:
            assert np.array_equal(mine, found[0]), "ranks take different steps"
        wrong = np.abs(found[0] - wanted) / max(1.0, np.abs(wanted).max())
        if dtype == "float64":
            assert wrong.max() < 1e-10
        else:
            assert np.mean(wrong > 1e-4) <= (0.01 if row.discrete else 0.0)


@by_row
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes(row: Row, ranks: int) -> None:
    world, dense = simulate(row.rule, ranks), 3
    for gradients in gradients_of(ranks, dense + 4):
        directions(world, NUMPY, gradients, "float32", 0.1)
    stats = world.exchanges[0].stats()
    size, flags = int(np.prod(SHAPE)), 8
    early = as_policy(row.rule).start("w") < row.stage or row.rule.period != 1
    first = rules.dense_rounds if early else row.rounds
    payload = 0
    for rounds, steps in ((first, dense), (row.rounds, 4)):
        payload += steps * (flags + sum(moved for _, moved in rounds(size, ranks, 4)))
    assert stats["payload"] == payload


@few_in_tensorflow
@by_row_and_framework
def test_bad_steps_are_taken_back(row: Row, framework: Framework) -> None:
    """If one rank's gradient is not finite, no rank steps, and later steps are as without it."""
    world, twin = simulate(row.rule, 2), simulate(row.rule, 2)
    good = gradients_of(2, 12)
    for gradients in good[:6]:
        directions(world, framework, gradients, "float64", 0.1)
        directions(twin, framework, gradients, "float64", 0.1)
    bad = good[6].copy()
    bad[1, 3, 3] = np.nan
    assert directions(world, framework, bad, "float64", 0.1) == []
    for exchange in twin.exchanges:
        exchange.steps += 1
        exchange.skipped += 1
    for gradients in good[7:]:
        ours = directions(world, framework, gradients, "float64", 0.1)
        theirs = directions(twin, framework, gradients, "float64", 0.1)
        for mine, wanted in zip(ours, theirs, strict=True):
            assert np.mean(np.abs(mine - wanted) > 1e-7) < 0.001


@by_row
def test_state(row: Row) -> None:
    """Steps keep the keys, shapes and dtypes of `init`; moments of fp16 gradients are fp32."""
    for dtype, wide in (("float64", "float64"), ("float32", "float32"), ("float16", "float32")):
        spec = NUMPY.xp.spec(np.zeros(SHAPE, dtype))
        kinds = {"count": "float64"} | dict.fromkeys(row.narrow, "float32")
        forms = {
            key: (x.shape, kinds.get(key, wide))
            for key, x in row.rule.init(spec, Info(rank=1, size=2)).items()
        }
        world = simulate(row.rule, 2)
        for gradients in gradients_of(2, 5):
            directions(world, NUMPY, gradients, dtype, 0.1)
        state = world.exchanges[1].bucket_states[0].state
        assert state is not None
        assert {key: (x.shape, str(x.dtype)) for key, x in state.items()} == forms
        assert set(row.rule.per_rank_state) <= set(forms)


@few_in_tensorflow
@by_row_and_framework
def test_many_small_tensors_share_a_call(row: Row, framework: Framework) -> None:
    """Tensors of one shape share a call, and each has the result that it has alone."""
    shape, ranks = (32, 33), 2
    together, alone = simulate(row.rule, ranks), [simulate(row.rule, ranks) for _ in range(3)]
    for gradients in gradients_of(ranks, 6, (3, *shape)):
        given = [{f"w{i}": mine[i].copy() for i in range(3)} for mine in gradients]
        both = laws.step(together, framework, given)[0]
        assert both is not None
        for i, world in enumerate(alone):
            one = laws.step(world, framework, [{"w": mine[i].copy()} for mine in gradients])[0]
            assert one is not None
            if not row.random:
                np.testing.assert_allclose(both[f"w{i}"], one["w"], atol=1e-9)
    shared = row.rule.batching or row.rule.scope == "flat"
    assert len(together.exchanges[0].layout.batches) == (1 if shared else 3)


STAGED = [row for row in ROWS if row.rule.dense() != row.rule]


@pytest.mark.parametrize("row", STAGED, ids=lambda row: row.name)
def test_moments_go_along_when_stages_change(row: Row) -> None:
    """Moments continue in the next stage, or begin at 0 if the rule says so.

    State of each rank's own is kept unchanged while the dense stage serves.
    """
    world = simulate(StepSchedule({0: row.rule.dense(), 99: row.rule}, window=1), 2)
    for gradients in gradients_of(2, 2):
        directions(world, NUMPY, gradients, "float64", 0.1)
    for exchange in world.exchanges:
        entry = exchange.bucket_states[0]
        assert entry.level == 0 and entry.state is not None
        memory = {key: entry.state[key].copy() for key in row.moments}
        exchange.switch(entry, 1)
        for key in row.moments:
            wanted = 0 * memory[key] if row.anew else memory[key]
            assert np.array_equal(entry.state[key], wanted), key
    now = gradients_of(2, 1, seed=5)[0]
    world.step([{"w": g} for g in now])
    for exchange in world.exchanges:
        entry = exchange.bucket_states[0]
        own = {key: entry.state[key].copy() for key in row.rule.per_rank_state}
        exchange.switch(entry, 0)
        assert entry.carried is None
        exchange.switch(entry, 1)
        for key, value in own.items():
            assert np.array_equal(entry.state[key], value), key


@by_row
@pytest.mark.parametrize("sizes", [(3, 2), (2, 4), (1, 2), (4, 1)])
def test_another_number_of_ranks_goes_on(row: Row, sizes: tuple[int, int]) -> None:
    """State that all ranks share is kept exactly; all states get the shapes of the new number."""
    old, new = sizes
    world = simulate(row.rule, old)
    for gradients in gradients_of(old, 5):
        directions(world, NUMPY, gradients, "float64", 0.1)
    states = [dict(exchange.bucket_states[0].state) for exchange in world.exchanges]
    spec = NUMPY.xp.spec(np.zeros(SHAPE))
    for rank in range(new):
        info = Info(rank=rank, size=new)
        made = row.rule.rescale(states, spec, info)
        forms = {key: x.shape for key, x in row.rule.init(spec, info).items()}
        assert {key: x.shape for key, x in made.items()} == forms
        for key in set(states[0]) - set(row.rule.per_rank_state):
            assert np.array_equal(made[key], states[0][key])
        other = row.rule.rescale_from_one(states[0], spec, info)
        assert {key: x.shape for key, x in other.items()} == forms


def test_nothing_is_owed_twice_on_another_number_of_ranks() -> None:
    """The new ranks' mean error is the old workers' mean error plus the server errors."""
    rule = optimizers.OnebitAdam(warmup_steps=1)
    world = simulate(rule, 4)
    for gradients in gradients_of(4, 6):
        directions(world, NUMPY, gradients, "float64", 0.1)
    states = [exchange.bucket_states[0].state for exchange in world.exchanges]
    size = int(np.prod(SHAPE))
    carried = np.mean([s["error"] for s in states], 0)
    carried += np.concatenate([s["server"] for s in states])[:size]
    made = [rule.rescale(states, NUMPY.xp.spec(np.zeros(SHAPE)), Info(0, r, 3)) for r in range(3)]
    np.testing.assert_allclose(np.mean([s["error"] for s in made], 0), carried, atol=1e-15)
    assert not any(s["server"].any() for s in made)


@pytest.mark.parametrize("floor, least, most", [(0.0, 1e3, np.inf), (0.01, 0.0, 30.0)])
def test_a_floor_keeps_quiet_elements_from_running_away(
    floor: float, least: float, most: float
) -> None:
    """Without a floor, elements with a tiny variance take huge steps, and a warning says so.

    A sign is equally large for all elements, and is divided by the root of the variance.
    """
    rule = optimizers.OnebitAdam(warmup_steps=3, floor=floor)
    world, quiet = simulate(rule, 2), np.arange(SHAPE[1]) % 7 == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gradients in gradients_of(2, 8):
            gradients[..., quiet] *= 1e-8
            found = directions(world, NUMPY, gradients, "float64", 0.1)[0]
    said = [str(x.message) for x in caught if x.category is RuntimeWarning]
    assert len(said) == (2 if floor == 0 else 0), "one for each rank's switch"
    assert all("OnebitAdam" in text and "floor=0.01" in text for text in said)
    assert least <= np.abs(found[:, quiet]).max() <= most
    assert np.abs(found[:, ~quiet]).max() < 30


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("ranks, scale", [(2, 1.0), (2, 0.0), (1, 1e-8)])
def test_no_warning_where_nothing_runs_away(framework: Framework, ranks: int, scale: float) -> None:
    """There is no warning of huge steps where there are none.

    Elements without any gradient do not move, which a warning says with the tensor's name. One rank
    alone does not use signs.
    """
    world = simulate(optimizers.OnebitAdam(warmup_steps=5), ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gradients in gradients_of(ranks, 7):
            gradients[..., ::7] *= scale
            directions(world, framework, gradients, "float32", 0.1)
    said = [str(x.message) for x in caught if x.category is RuntimeWarning]
    still = int(np.prod((*SHAPE[:-1], len(range(0, SHAPE[-1], 7)))))
    wanted = [f"{still} elements of 'w' have had no gradient so far"] * (2 if scale == 0 else 0)
    assert len(said) == len(wanted)
    assert all(part in text for part, text in zip(wanted, said, strict=True)), said


def test_weight_decay_has_the_papers_form_by_default() -> None:
    decoupled = {
        name for name in optimizers.NATIVE if getattr(optimizers, name).decoupled_weight_decay
    }
    assert decoupled == {"Birder", "Lamb", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"}


def test_every_optimizer_has_a_row() -> None:
    known = {getattr(optimizers, name) for name in optimizers.NATIVE}
    served = {next(kind for kind in type(row.rule).__mro__ if kind in known) for row in ROWS}
    assert known == served


@pytest.mark.parametrize("kind, name, value", REFUSED)
def test_refused(kind: Any, name: str, value: Any) -> None:
    said = re.escape(f"{kind.__name__}: {name} is {value!r}")
    with pytest.raises(ValueError, match=said):
        kind(**{name: value})
