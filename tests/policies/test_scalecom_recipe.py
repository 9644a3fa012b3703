"""Tests of ScaleComRecipe: the recipe of ScaleCom's paper as one policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import Framework, normals, parameters, same_bits
from laws import step

from accordion_hvd import Dense, ScaleCom, ScaleComRecipe, parse, simulate

SHAPES = {"conv1.w": (16, 3, 5, 5), "conv2.w": (16, 8, 3, 3), "conv3.w": (40, 30), "fc.w": (80, 50)}
SHAPES |= {"fc.b": (50,)}
FLOPS = {"conv2.*": 200.0, "conv*": 150.0}


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize(("large_batch", "beta"), [(False, 1.0), (True, 0.1)])
def test_it_is_the_papers_recipe(large_batch: bool, beta: float, framework: Framework) -> None:
    """The recipe has dense epochs, a dense first layer, and the rates 25, 50, 400 of Section 4."""
    recipe = ScaleComRecipe(["conv1.*"], FLOPS, large_batch=large_batch, dense=2, window=3)
    by_hand = {"conv2.w": 1 / 25, "conv3.w": 1 / 50, "fc.w": 1 / 400}
    world = simulate(recipe, 2)
    twins = {name: simulate(ScaleCom(ratio, beta), 2) for name, ratio in by_hand.items()}
    streams = [normals(shape, 2, seed, 9) for seed, shape in enumerate(SHAPES.values())]
    for number, parts in enumerate(zip(*streams, strict=True)):
        gradients = [dict(zip(SHAPES, own, strict=True)) for own in zip(*parts, strict=True)]
        exact = {name: np.mean([g[name] for g in gradients], 0) for name in SHAPES}
        copies = [{name: g.copy() for name, g in own.items()} for own in gradients]
        mean = step(world, framework, gradients)[0]
        assert mean is not None
        dense = set(SHAPES) if number < 6 else {"conv1.w", "fc.b"}
        for name in dense:
            np.testing.assert_allclose(mean[name], exact[name], atol=1e-6)
        if number == 5:  # leaders go by the number of the exchange
            for twin in twins.values():
                for exchange in twin.exchanges:
                    exchange.steps = 6
        for name, twin in twins.items() if number >= 6 else ():
            wanted = step(twin, framework, [{name: own[name]} for own in copies])[0]
            assert wanted is not None and same_bits(mean[name], wanted[name])
    rows = world.exchanges[0].policy.history
    assert {(row.name, row.step, row.compressor) for row in rows} == {
        (name, 6, repr(ScaleCom(ratio, beta))) for name, ratio in by_hand.items()
    }


def test_without_dense_epochs() -> None:
    recipe = ScaleComRecipe([], dense=0)
    assert recipe.levels("fc.w") == (ScaleCom(1 / 400),) and recipe.start("fc.w") == 0
    assert ScaleComRecipe(["a"]).levels("a") == (Dense(),)
    assert ScaleComRecipe(["a"]).dense == 5


def test_it_reads_back() -> None:
    recipe = ScaleComRecipe(["conv1.*"], FLOPS, large_batch=True, dense=3, window=7)
    assert repr(parse(repr(recipe))) == repr(recipe)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("first", "conv1.*"),
        ("first", None),
        ("first", [1]),
        ("dense", -1),
        ("dense", 0.5),
        ("large_batch", 1),
        ("flops", {"a": -1}),
    ],
)
def test_refused(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*must be"):
        ScaleComRecipe(**{"first": [], name: bad})
