"""Tests of the automatic end of an optimizer's dense stage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decisions import decide
from frameworks import TENSORFLOW, TORCH, Framework, parameters

from accordion_hvd import simulate
from accordion_hvd.optimizers import Adam, OnebitAdam
from accordion_hvd.policies.fixed import LOOKS, STABLE, WarmUp
from accordion_hvd.simulation.one_process import World

BETAS = (0.9, 0.98)
SPAN, EVERY = 50, 5
"""Of these: D = 1 / (1 - b2), and steps between looks."""


def policy(steps: Any = "auto") -> WarmUp:
    made = WarmUp(Adam(BETAS), OnebitAdam(BETAS), steps)
    made.current = {"a": made.start("a"), "b": made.start("b")}
    return made


def turn(one: WarmUp, total: float, lr: float) -> bool:
    """Take a step that begins with this sum of v; return whether the first stage is over."""
    rates = {"a": 0.5, "b": lr}
    if one.due(rates):
        decide(one, {"a": total / 4, "b": 3 * total / 4}, rates)
    one.tick(rates)
    return one.level("a") == one.level("b") == 1


def ends(
    sums: Callable[[int], float], lr: Callable[[int], float] = lambda step: 0.1, steps: int = 600
) -> int | None:
    """Return the number of steps after which the first stage ends, or None if it does not."""
    one = policy()
    return next((n for n in range(steps) if turn(one, sums(n), lr(n))), None)


def test_a_variance_that_is_stable_ends_it() -> None:
    assert ends(lambda n: 3.0) == 2 * SPAN
    assert ends(lambda n: 3.0 * STABLE ** (0.99 * n / SPAN)) == 2 * SPAN
    assert ends(lambda n: 3.0 * STABLE ** (-0.99 * n / SPAN)) == 2 * SPAN
    assert ends(lambda n: 3.0 * STABLE ** (-1.01 * n / SPAN)) is None


def test_a_variance_that_fills_up_does_not_end_it_early() -> None:
    """With steady gradients, the first stage ends once D steps change v by at most 4 %.

    Their v is proportional to 1 - b2^t.
    """

    def variance(n: int) -> float:
        return 1 - BETAS[1] ** n

    looks = range(2 * SPAN, 600, EVERY)
    wanted = next(n for n in looks if variance(n - SPAN) / variance(n) >= STABLE)
    assert ends(variance) == wanted > 3 * SPAN


def test_a_variance_that_falls_does_not_end_it() -> None:
    """The first stage does not end while v falls.

    The paper's condition, v D steps ago over v now, would be met at once.
    """

    def falling(n: int) -> float:
        return math.exp(-n / 300)

    assert falling(2 * SPAN - SPAN) / falling(2 * SPAN) >= STABLE
    assert ends(falling) is None
    looks = range(300, 400, EVERY)
    wanted = next(n for n in looks if falling(300) / falling(n - SPAN) >= STABLE)
    assert ends(lambda n: max(falling(n), falling(300))) == wanted < 300 + SPAN


def test_no_variance_does_not_end_it() -> None:
    assert ends(lambda n: 0.0) is None


@pytest.mark.parametrize("peak", [60, 300])
def test_a_rising_learning_rate_delays_it(peak: int) -> None:
    """The stage does not end until the rate has not risen for D steps; falls do not matter."""
    wanted = max(2 * SPAN, peak + SPAN)
    assert ends(lambda n: 3.0, lambda n: min(n, peak) / peak) == wanted
    assert ends(lambda n: 3.0, lambda n: min(n, peak) / peak * 0.99 ** max(0, n - peak)) <= wanted
    assert ends(lambda n: 3.0, lambda n: 0.99**n) == 2 * SPAN


def test_by_the_clock() -> None:
    one = policy(7)
    assert [turn(one, 1.0, 0.1) for _ in range(12)] == 7 * [False] + 5 * [True]
    assert all(policy(0).start(name) == 1 for name in "ab")


def test_state_goes_through_a_checkpoint() -> None:
    """A stage that is saved and resumed at any step ends at the same step."""
    wanted = ends(lambda n: 3.0 + min(n, 70))
    assert wanted is not None and wanted > 2 * SPAN
    for cut in (1, 49, 50, 51, 98, wanted - 1, wanted + 3):
        first, second = policy(), policy()
        for n in range(cut):
            turn(first, 3.0 + min(n, 70), 0.1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.state_dict() == first.state_dict()
        over = [turn(second, 3.0 + min(n, 70), 0.1) for n in range(cut, wanted + 20)]
        assert over.index(True) + cut == max(wanted, cut)


def train(world: World, framework: Framework, steps: range, tensors: int = 2) -> list[set[Any]]:
    """Train; return the set of levels of all ranks' tensors after each step."""
    found = []
    for step in steps:
        rng = np.random.default_rng(step)
        draws = [
            {f"w{i}": rng.normal(size=(32, 40)).astype(np.float32) for i in range(tensors)}
            for _ in world._policies
        ]
        world.step([{k: framework.tensor(x) for k, x in mine.items()} for mine in draws], lr=0.1)
        found.append(
            {entry.level for exchange in world.exchanges for entry in exchange.bucket_states}
        )
    return found


@pytest.mark.parametrize("framework", parameters())
def test_all_ranks_and_tensors_change_at_once(framework: Framework) -> None:
    """All ranks switch when rank 0 decides, although another rank has a different variance."""
    steps = 70 if framework in (TORCH, TENSORFLOW) else 140
    betas, span = ((0.5, 0.95), 20) if steps == 70 else ((0.5, 0.98), SPAN)
    world = simulate(OnebitAdam(betas, warmup_steps="auto"), 3)
    early = train(world, framework, range(span))
    for entry in world.exchanges[2].bucket_states:
        entry.stored = {**entry.state, "v": entry.state["v"] * 1.5}
    levels = early + train(world, framework, range(span, 6 * span))
    assert all(len(now) == 1 for now in levels)
    flat = [now.pop() for now in levels]
    change = flat.index(1)
    assert flat == change * [0] + (len(flat) - change) * [1] and change >= 2 * span
    assert change % (span // LOOKS) == 0
    states = [exchange.policy.state_dict() for exchange in world.exchanges]
    assert states[0] == states[1] == states[2]
    assert states[0]["history"][-1]["reason"] == "variance stable"


@pytest.mark.parametrize("bad", [-1, 1.5, "soon", None, True])
def test_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="steps is"):
        policy(bad)
