"""Tests of Displacement, which decides by the ranks' mean residual relative to the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decisions import decide, rows_of
from frameworks import NUMPY, Framework, parameters

from accordion_hvd import Dense, Displacement, PowerSGD, TopK, parse, simulate
from accordion_hvd.policies.displacement import HIGH, LOW, RelativeResidual
from accordion_hvd.simulation.one_process import World, lockstep

SHAPES = {"w": (48, 40), "v": (40, 50), "b": (7,)}
BOUND = 0.01


class Owner:
    """Stands for an exchange."""


OWNER = Owner()


def policy(**options: Any) -> Displacement:
    arguments = {"low": TopK(0.3), "high": TopK(0.05), "bound": BOUND, "window": 2}
    return Displacement(**{**arguments, **options})


def train(
    world: World,
    framework: Framework,
    steps: int,
    lr: Callable[[int], float] = lambda step: 0.1,
    noise: float = 1.0,
) -> dict[str, np.ndarray]:
    """Train on the sum of a gradient that all ranks share and noise of each rank's own.

    Returns:
        The weights, which never change.
    """
    rng = np.random.default_rng(0)
    weights = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in SHAPES.items()}
    for step in range(steps):
        common = {k: rng.standard_normal(shape) for k, shape in SHAPES.items()}
        mine = [
            {
                k: framework.tensor((x + noise * rng.standard_normal(x.shape)).astype(np.float32))
                for k, x in common.items()
            }
            for _ in world._policies
        ]
        told = [{k: framework.tensor(x) for k, x in weights.items()} for _ in mine]
        with framework.running():
            assert world.step(mine, lr(step), told)[0] is not None
    return weights


def residuals(world: World, framework: Framework, name: str) -> np.ndarray:
    """Return the residuals of a tensor on all ranks."""
    entries = [s for e in world.exchanges for s in e.bucket_states if s.bucket.name == name]
    return np.stack(
        [framework.array(entry.state["error"]).reshape(SHAPES[name]) for entry in entries]
    )


def measured(world: World) -> dict[str, float]:
    """Return the current evidence of rank 0; other ranks must have none."""
    readings = [RelativeResidual().read(exchange) for exchange in world.exchanges]
    found = lockstep(world._links, readings)
    assert all(not other for other in found[1:])
    return found[0]


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("compressor", [TopK(0.1), PowerSGD(2)], ids=repr)
def test_the_evidence_is_the_mean_errors_norm(compressor: Any, framework: Framework) -> None:
    world = simulate(compressor, 4, momentum=0.0)
    weights = train(world, framework, 6)
    found = measured(world)
    assert set(found) == {"w", "v"}
    for name, ratio in found.items():
        mean = residuals(world, framework, name).mean(0)
        wanted = np.linalg.norm(mean) / np.linalg.norm(weights[name])
        assert ratio == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"momentum": 0.5}, {"w": 2.0, "v": 2.0}),
        ({}, {"w": 10.0, "v": 10.0}),
        ({"gain": {"w": 3.0, "v": 0.0}.get}, {"w": 3.0, "v": 0.0}),
    ],
)
def test_the_gain_multiplies_the_effect_of_a_residual(
    options: Any, factors: dict[str, float]
) -> None:
    plain, world = simulate(TopK(0.1), 2, momentum=0.0), simulate(TopK(0.1), 2, **options)
    for one in (plain, world):
        train(one, NUMPY, 3)
    expected = {name: factors[name] * ratio for name, ratio in measured(plain).items()}
    assert measured(world) == pytest.approx(expected)


def test_what_a_rank_owes_by_itself_is_no_evidence() -> None:
    """The evidence excludes each rank's deviation from the mean residual.

    PowerSGD never sends that deviation, so it grows like a random walk.
    """
    world = simulate(PowerSGD(4), 8, momentum=0.0)
    weights = train(world, NUMPY, 60, noise=4.0)
    own = np.linalg.norm(residuals(world, NUMPY, "w")[0]) / np.linalg.norm(weights["w"])
    assert measured(world)["w"] < 0.5 * own


@pytest.mark.parametrize("framework", parameters())
def test_levels_follow_the_learning_rate(framework: Framework) -> None:
    """The level is low while residuals displace the weights, and high once the rate has fallen."""
    world = simulate(policy(), 2)
    train(world, framework, 9, lambda step: 0.1 if step < 4 else 1e-4)
    histories = [json.dumps(rows_of(exchange.policy)) for exchange in world.exchanges]
    assert histories[0] == histories[1]
    rows = world.exchanges[0].policy.history
    assert [(row.window, row.level) for row in rows if row.name == "w"] == [
        (0, LOW), (1, HIGH), (2, HIGH), (3, HIGH)]  # fmt: skip
    assert [row.reason for row in rows if row.name == "v"][:2] == ["displaced", "not displaced"]
    assert world.exchanges[1].levels()["w"] == "TopK(ratio=0.05)"


def test_the_rule() -> None:
    """The level is low above the bound, high below a third of it, and unchanged in between."""
    one = policy(window=1)
    one.bind(OWNER, ["w"])
    seen, lr = [], {"w": 0.5}
    for ratio in (1.0, 0.9, 1.1, 0.5, 0.3, 0.9, 1.1, 0.0, math.nan, math.inf):
        one.tick(lr)
        decide(one, {"w": ratio * BOUND / 0.5}, lr)
        seen.append(one.level("w"))
    assert seen == [LOW, LOW, LOW, LOW, HIGH, HIGH, LOW, HIGH, LOW, LOW]
    assert one.history[2].norm == pytest.approx(1.1 * BOUND)


def test_resumed_in_the_middle() -> None:
    one, two = policy(window=2), policy(window=2)
    for each in (one, two):
        each.bind(OWNER, ["w"])
    for step in range(9):
        if one.due({"w": 0.1}):
            decide(one, {"w": 0.01 * step}, {"w": 0.1})
        one.tick({"w": 0.1})
        two.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert json.dumps(two.state_dict()) == json.dumps(one.state_dict())
    assert len(two.history) == 4


def test_without_weights_there_is_a_sentence() -> None:
    world = simulate(policy(window=1), 2)
    gradients = [{"w": np.ones((48, 40), np.float32)} for _ in range(2)]
    world.step(gradients, 0.1)
    with pytest.raises(RuntimeError, match="weights: .* pass them to step"):
        world.step(gradients, 0.1)


def test_arguments() -> None:
    for options, match in (
        ({"bound": 0}, "bound is 0, but must be a number above 0"),
        ({"release": 2}, "release is 2, but must be"),
        ({"window": 0}, "window is 0"),
        ({"low": "topk"}, "must be a Compressor"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            policy(**options)
    assert repr(parse("displacement:PowerSGD(4),PowerSGD(1)")) == repr(
        Displacement(PowerSGD(4), PowerSGD(1))
    )
    assert Displacement(Dense(), TopK(0.1)).levels("w") == (Dense(), TopK(0.1))
