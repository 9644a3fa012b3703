"""Tests of 0/1 Adam: its schedules, and local steps of ranks between synchronisations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import laws
import numpy as np
import pytest
import rules
from frameworks import NUMPY, POISONED, TENSORFLOW, TORCH, Framework, combined
from rules import ZeroOneOracle

from accordion_hvd import Accordion, StepSchedule, simulate
from accordion_hvd.core.base import Info
from accordion_hvd.optimizers import Adam, ZeroOneAdam
from accordion_hvd.optimizers.zero_one_adam import EXACT, FIRST, LOCAL, SIGNS, SYNC
from accordion_hvd.simulation.one_process import World

SHAPE, SIZE = (27, 43), 27 * 43
SHORT = ZeroOneAdam(
    var_freeze_step=9, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4
)
"""All phases within 30 steps."""


def oracle_of(rule: ZeroOneAdam, ranks: int, decay: float = 0.0) -> ZeroOneOracle:
    return ZeroOneOracle(
        ranks, SIZE, correct=rule.bias_correction, decay=decay, freeze=rule.var_freeze_step,
        kappa=rule.var_update_scaler, scaler=rule.local_step_scaler,
        clipper=rule.local_step_clipper, scale=rule.scale,
    )  # fmt: skip


def gradients_of(ranks: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, ranks, *SHAPE))


def take(world: World, framework: Framework, now: np.ndarray, lr: float, decay: float) -> Any:
    """Take a step; return each rank's new weights, or None if the step is taken back."""
    given = [{"w": g} for g in now]
    if not world.exchanges:
        world._build({"w": framework.tensor(now[0])})
        for exchange in world.exchanges:
            exchange.hyper = {"": {"weight_decay": decay}}
    found = laws.step(world, framework, given, lr)
    return None if found[0] is None else np.array([mine["w"].reshape(-1) for mine in found])


def weights_now(world: World, now: np.ndarray) -> np.ndarray:
    read = laws.weights_of(world, [{"w": g} for g in now])
    return np.array([mine["w"].reshape(-1) for mine in read])


@pytest.mark.parametrize(
    "framework, ranks", combined({NUMPY: (1, 3), POISONED: (2,), TORCH: (3,), TENSORFLOW: (2,)})
)
@pytest.mark.parametrize("correct", [True, False])
def test_follows_the_paper_through_all_phases(
    framework: Framework, ranks: int, correct: bool
) -> None:
    """Each rank's weights follow the oracle, with weight decay and falling learning rates."""
    rule, decay = replace(SHORT, bias_correction=correct), 0.1
    world, oracle = simulate(rule, ranks), oracle_of(rule, ranks, decay)
    for step, now in enumerate(gradients_of(ranks, 32)):
        oracle.weights = weights_now(world, now)
        lr = 0.01 / (1 + step // 12)
        wanted = oracle.step(now.reshape(ranks, -1), lr)
        found = take(world, framework, now, lr, decay)
        np.testing.assert_allclose(found, wanted, atol=1e-10)
        alike = all(np.array_equal(mine, found[0]) for mine in found)
        assert alike == (rule.synchronous(step + 1) or ranks == 1), "replicas"
    names = {EXACT: "exact", SIGNS: "signs", LOCAL: "local", SYNC: "sync", FIRST: "sync"}
    assert oracle.log == [names[rule.variant(step)] for step in range(32)]
    assert set(oracle.log) == set(names.values())


def test_schedules() -> None:
    """Phases are those found by hand, and those of the reference's counters at their real sizes."""
    rule = ZeroOneAdam(
        var_freeze_step=20, var_update_scaler=3, local_step_scaler=4, local_step_clipper=3
    )
    phases = [rule.variant(step) for step in range(40)]
    exact = [step + 1 for step in range(20) if phases[step] == EXACT]
    assert exact == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert set(phases[:20]) == {EXACT, SIGNS}
    sync = [step - 19 for step in range(20, 40) if phases[step] != LOCAL]
    assert sync == [1, 2, 3, 4, 6, 8, 9, 12, 15, 18] and phases[20] == FIRST
    assert [rule.synchronous(20 + k) for k in (1, 5, 6, 7)] == [True, False, True, False]

    rule = ZeroOneAdam(var_freeze_step=3000, local_step_scaler=500)
    interval, updates, local, counter = 1, 0, 1, 0
    for number in range(1, 6001):
        phase = rule.variant(number - 1)
        if number <= 3000:
            due = number % interval == 0
            updates += due
            if updates == 16:
                updates, interval = 0, 2 * interval
            assert phase == (EXACT if due else SIGNS)
            continue
        due = (number - 3000) % local == 0
        counter += 1
        if counter == 500:
            counter, local = 0, min(2 * local, 16)
        assert (phase != LOCAL) == due
    assert rule.variant(10**12) in (LOCAL, SYNC)


def test_ranks_get_the_average_of_what_they_have_become() -> None:
    """A synchronisation returns the mean of the ranks' own weights, up to the residuals.

    The weights include the weight decay of the steps between synchronisations.
    """
    ranks, decay, lr = 3, 0.3, 0.01
    world = simulate(SHORT, ranks)
    for step, now in enumerate(gradients_of(ranks, 40)):
        before = [
            exchange.bucket_states[0].state
            for exchange in world.exchanges
            if exchange.bucket_states
        ]
        if step < 10 or not SHORT.synchronous(step + 1):
            take(world, NUMPY, now, lr, decay)
            continue
        before = [{k: v.copy() for k, v in state.items()} for state in before]
        old = weights_now(world, now)
        found = take(world, NUMPY, now, lr, decay)[0]
        state = world.exchanges[0].bucket_states[0].state
        first, second = (1 / (1 - b**n) for b, n in zip((0.9, 0.999), state["count"], strict=True))
        root = np.sqrt(state["v"] * second) + 1e-8
        m = np.array([0.9 * s["m"] for s in before]) + 0.1 * now.reshape(ranks, -1)
        alone = (1 - lr * decay) * old - lr * first * m / root
        after = [exchange.bucket_states[0].state for exchange in world.exchanges]
        carried = owes(after) - owes(before)
        np.testing.assert_allclose(found - carried / root, alone.mean(0), atol=1e-12)


def owes(states: list[Any]) -> np.ndarray:
    """Return the ranks' mean residual plus the servers' residuals."""
    server = np.concatenate([state["server"] for state in states])[:SIZE]
    return np.mean([state["error"] for state in states], 0) + server


def test_alone_it_is_adam() -> None:
    """One rank takes the steps of AdamW, and of AdamW with a constant v once v is frozen."""
    rule = ZeroOneAdam(var_freeze_step=16, local_step_scaler=2)
    world, oracle = simulate(rule, 1), rules.AdamOracle(1, SIZE)
    x = None
    for step, now in enumerate(gradients_of(1, 30)):
        x = weights_now(world, now)[0] if x is None else x
        flat = now.reshape(1, -1)
        if step < 16:
            u = oracle.step(flat, 0.01)
        else:
            oracle.steps += 1
            oracle.m = 0.9 * oracle.m + 0.1 * flat[0]
            u = oracle.direction(oracle.v)
        x = (1 - 0.01 * 0.2) * x - 0.01 * u
        np.testing.assert_allclose(take(world, NUMPY, now, 0.01, 0.2)[0], x, atol=1e-12)


def test_bytes_of_each_phase() -> None:
    ranks, flags = 4, 8
    world = simulate(SHORT, ranks)
    signs = sum(moved for _, moved in rules.signs_rounds(SIZE, ranks, 8))
    costs = {EXACT: 8 * SIZE, SIGNS: signs, LOCAL: 0, SYNC: signs, FIRST: signs}
    payload = 0
    for step, now in enumerate(gradients_of(ranks, 30)):
        take(world, NUMPY, now, 0.01, 0.0)
        payload += flags + costs[SHORT.variant(step)]
        assert world.exchanges[1].stats()["payload"] == payload


def test_bad_steps_change_nothing_and_do_not_count() -> None:
    """In each phase, a bad step is taken back, and the next step is as if it had not been."""
    world, twin = simulate(SHORT, 2), simulate(SHORT, 2)
    for step, now in enumerate(gradients_of(2, 30)):
        wanted = take(twin, NUMPY, now, 0.01, 0.1)
        bad = now.copy()
        bad[step % 2, 3, 3] = np.inf
        assert step == 0 or take(world, NUMPY, bad, 0.01, 0.1) is None
        found = take(world, NUMPY, now, 0.01, 0.1)
        assert np.mean(np.abs(found - wanted) > 1e-7) < 0.001


@pytest.mark.parametrize("old, new", [(3, 2), (2, 4), (1, 3), (4, 1)])
def test_another_number_of_ranks_goes_on_between_synchronisations(old: int, new: int) -> None:
    """New ranks get the mean m and u of the old ranks, and the common anchor.

    Their residuals together are those of the old ranks and servers.
    """
    steps = next(n for n in range(15, 40) if not SHORT.synchronous(n) and n > 15)
    world = simulate(SHORT, old)
    for now in gradients_of(old, steps):
        take(world, NUMPY, now, 0.01, 0.0)
    states = [exchange.bucket_states[0].state for exchange in world.exchanges]
    spec = NUMPY.xp.spec(np.zeros(SHAPE))
    made = [SHORT.rescale(states, spec, Info(rank=rank, size=new)) for rank in range(new)]
    for key in ("m", "u"):
        for mine in made:
            np.testing.assert_allclose(mine[key], np.mean([s[key] for s in states], 0))
    now = owes(made) if new > 1 else made[0]["error"]
    np.testing.assert_allclose(now, owes(states), atol=1e-15)
    assert all(np.array_equal(mine["anchor"], states[0]["anchor"]) for mine in made)


def test_it_takes_no_turns() -> None:
    for policy in (
        lambda: Accordion(low=Adam(), high=SHORT, window=1),
        lambda: StepSchedule({0: Adam(), 5: SHORT}, window=1),
    ):
        with pytest.raises(ValueError, match="cannot alternate with other levels"):
            policy()
