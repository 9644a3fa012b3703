"""Tests of the count sketch, and of SketchedSGD against its paper, momentum included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import laws
import numpy as np
import pytest
from cases import sketched
from frameworks import (
    NUMPY,
    TENSORFLOW,
    TORCH,
    Framework,
    Ranks,
    exact_mean,
    normals,
    parameters,
    same_bits,
)
from traced import same_in_a_graph

from accordion_hvd import SketchedSGD, simulate
from accordion_hvd.ops import count_sketch, random
from accordion_hvd.policies import Fixed

XP = NUMPY.xp
RNG = np.random.default_rng(0)
SIZES = [(10_007, 5, 333), (999, 5, 1000), (100_000, 7, 70_000), (50, 1, 7), (50, 9, 7), (5, 3, 1)]
"""Elements, rows, columns."""


def hashes(size: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return count_sketch.hashes(XP, size, rows, columns, random.key("test", seed))


def columns_and_signs(codes: np.ndarray, size: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the column and the sign of each element in each row, of shape (rows, size)."""
    block, within = np.divmod(np.arange(size), columns)
    mine = codes[:, block]
    return (within + mine // 2) % columns, 1 - 2 * (mine % 2)


def naive(x: np.ndarray, codes: np.ndarray, columns: int) -> np.ndarray:
    """Return the sketch of x, computed element by element."""
    table = np.zeros((len(codes), columns))
    for row, where, sign in zip(table, *columns_and_signs(codes, x.size, columns), strict=True):
        np.add.at(row, where, sign * x)
    return table


def naive_estimates(table: np.ndarray, codes: np.ndarray, size: int) -> np.ndarray:
    where, sign = columns_and_signs(codes, size, table.shape[1])
    return np.median(sign * np.take_along_axis(table, where, 1), 0)


# ------------------------------------------------------------------------------- the count sketch
@pytest.mark.parametrize(("size", "rows", "columns"), SIZES)
def test_the_definition(size: int, rows: int, columns: int) -> None:
    codes, x = hashes(size, rows, columns), RNG.standard_normal(size).astype(np.float32)
    table = XP.sketch(x, codes, columns)
    np.testing.assert_allclose(table, naive(x, codes, columns), atol=1e-4)
    wanted = naive_estimates(table, codes, size)
    np.testing.assert_array_equal(XP.unsketch(table, codes, x.copy()), wanted.astype(np.float32))


def anywhere(framework: Framework, name: str) -> Any:
    """Return the framework's implementation of an operation for GPUs."""
    operation = getattr(framework.xp, name)
    return getattr(operation, "__wrapped__", None) or getattr(framework.xp, f"_{name}")


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
@pytest.mark.parametrize(("size", "rows", "columns"), SIZES)
def test_on_gpus_it_is_the_same(framework: Framework, size: int, rows: int, columns: int) -> None:
    """The implementations for GPUs give NumPy's sketch and estimates."""
    codes, x = hashes(size, rows, columns), RNG.standard_normal(size).astype(np.float32)
    table = XP.sketch(x, codes, columns)
    places = framework.tensor(codes)
    ours = anywhere(framework, "sketch")(framework.tensor(x), places, columns)
    np.testing.assert_allclose(framework.array(ours), table, atol=1e-4)
    ours = anywhere(framework, "unsketch")(framework.tensor(table), places, framework.tensor(x))
    assert same_bits(framework.array(ours), XP.unsketch(table, codes, x))


@pytest.mark.parametrize("framework", parameters())
def test_hashes_are_the_same_everywhere(framework: Framework) -> None:
    for step in (0, 7, 2**40):
        wanted = count_sketch.hashes(XP, 10_000, 5, 300, random.key("w", step))
        assert wanted.shape == (5, 34) and wanted.dtype == np.int32
        assert wanted.min() >= 0 and wanted.max() < 600
        ours = count_sketch.hashes(framework.xp, 10_000, 5, 300, random.key("w", step))
        assert same_bits(framework.array(ours), wanted)


def test_hashes_are_uniform() -> None:
    codes = hashes(100_000, 100, 50)
    counts = np.bincount(codes.reshape(-1), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < 170  # chi-squared, 99 degrees: p < 1e-5


def test_sketches_add_up() -> None:
    a, b = RNG.standard_normal((2, 10_000)).astype(np.float32)
    codes = hashes(10_000, 5, 700)
    both = 2 * XP.sketch(a, codes, 700) - 3 * XP.sketch(b, codes, 700)
    np.testing.assert_allclose(XP.sketch(2 * a - 3 * b, codes, 700), both, atol=1e-4)


def test_a_row_is_unbiased() -> None:
    """The estimate of one row has the right mean over many seeds.

    Its variance is at most |x|^2 / columns.
    """
    x, seeds = RNG.standard_normal(200).astype(np.float32), 4000
    errors = np.empty((seeds, 200))
    for seed in range(seeds):
        codes = hashes(200, 1, 20, seed)
        errors[seed] = XP.unsketch(XP.sketch(x, codes, 20), codes, x.copy()) - x
    bound = (x**2).sum() / 20
    assert np.abs(errors.mean(0)).max() < 4.5 * (bound / seeds) ** 0.5
    assert errors.var(0).max() < 1.2 * bound


def test_few_elements_are_found_exactly() -> None:
    """Ten nonzero elements among 10,000 are found, with exact values.

    With as many columns as elements, the estimates of all elements are exact.
    """
    for seed in range(20):
        x, draw = np.zeros(10_000, np.float32), np.random.default_rng(seed)
        x[draw.choice(10_000, 10, replace=False)] = draw.standard_normal(10) + 3
        codes = hashes(x.size, 5, 4000, seed)
        estimates = XP.unsketch(XP.sketch(x, codes, 4000), codes, x.copy())
        index = XP.largest_index(estimates, 10)
        np.testing.assert_array_equal(index, np.flatnonzero(x))
        np.testing.assert_array_equal(estimates[index], x[index])
    codes = hashes(500, 3, 500)
    x = RNG.standard_normal(500).astype(np.float32)
    assert same_bits(XP.unsketch(XP.sketch(x, codes, 500), codes, x.copy()), x)


def recall(rows: int, columns: int, asked: int, layout: str) -> float:
    """Return the fraction of 50 large elements among 10,000 that is found, averaged over seeds."""
    size, large, found = 10_000, 50, []
    for seed in range(30):
        draw = np.random.default_rng(seed)
        x = 0.01 * draw.standard_normal(size)
        places = draw.permutation(size)[:large] if layout == "scattered" else np.arange(large) * 200
        x[places] += np.exp(-np.arange(large) / 20) * draw.choice([-1, 1], large)
        codes = hashes(size, rows, columns, seed)
        table = XP.sketch(x.astype(np.float32), codes, columns)
        estimates = XP.unsketch(table, codes, x.astype(np.float32))
        wanted = np.argsort(-np.abs(x))[:large]
        found.append(np.isin(wanted, XP.largest_index(estimates, asked)).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("layout", ["scattered", "every 200th"])
def test_large_elements_are_found(layout: str) -> None:
    """Five rows find at least 70 % of the large elements, and one row finds fewer than 40 %."""
    assert recall(5, 1000, 50, layout) > 0.9
    assert recall(5, 500, 200, layout) > 0.95
    assert recall(5, 200, 200, layout) > 0.7
    assert recall(1, 2000, 50, layout) < 0.4


# ------------------------------------------------------------------------------------ the algorithm
CASE = replace(sketched(0.01, 5, 10), compressor=SketchedSGD(0.01))
ONLY_GRADIENTS = ("conservation", "odd_shapes", "half_gradients", "full_level_is_exact")
"""Laws that say that nothing but the gradient is added up."""

HELD = [
    pytest.param(law, *row.values, ranks, id=f"{law.__name__}-{row.id}-{ranks}", marks=row.marks)
    for law in laws.LAWS
    for row in parameters()
    for ranks in (1, 2)
    if law.__name__ not in ONLY_GRADIENTS and laws.applies(law, CASE, *row.values, ranks)
]


@pytest.mark.parametrize(("law", "framework", "ranks"), HELD)
def test_laws_with_momentum(law: laws.Law, framework: Framework, ranks: int) -> None:
    law(CASE, framework, ranks)


def test_traced_with_momentum() -> None:
    pytest.importorskip("tensorflow")
    same_in_a_graph(CASE)


def test_it_follows_the_paper() -> None:
    """Two ranks follow steps 1 to 7 of the paper, computed with plain vectors."""
    ranks, size, kept, asked, columns, momentum = 2, 1200, 12, 48, 120, 0.9
    world = Ranks(SketchedSGD(0.01), ranks)
    u, v = np.zeros((2, ranks, size))
    for step, gradients in enumerate(normals(laws.SHAPE, ranks, steps=8)):
        u = momentum * u + np.reshape(gradients, (ranks, size))
        v = v + u
        codes = count_sketch.hashes(XP, size, 5, columns, random.key("sketch", "w", step))
        table = np.mean([naive(mine, codes, columns) for mine in v], 0)
        estimates = naive_estimates(table, codes, size)
        candidates = np.argsort(-np.abs(estimates), kind="stable")[:asked]  # shared cells give ties
        exact = v.mean(0)
        chosen = candidates[np.argsort(-np.abs(exact[candidates]))[:kept]]
        update = np.zeros(size)
        update[chosen] = exact[chosen]
        u[:, chosen] = v[:, chosen] = 0
        np.testing.assert_allclose(world.step(gradients)[1].reshape(-1), update, atol=1e-5)
        for rank, state in enumerate(world.states):
            np.testing.assert_allclose(state["error"], v[rank], atol=1e-5)
            np.testing.assert_allclose(state["momentum"], u[rank], atol=1e-5)


def test_what_is_not_sketched_keeps_its_momentum() -> None:
    """A tensor that is sent dense follows plain momentum SGD, and has no residual."""
    world, velocity = Ranks(SketchedSGD(0.1, momentum=0.5), 2), np.zeros(laws.SHAPE)
    for gradients in normals(laws.SHAPE, 2, steps=5):
        velocity = 0.5 * velocity + exact_mean(gradients)
        np.testing.assert_allclose(world.step(gradients)[0], velocity, atol=1e-5)
        assert not world.mean_residual(1200).any()


def test_large_and_small_tensors_travel_together() -> None:
    world = simulate(SketchedSGD(0.01), 2)
    shapes = {"a": (40, 50), "bias": (50,), "b": (30, 100)}
    gradients = [{k: np.ones(s, np.float32) for k, s in shapes.items()} for _ in range(2)]
    world.step(gradients)
    exchange = world.exchanges[0]
    assert set(exchange.levels().values()) == {repr(SketchedSGD(0.01)), "DGC(ratio=1.0)"}
    sketch, rest = 4 * 50 * (5 * 10 + 4), 4 * 50
    assert exchange.stats()["payload"] == sketch + rest + 8 * len(exchange.layout.groups)


def test_the_default_sends_an_18th() -> None:
    compressor, size = SketchedSGD(), 25_000_000
    kept = compressor.kept(size)
    sent = compressor.rows * compressor.width(size) + compressor.candidates * kept
    assert 18 < size / sent < 19


def test_it_trains() -> None:
    """Training on a badly scaled quadratic, with noisy gradients, ends near the minimum."""
    size, ranks = 2000, 2
    scale = np.linspace(0.1, 1, size).astype(np.float32)
    x = RNG.standard_normal(size).astype(np.float32)
    world = simulate(Fixed(SketchedSGD(0.02, rows=3, columns=5, momentum=0.5)), ranks)
    for _ in range(1500):
        noise = RNG.standard_normal(size).astype(np.float32)
        gradients = [scale * x + noise, scale * x - noise]
        means = world.step([{"x": g.reshape(40, 50)} for g in gradients])
        assert means[0] is not None
        x -= 0.02 * means[0]["x"].reshape(-1)
    assert np.abs(x).max() < 0.05
