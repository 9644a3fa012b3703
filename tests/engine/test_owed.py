"""The law of what is owed: the mean of the ranks' residuals, which is owed to the mean gradient.

Whatever happens, the means that are applied and the mean residual add up to the mean gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case
from frameworks import NUMPY, exact_mean, local_size
from laws import several, step

from accordion_hvd import (
    DGC,
    EF21,
    QSGD,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    Int8,
    OneBit,
    PowerSGD,
    StepSchedule,
    TopK,
    TwoLevel,
    simulate,
)
from accordion_hvd.core.base import Compressor
from accordion_hvd.engine import checkpoint, layout
from accordion_hvd.engine.step import Step
from accordion_hvd.simulation.one_process import World

RANKS = 4
OWING = [
    case
    for case in CASES
    if case.feedback and case.compressor.scope == "tensor" and case.compressor != DGC(1.0)
] + [
    Case(DoubleSqueeze(TopK(0.1), QSGD(8)), None, feedback=True, unbiased=True),
    Case(DoubleSqueeze(QSGD(8), TopK(0.1)), None, feedback=True, unbiased=True),
    Case(DoubleSqueeze(TopK(0.1), Int8(32)), None, feedback=True),
    Case(TwoLevel(DoubleSqueeze(EFSignSGD())), None, feedback=True),
]
"""Cases with residuals that are exact up to rounding. (DGC(1.0) sends everything.)"""

LEVELS = [Dense(), TopK(0.3), EF21(TopK(1.0)), PowerSGD(1), DoubleSqueeze(OneBit())]


def world_of(compression: Any, ranks: int = RANKS) -> World:
    return simulate(compression, ranks, local_size=local_size(ranks))


def owed(world: World) -> np.ndarray:
    """Return the mean residual of tensor "v" over the ranks, in fp64."""
    rows = []
    for exchange in world.exchanges:
        (entry,) = [entry for entry in exchange.bucket_states if entry.bucket.name == "v"]
        residual = entry.residual(exchange.info(entry))
        empty = np.zeros(entry.bucket.shape)
        rows.append(empty if residual is None else np.asarray(residual, np.float64))
    return np.mean([row.reshape(40, 30) for row in rows], 0)


def trained(compression: Any, steps: int = 2) -> World:
    world = world_of(compression)
    for gradients in several(RANKS, steps):
        step(world, NUMPY, gradients)
    return world


def take(world: World, gradients: list[dict[str, Any]]) -> np.ndarray:
    """Take a step; return what the mean of "v" has paid beyond the mean gradient."""
    given = [mine["v"] for mine in gradients]
    mean = step(world, NUMPY, gradients)[0]["v"]
    return np.asarray(mean, np.float64) - exact_mean(given)


def changed_ranks(world: World, compressor: Compressor, ranks: int) -> World:
    """Return a world of another size that has loaded the states of this one."""
    other = world_of(compressor, ranks)
    step(other, NUMPY, several(ranks, 1, seed=7)[0])
    old = [checkpoint.expanded(x, checkpoint.describe(x)) for x in world.exchanges]
    for exchange in other.exchanges:
        exchange.replace_bucket_states([
            exchange.load_bucket_state(
                entry, checkpoint.merged(exchange, entry, [rows[number] for rows in old])
            )
            for number, entry in enumerate(exchange.bucket_states)
        ])  # fmt: skip
    return other


def after_a_skip(case: Case) -> tuple[np.ndarray, np.ndarray]:
    world = trained(case.compressor)
    before, bad = owed(world), several(RANKS, 1, seed=9)[0]
    bad[1]["v"][3, 3] = np.nan
    assert step(world, NUMPY, bad) == [None] * RANKS
    return before, owed(world)


def while_unused(case: Case) -> tuple[np.ndarray, np.ndarray]:
    world = trained(case.compressor)
    before = owed(world)
    unused = [mine | {"v": None} for mine in several(RANKS, 1, seed=9)[0]]
    assert step(world, NUMPY, unused)[0]["v"] is None
    return before, owed(world)


def after_resuming(case: Case) -> tuple[np.ndarray, np.ndarray]:
    world, other = trained(case.compressor), trained(case.compressor, steps=1)
    for mine, exchange in zip(world.exchanges, other.exchanges, strict=True):
        checkpoint.adopt(exchange, copy.deepcopy(checkpoint.snapshot(mine)))
    return owed(world), owed(other)


def on_fewer_ranks(case: Case) -> tuple[np.ndarray, np.ndarray]:
    world = trained(case.compressor)
    return owed(world), owed(changed_ranks(world, case.compressor, 1))


def on_more_ranks(case: Case) -> tuple[np.ndarray, np.ndarray]:
    world = trained(case.compressor)
    return owed(world), owed(changed_ranks(world, case.compressor, 6))


def after_switches(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return what is owed before switches to other levels and back, and after them with payments.

    A step at the new level adds its gradient, and pays a part.
    """
    wanted, found = [], []
    for level in LEVELS:
        schedule = StepSchedule({0: case.compressor, 2: level, 4: case.compressor}, window=1)
        world, paid = trained(schedule), np.zeros((40, 30))
        wanted.append(owed(world))
        for gradients in several(RANKS, 4, seed=5):
            paid = paid + take(world, gradients)
        found.append(owed(world) + paid)
    return np.stack(wanted), np.stack(found)


CHANGES: list[Callable[[Case], tuple[np.ndarray, np.ndarray]]] = [
    after_a_skip, while_unused, after_resuming, on_fewer_ranks, on_more_ranks, after_switches,
]  # fmt: skip


def check(change: Callable[[Case], tuple[np.ndarray, np.ndarray]], case: Case) -> None:
    before, after = change(case)
    assert np.abs(before).max() > 2e-3
    np.testing.assert_allclose(after, before, rtol=2e-5, atol=1e-5)


def pays_exactly(case: Case) -> bool:
    """Return whether means and residuals of the case's compressor add up to the gradients."""
    return not (case.momentum or case.unbiased or case.compressor.output == "update")


@pytest.mark.parametrize(
    ("change", "case"),
    [
        pytest.param(change, case, id=f"{change.__name__}-{case.name}")
        for change in CHANGES
        for case in OWING
        if change is not after_switches or pays_exactly(case)
    ],
)
def test_what_is_owed_stays_owed(change: Any, case: Case) -> None:
    check(change, case)


def _sums(self: Any, states: Any, spec: Any, info: Any) -> Any:
    return {key: sum(state[key] for state in states) / info.size for key in states[0]}


FAULTS: list[tuple[Any, Any, str, Any]] = [
    (after_a_skip, Step, "take_back", lambda self: None),
    (while_unused, layout.Batch, "_chosen", lambda self, old, new, absent: new),
    (after_resuming, layout.BucketState, "load", lambda self, saved, info: None),
    (on_fewer_ranks, Compressor, "rescale", _sums),
    (on_more_ranks, Compressor, "rescale", _sums),
    (after_switches, layout.BucketState, "_take_residual", lambda self, state, *more: state),
]


@pytest.mark.parametrize(("change", "owner", "name", "fault"), FAULTS)
def test_faults_break_the_law(
    change: Any, owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in OWING if case.compressor == TopK(0.1))
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        check(change, case)
