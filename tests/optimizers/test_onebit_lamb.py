"""Tests of the ratios of LAMB and 1-bit LAMB, which each tensor has of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import laws
import numpy as np
import pytest
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, combined
from rules import LambOracle, OnebitOracle

from accordion_hvd import simulate
from accordion_hvd.core.base import Info
from accordion_hvd.core.running import drive
from accordion_hvd.optimizers import Lamb, OnebitAdam, OnebitLamb
from accordion_hvd.simulation.one_process import World

SHAPES = {"w": (27, 43), "v": (27, 43), "bias": (27,), "norm": (5, 2), "scale": (1,)}
"""Two that are compressed, in one call, and three that are packed into one vector."""


def draw(rng: Any, ranks: int) -> list[dict[str, np.ndarray]]:
    return [
        {k: rng.normal(size=s) * (i + 1) for i, (k, s) in enumerate(SHAPES.items())}
        for _ in range(ranks)
    ]


def decaying(world: World, framework: Framework, like: dict[str, Any], decay: Any) -> None:
    world._build({k: framework.tensor(x) for k, x in like.items()})
    for exchange in world.exchanges:
        exchange.hyper = {"": {"weight_decay": decay}}


@pytest.mark.parametrize("decay", [0.0, 0.5, None])
@pytest.mark.parametrize(
    "framework, ranks", combined({NUMPY: (1, 3), TORCH: (2,), TENSORFLOW: (2,)})
)
def test_each_tensor_has_ratios_of_its_own(framework: Framework, ranks: int, decay: Any) -> None:
    """Stacked and packed tensors follow an oracle for each tensor, also with weight decay."""
    world, rng = simulate(OnebitLamb(warmup_steps=4), ranks), np.random.default_rng(1)
    told: dict[str, Any] = {"decay": decay or 0.0}
    oracles = {
        k: LambOracle(ranks, int(np.prod(s)), dense=4 if k in "wv" else 99, **told)
        for k, s in SHAPES.items()
    }
    for step in range(9):
        now, lr = draw(rng, ranks), 0.1 / (1 + step // 4)
        if not step:
            decaying(world, framework, now[0], decay)
        read = laws.weights_of(world, now)
        if not step:
            for mine in read:
                mine["bias"][:] = 0.0  # a norm of 0: its ratio is 1, and not recorded
        for name, oracle in oracles.items():
            oracle.weights = np.array([mine[name].reshape(-1) for mine in read])
        found = laws.step(world, framework, now, lr)
        for name, oracle in oracles.items():
            wanted = oracle.step(np.array([mine[name].reshape(-1) for mine in now]), lr)
            for mine in found:
                assert mine is not None
                ours = mine[name].reshape(-1)
                np.testing.assert_allclose(ours, wanted, atol=1e-9 * np.abs(wanted).max())
    assert oracles["w"].last != 1.0 and oracles["w"].k != oracles["v"].k


def test_a_ratio_of_one_is_not_recorded() -> None:
    """Ratios above and below 1 enter k with the same rate; one of exactly 1 does not enter it."""
    rule = Lamb(coeff_beta=0.75, min_coeff=0.1, max_coeff=10.0)
    for size, ratio in ((0.0, 1.0), (4.0, 4.0), (0.5, 0.5)):
        weights = np.full(1200, size)
        state = rule.init(NUMPY.xp.spec(weights), Info(parameter=weights))
        gradient = np.ones(1200)  # whose direction is 1 everywhere, in the first step of Adam
        _, state = rule.update(gradient, state, Info(parameter=weights, lr=0.1))
        recorded = 0.25 * (ratio != 1)
        np.testing.assert_allclose(state["weight"], recorded)
        np.testing.assert_allclose(state["coeff"], recorded * ratio, rtol=1e-6)


def test_the_factor_is_bounded_and_changes_slowly() -> None:
    """If gradients vanish after the switch, r rises by a tenth a step, up to its bound."""
    rule = OnebitLamb((0.5, 0.5), warmup_steps=3, factor_max=2.0)
    world, rng, factors = simulate(rule, 2), np.random.default_rng(0), []
    for step in range(20):
        size = 1.0 if step < 3 else 1e-3
        laws.step(world, NUMPY, [{"w": size * rng.normal(size=(32, 40))} for _ in range(2)])
        state = world.exchanges[0].bucket_states[0].state
        factors.append(float(state["factor"][0]) if "factor" in state else 1.0)
    changes = np.array(factors[1:]) / np.array(factors[:-1])
    assert changes.max() <= 1.1 + 1e-12 and max(factors) == pytest.approx(2.0)
    frozen = np.array(factors[3:8])
    np.testing.assert_allclose(frozen, 1.1 ** np.arange(1, 6), rtol=0.11)


def test_groups_may_have_bounds_of_their_own() -> None:
    """A parameter group's `max_coeff` bounds the ratio of its tensors, as in the tutorial."""
    rng = np.random.default_rng(0)
    gradient, weights = rng.normal(size=(2, 32, 40))
    state = Lamb().init(NUMPY.xp.spec(gradient), Info())
    told = Info(parameter=weights * 100, hyper={"max_coeff": 0.3})
    for info, wanted in ((told, 0.3), (replace(told, hyper={}), 10.0)):
        exchange = Lamb().exchange(gradient.copy(), {k: x.copy() for k, x in state.items()}, info)
        result, _ = drive(exchange, lambda requests: [request.tensor for request in requests])
        np.testing.assert_allclose(np.abs(result), wanted, rtol=1e-4)


def test_variance_begins_anew_with_each_second_stage() -> None:
    """A second stage begins with v~ = v and r = 1."""
    rule, spec = OnebitLamb(), NUMPY.xp.spec(np.zeros((32, 40)))
    rng = np.random.default_rng(0)
    dense = {k: rng.normal(size=x.shape) for k, x in rule.dense().init(spec, Info()).items()}
    state = rule.warm_start(rule.init(spec, Info()), rule.dense(), dense)
    assert np.array_equal(state["fresh"], dense["v"]) and state["fresh"] is not dense["v"]
    assert state["factor"] == 1 and state["since"] == 0
    for key in ("m", "v", "count", "coeff", "weight"):
        assert np.array_equal(state[key], dense[key])


def test_it_is_a_variant_of_1_bit_adam() -> None:
    """The momenta and errors are those of 1-bit Adam's oracle; steps differ by one factor.

    The factor is the ratio c r of the tensor, after v is frozen.
    """
    size, dense = 32 * 40, 2
    adam, lamb = (
        simulate(OnebitAdam(warmup_steps=dense), 3),
        simulate(OnebitLamb(warmup_steps=dense), 3),
    )
    oracle, rng, factors = OnebitOracle(3, size, dense=dense), np.random.default_rng(0), []
    for step in range(8):
        now = rng.normal(size=(3, 32, 40))
        plain, scaled = (
            laws.step(world, NUMPY, [{"w": x.copy()} for x in now])[0] for world in (adam, lamb)
        )
        wanted = oracle.step(now.reshape(3, -1), 0.1).reshape(32, 40)
        assert plain is not None and scaled is not None
        np.testing.assert_allclose(plain["w"], wanted, atol=1e-10)
        if step >= dense:
            ratios = scaled["w"] / wanted
            np.testing.assert_allclose(ratios, ratios.mean(), rtol=1e-8)
            factors.append(ratios.mean())
    states = [exchange.bucket_states[0].state for exchange in lamb.exchanges]
    for rank, state in enumerate(states):
        np.testing.assert_allclose(state["m"], oracle.m, atol=1e-12)
        np.testing.assert_allclose(state["v"], oracle.v, atol=1e-12)
        np.testing.assert_allclose(state["error"], oracle.workers[rank], atol=1e-12)
    servers = np.concatenate([state["server"] for state in states])[:size]
    np.testing.assert_allclose(servers, oracle.servers, atol=1e-12)
    assert np.abs(np.array(factors) - 1).min() > 1e-3, "the ratio must matter"
    sent = [world.exchanges[0].stats()["sent"] for world in (adam, lamb)]
    assert sent[0] == sent[1]
