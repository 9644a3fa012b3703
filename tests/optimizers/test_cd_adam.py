"""Tests of CD-Adam: replicas of ranks and servers, contraction, convergence and stages."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import laws
import numpy as np
import pytest
from cases import CASES
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, Ranks, installed, parameters, same_bits
from rules import AdamOracle, CDOracle, SlowOracle, signed

from accordion_hvd import (
    DGC,
    FP16,
    Allreduce,
    Compressor,
    EFSignSGD,
    Info,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    StepSchedule,
    Threshold,
    TopK,
    compressors,
    namespace,
    optimizers,
    simulate,
)
from accordion_hvd.optimizers import AMSGrad, CDAdam
from accordion_hvd.simulation.one_process import World

SHAPE = (9, 11)
OURS = (TopK(0.1), RandomK(0.2), PowerSGD(1), OneBit(), Int8(32), EFSignSGD())
FOUND = {type(case.compressor): case.compressor for case in reversed(CASES)}
NEW = [kind for kind in FOUND if kind.contractive is True and kind not in map(type, OURS)]
INNER = (*OURS, *(FOUND[kind] for kind in NEW))


@dataclass(frozen=True)
class Whole(Compressor):
    """Compressor that sends everything, so that the residual is zero.

    It computes in fp64, so that only the optimizer's own rounding is left.
    """

    contractive: ClassVar[bool] = True

    def init(self, spec: Any, info: Info) -> Any:
        return {"error": spec.zeros((spec.size,), spec.wide)}

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        xp = namespace(grad)
        total = xp.accumulate(state["error"], xp.reshape(grad, xp.shape(state["error"])))
        mean = yield Allreduce(total)
        return xp.reshape(mean, xp.shape(grad)), {"error": total - total}


class Told(Ranks):
    """Ranks whose rule is given weights and the settings of a parameter group."""

    weights: Any = None
    hyper: dict[str, Any] = {}

    def info(self, rank: int, step: Any = None) -> Info:
        info = super().info(rank, step)
        return dataclasses.replace(info, parameter=self.weights, hyper=self.hyper)


def gradients_of(
    ranks: int, steps: int, shape: Sequence[int] = SHAPE, seed: int = 0, dtype: str = "float64"
) -> list[list[np.ndarray]]:
    drawn = np.random.default_rng(seed).normal(size=(steps, ranks, *shape))
    return [list(now) for now in drawn.astype(dtype)]


def held(world: Ranks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ranks' mean replica, the servers' replica of that mean, and the estimate."""
    states = [{k: world.framework.array(x) for k, x in s.items()} for s in world.states]
    estimate = states[0]["estimate"]
    for state in states:
        assert same_bits(state["estimate"], estimate), "ranks hold different estimates"
    slow = "replica" in states[0]
    replicas = [s["replica"] if slow else -s["error"].reshape(-1) for s in states]
    mean, lacks = np.mean(np.array(replicas, np.float64), 0), np.zeros_like(estimate)
    if "server" in states[0]:
        parts = [s["behind" if slow else "server"] for s in states]
        lacks = np.concatenate(parts)[: estimate.size]
    return mean, estimate + lacks, estimate


# ---------------------------------------------------------------------------------------- replicas
@pytest.mark.seldom(tensorflow=lambda ranks: ranks != 3)
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("replica_lr", [1, 0.3])
def test_the_server_knows_the_mean_of_the_replicas(
    framework: Framework, ranks: int, replica_lr: float
) -> None:
    world = Ranks(CDAdam(replica_lr=replica_lr), ranks, framework)
    for now in gradients_of(ranks, 12):
        world.step([g * 10.0**rank for rank, g in enumerate(now)])
        mean, known, _ = held(world)
        np.testing.assert_allclose(known, mean, atol=1e-12 * 10.0**ranks)


@pytest.mark.seldom(tensorflow=lambda preconditioned, bits: not preconditioned or bits in (1, 2))
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 1.5, 0.5])
def test_with_slow_replicas_steps_lack_only_what_is_owed(
    framework: Framework, bits: float, preconditioned: bool
) -> None:
    """The sum of all m plus the residuals of ranks and servers is the sum of mean gradients."""
    rule = CDAdam(betas=(0.0, 0.99), bits=bits, preconditioned=preconditioned, replica_lr=0.2)
    world, lacks = simulate(rule, 3), np.zeros((27, 43))
    for now in gradients_of(3, 9, (27, 43)):
        laws.step(world, framework, [{"w": g} for g in now])
        states = [
            {k: framework.array(x) for k, x in exchange.bucket_states[0].state.items()}
            for exchange in world.exchanges
        ]
        lacks += np.mean(now, 0) - states[0]["m"].reshape(lacks.shape)  # steps use m
        carried = np.mean([s["error"] for s in states], 0)
        carried += np.concatenate([s["server"] for s in states])[: carried.size]
        np.testing.assert_allclose(carried.reshape(lacks.shape), lacks, atol=1e-10)
    assert np.abs(lacks).max() > 0.01, "something must have been owed"


@pytest.mark.seldom(tensorflow=lambda inner: inner not in OURS[:3])
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_the_estimate_is_the_mean_of_the_replicas(framework: Framework, inner: Compressor) -> None:
    """With an inner compressor, all ranks get the mean of messages without further compression."""
    world = Ranks(CDAdam(compressor=inner), 3, framework)
    for now in gradients_of(3, 8, dtype="float32"):
        world.step(now)
        mean, _, estimate = held(world)
        np.testing.assert_allclose(estimate, mean, atol=2e-5)


def test_replicas_are_kept_in_fp32_where_gradients_are_halves() -> None:
    world = Ranks(CDAdam(), 2)
    for now in gradients_of(2, 8, dtype="float16"):
        world.step(now, "float16")
        mean, known, _ = held(world)
        np.testing.assert_allclose(known, mean, atol=2e-6)


def test_no_state_is_the_gradient_s_memory() -> None:
    for rule in (CDAdam(), CDAdam(replica_lr=0.5), CDAdam(compressor=TopK(0.1))):
        world = Ranks(rule, 2, NUMPY)
        for now in gradients_of(2, 3, dtype="float32"):
            world.states = world.states or world.init(now[0])
            results = world.exchange(now, world.states)
            world.states = [state for _, state in results]
            world.steps += 1
            for grad, state in zip(now, world.states, strict=True):
                assert not any(np.shares_memory(grad, x) for x in state.values())


# -------------------------------------------------------------------------- what a contraction does
def lost(rule: CDAdam, target: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """Return the relative distance of replicas from constant gradients: shape (steps, ranks)."""
    world, found = Ranks(rule, len(target)), []
    for _ in range(steps):
        world.step([g.copy() for g in target])
        off = [
            s["error"].reshape(-1) + g.reshape(-1)
            for s, g in zip(world.states, target, strict=True)
        ]
        sizes = [np.linalg.norm(g) for g in target]
        found.append([np.linalg.norm(x) / size for x, size in zip(off, sizes, strict=True)])
    return np.array(found)


def test_signs_of_what_is_missing_approach_it() -> None:
    """Each message brings a replica closer to a constant gradient.

    The first one leaves 1 - |g|_1^2 / (d |g|^2) of the squared distance.
    """
    target = gradients_of(8, 1, (100,))[0]
    found = lost(CDAdam(), target, 50)
    told = [np.abs(g).sum() ** 2 / (g.size * (g**2).sum()) for g in target]
    np.testing.assert_allclose(found[0], np.sqrt(1 - np.array(told)), rtol=1e-9)
    np.testing.assert_allclose(found[[0, 9, 49], 0], [0.567, 0.061, 0.014], atol=5e-4)
    assert (np.diff(found, axis=0) < 0).all(), "each message must bring replicas closer"


def test_a_second_bit_leaves_an_eighth_of_the_square_of_normal_numbers() -> None:
    """One bit leaves 1 - 2 / pi of the square, two about the least of four values (Max, 1960)."""
    target = gradients_of(4, 1, (100, 1000))[0]
    for bits, left in ((1, 1 - 2 / np.pi), (2, 0.1175)):
        found = lost(CDAdam(bits=bits), target, 1)[0] ** 2
        np.testing.assert_allclose(found, left, rtol=0.02)


@pytest.mark.parametrize("kind", ["constant", "sparse", "heavy", "zero"])
def test_two_bits_contract_whatever_they_tell(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = {
        "constant": np.full(1161, -0.3), "sparse": np.where(rng.random(1161) < 0.01, 1.0, 0.0),
        "heavy": rng.standard_t(1.5, size=1161), "zero": np.zeros(1161),
    }[kind]  # fmt: skip
    world = Ranks(CDAdam(bits=2), 2)
    world.step([x.copy(), x.copy()])
    left = [np.linalg.norm(s["error"].reshape(-1) + x) for s in world.states]
    assert left[0] == left[1] <= 0.99 * np.linalg.norm(x)


def test_top_k_tells_all_of_a_steady_gradient_in_time() -> None:
    target = gradients_of(2, 1, (100,), dtype="float32")[0]
    found = lost(CDAdam(compressor=TopK(0.05)), target, 20)
    assert (found[18] > 1e-3).all() and (found[19] < 1e-6).all()


def test_contractive_compressors_say_so() -> None:
    known = [getattr(compressors, name) for name in compressors.__all__]
    assert {kind for kind in known if kind.contractive is True} == {type(x) for x in INNER}
    assert compressors.ErrorFeedback(TopK(0.1)).contractive
    assert not compressors.ErrorFeedback(compressors.Natural()).contractive


@pytest.mark.parametrize("inner", [*INNER, PowerSGD(3), TopK(0.01, "float16")], ids=repr)
def test_what_contracts_is_a_contraction(inner: Compressor) -> None:
    """On one rank, the residual is shorter than the sum of gradient and old residual.

    It depends on that sum alone, not on the parts.
    """
    rng = np.random.default_rng(1)
    sparse = np.where(rng.random(SHAPE) < 0.05, rng.normal(size=SHAPE), 0)
    for kind, x in {
        "normal": rng.normal(size=SHAPE), "heavy": rng.standard_t(1.5, size=SHAPE),
        "sparse": sparse, "constant": np.full(SHAPE, 0.3), "small": rng.normal(size=SHAPE) * 1e-6,
    }.items():  # fmt: skip
        x, ratios = x.astype(np.float32), []
        for trial in range(4):
            kept = []
            for carried in (np.zeros_like(x), x * np.float32(0.25), x):
                world = Ranks(inner, 1, name=f"w{trial}")
                state = world.init(x)[0]
                world.states = [inner.with_residual(state, carried.reshape(-1).copy())]
                world.step([x - carried])
                kept.append(world.residuals()[0])
            scale = np.abs(x).max()
            for other in kept[1:]:
                np.testing.assert_allclose(other, kept[0], atol=1e-5 * scale)
            ratios.append((kept[0] ** 2).sum() / (x**2).sum())
        assert max(ratios) <= 1 + 1e-6, kind
        assert np.mean(ratios) < 0.999, kind


def test_threshold_is_none() -> None:
    """Threshold sends no element below its value, so it does not contract (negative control)."""
    world = Ranks(Threshold(1.0), 1)
    x = np.full(SHAPE, 0.3, np.float32)
    world.step([x])
    carried = world.residuals()[0]
    assert carried is not None and np.array_equal(carried, x.reshape(-1))


# -------------------------------------------------------------------------------------- convergence
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_without_loss_it_is_amsgrad(ranks: int) -> None:
    """Steps equal AMSGrad's bit for bit, except for the rounding of means on 3 ranks."""
    ours = Ranks(CDAdam(compressor=Whole()), ranks)
    theirs = Ranks(AMSGrad((0.9, 0.99)), ranks)
    for now in gradients_of(ranks, 10):
        dyadic = [np.round(g * 1024) / 1024 for g in now]
        mine, wanted = ours.step(dyadic)[0], theirs.step(dyadic)[0]
        if ranks == 3:
            np.testing.assert_allclose(mine, wanted, atol=1e-10)
        else:
            assert same_bits(mine, wanted)


def test_one_rank_is_amsgrad() -> None:
    for rule in (CDAdam(), CDAdam(compressor=TopK(0.01))):
        ours, theirs = Ranks(rule, 1), Ranks(AMSGrad((0.9, 0.99)), 1)
        for now in gradients_of(1, 5, dtype="float32"):
            assert same_bits(ours.step(now)[0], theirs.step(now)[0])


class Naive(CDOracle):
    """CD-Adam without replicas: ranks compress their gradients, and servers compress the means."""

    def told(self, gradients: np.ndarray) -> None:
        self.replicas[:] = self.mean[:] = self.estimate[:] = 0
        super().told(gradients)


class ErrorFeedback(CDOracle):
    """CD-Adam with error feedback in place of replicas, on ranks and on servers."""

    def told(self, gradients: np.ndarray) -> None:
        total = gradients + self.replicas
        sent = np.array([signed(x, "l1") for x in total])
        mine = sent.mean(0) + self.mean
        pieces = [mine[i : i + self.length] for i in range(0, self.size, self.length)]
        self.estimate = np.concatenate([signed(x, "l1") for x in pieces])
        self.replicas, self.mean = total - sent, mine - self.estimate


RANKS, SIZE, STEPS = 3, 24, 1500


def joint_residual(direction: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the mean gradient's norm after training on quadratics that differ by rank."""
    rng = np.random.default_rng(0)
    curvature, centre = rng.uniform(0.5, 2, (RANKS, SIZE)), rng.normal(size=(RANKS, SIZE))
    x = np.zeros(SIZE)
    for step in range(STEPS):
        lr = 0.02 * (1 if step < STEPS / 2 else 0.1 if step < STEPS * 3 / 4 else 0.01)
        x = x - lr * direction(curvature * (x - centre))
    return float(np.linalg.norm((curvature * (x - centre)).mean(0)))


def of_rule(rule: CDAdam) -> Callable[[np.ndarray], np.ndarray]:
    world = Ranks(rule, RANKS)
    return lambda grads: world.step(list(grads.reshape(RANKS, 6, 4)))[0].reshape(-1)


def test_it_settles_where_error_feedback_stalls() -> None:
    """CD-Adam reaches the optimum of ranks with different data.

    Plain signs and error feedback, whose estimates are divided by a root, do not.
    """
    assert joint_residual(of_rule(CDAdam())) < 1e-6
    assert joint_residual(of_rule(CDAdam(replica_lr=0.1))) < 1e-6
    naive, feedback = Naive(RANKS, SIZE), ErrorFeedback(RANKS, SIZE)
    assert joint_residual(lambda grads: naive.step(grads, 0.0)) > 1
    assert joint_residual(lambda grads: feedback.step(grads, 0.0)) > 1e-3


def test_top_k_settles_too() -> None:
    assert joint_residual(of_rule(CDAdam(compressor=TopK(0.05)))) < 1e-5


def test_the_largest_moment_never_falls_and_is_what_divides() -> None:
    world, before = Ranks(CDAdam(bias_correction=False, eps=1e-3), 2), np.zeros(99)
    for step, now in enumerate(gradients_of(2, 12)):
        found = world.step([g / (1 + step) for g in now])[0]
        state = world.states[0]
        assert (state["vmax"] >= before).all() and (state["vmax"] >= state["v"]).all()
        before = state["vmax"].copy()
        wanted = state["m"] / np.sqrt(state["vmax"] + 1e-3)
        np.testing.assert_allclose(found.reshape(-1), wanted, rtol=1e-12)
    assert (state["vmax"] > state["v"]).any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_32nd_is_sent(ranks: int) -> None:
    """Ranks send a 32nd of fp32's bytes from the first step on, whatever the number of ranks."""
    world, steps = simulate(CDAdam(), ranks), 3
    for now in gradients_of(ranks, steps, (256, 256), dtype="float32"):
        world.step([{"w": g} for g in now], lr=0.1)
    stats = world.exchanges[0].stats()
    assert 31.5 < stats["ratio"] <= 32
    bits = 2 * (ranks - 1) / ranks * 256 * 256 / 8  # up and down
    scales_and_flags = (ranks - 1) * (4 + 4 + 8)
    assert stats["sent"] == steps * (bits + scales_and_flags)


@pytest.mark.parametrize(
    "rule, each",
    [
        (CDAdam(), 20 + 4 / 3),
        (CDAdam(replica_lr=0.1), 24 + 8 / 3),
        (CDAdam(compressor=TopK()), 20),
    ],
)
def test_bytes_of_state(rule: CDAdam, each: float) -> None:
    spec = NUMPY.xp.spec(np.zeros(24000, np.float32))
    state = rule.init(spec, Info(rank=1, size=3))
    assert sum(x.nbytes for x in state.values()) == 24000 * each + 16


# -------------------------------------------------------------------------------- silent exchanges
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("bits, told", [(1.5, [2, 2, 2, 0]), (0.5, [1, 0]), (2, [2])])
def test_a_fraction_of_bits_is_met_by_turns(
    framework: Framework, bits: float, told: list[int]
) -> None:
    rule, steps = CDAdam(bits=bits), 8
    turns = [told[step % len(told)] for step in range(steps)]
    assert [rule.variant(step) == 0 for step in range(steps)] == [turn > 0 for turn in turns]
    assert (rule.period != 1) == (0 in told)
    silent = tuple(step for step, turn in enumerate(turns) if not turn)
    world, oracle = simulate(rule, 2), CDOracle(2, 1161, bits=max(told), silent=silent)
    for now in gradients_of(2, steps, (27, 43)):
        found = laws.step(world, framework, [{"w": g} for g in now])
        wanted = oracle.step(np.array(now).reshape(2, -1), 0.0)
        assert found[0] is not None and found[1] is not None
        assert same_bits(found[0]["w"], found[1]["w"])
        np.testing.assert_allclose(found[0]["w"].reshape(-1), wanted, atol=1e-10)
    sent = world.exchanges[0].stats()["sent"] / steps
    assert abs(sent - bits * 1161 / 8) < 50, "bits, scales and flags"


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("replica_lr, kind", [(1, CDOracle), (0.1, SlowOracle)])
def test_a_nan_is_skipped_where_no_gradient_travels(
    framework: Framework, ranks: int, replica_lr: float, kind: type[CDOracle]
) -> None:
    """A NaN is detected in a silent exchange and on one rank; the skipped step changes nothing."""
    world = simulate(CDAdam(bits=0.5, replica_lr=replica_lr), ranks)
    first, second, bad = gradients_of(ranks, 3, (27, 43))
    oracle = kind(ranks, 1161, silent=(1,))
    laws.step(world, framework, [{"w": g} for g in first])
    bad[-1][3, 3] = np.nan
    assert laws.step(world, framework, [{"w": g} for g in bad]) == [None] * ranks
    found = laws.step(world, framework, [{"w": g} for g in second])[0]
    for now in (first, second):
        wanted = oracle.step(np.array(now).reshape(ranks, -1), 0.0)
    assert found is not None
    np.testing.assert_allclose(found["w"].reshape(-1), wanted, atol=1e-10)


def test_replicas_lack_only_what_fp32_rounds_off() -> None:
    """Replicas of ranks and servers still agree after gradients become a million times smaller."""
    world = Ranks(CDAdam(), 2)
    for step, now in enumerate(gradients_of(2, 161, dtype="float32")):
        world.step([g if step < 100 else g * np.float32(1e-6) for g in now])
    mean, known, _ = held(world)
    assert np.abs(mean - known).max() < 1e-5


# ------------------------------------------------------------------------------------ weight decay
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("ranks, rule", [(2, CDAdam()), (2, CDAdam().dense()), (1, CDAdam())])
@pytest.mark.parametrize(
    "hyper, coupled",
    [
        ({"weight_decay": 0.1, "decoupled_weight_decay": False}, True),
        ({"weight_decay": 0.1, "decoupled_weight_decay": True}, False),
        ({"weight_decay": 0.1}, True),
    ],
)
def test_decay_is_added_to_what_all_know(
    framework: Framework, ranks: int, rule: Any, hyper: dict[str, Any], coupled: bool
) -> None:
    """Coupled weight decay is added to the estimate, uncompressed; decoupled decay is not added."""
    world, plain = Told(rule, ranks, framework), Ranks(rule, ranks, framework)
    weights = np.random.default_rng(5).normal(size=SHAPE)
    world.weights, world.hyper = framework.tensor(weights), hyper
    oracle = AdamOracle(1, weights.size, (0.9, 0.99), amsgrad=True)
    for now in gradients_of(ranks, 5):
        found, _ = world.step(now)[0], plain.step(now)
        known = np.mean(now, 0).reshape(-1)
        if ranks > 1 and isinstance(rule, CDAdam):
            known = framework.array(plain.states[0]["estimate"])
        wanted = oracle.step((known + coupled * 0.1 * weights.reshape(-1))[None], 0.0)
        np.testing.assert_allclose(found.reshape(-1), wanted, atol=1e-10)
    assert rule.needs_weights and rule.decays(decoupled=False) and not rule.decays(decoupled=True)


def test_decay_without_weights_is_refused() -> None:
    world = Told(CDAdam(), 1)
    world.hyper = {"weight_decay": 0.1, "decoupled_weight_decay": False}
    with pytest.raises(ValueError, match="CDAdam: parameter of w is None"):
        world.step(gradients_of(1, 1)[0])


# -------------------------------------------------------------------- other ranks and other stages
def owed_by(world: Ranks) -> Any:
    """Return the mean of the ranks' residuals plus the servers' residuals, as one vector."""
    carried = np.mean([s["error"] for s in world.states], 0)
    return carried + np.concatenate([s["server"] for s in world.states])[: carried.size]


@pytest.mark.parametrize(
    "rule",
    [
        CDAdam(),
        CDAdam(replica_lr=0.5),
        CDAdam(compressor=TopK(0.2)),
        CDAdam(compressor=PowerSGD(1)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("old, new", [(3, 2), (2, 5), (4, 1), (1, 3)])
@pytest.mark.parametrize("how", ["rescale", "rescale_from_one"])
def test_another_number_of_ranks(rule: CDAdam, old: int, new: int, how: str) -> None:
    """A change of the number of ranks keeps the mean replica, or the estimate.

    In later steps, the servers' replica is again the mean of the ranks' replicas.
    """
    inner = rule.compressor
    before, after = Ranks(rule, old), Ranks(rule, new)
    for now in gradients_of(old, 6, dtype="float32"):
        before.step(now)
    mean, _, estimate = held(before)
    after.init(np.zeros(SHAPE, np.float32))
    after.states = [
        rule.rescale(copy.deepcopy(before.states), after.spec, after.info(rank))
        if how == "rescale"
        else rule.rescale_from_one(copy.deepcopy(before.states[-1]), after.spec, after.info(rank))
        for rank in range(new)
    ]
    wanted = mean if how == "rescale" and inner is None else estimate
    np.testing.assert_allclose(held(after)[0], wanted, atol=1e-6)
    if rule.replica_lr != 1:
        carried = owed_by(before) if how == "rescale" else 0.0
        np.testing.assert_allclose(owed_by(after), carried, atol=1e-6)
    for now in gradients_of(new, 5, seed=3, dtype="float32"):
        after.step(now)
        found, known, _ = held(after)
        np.testing.assert_allclose(found, known, atol=2e-5)


def states_of(world: World) -> list[dict[str, np.ndarray]]:
    return [dict(exchange.bucket_states[0].state) for exchange in world.exchanges]


def switched(first: Any, then: Any) -> tuple[World, list[Any], list[Any]]:
    """Return a world after a switch between two levels, and its states before and after."""
    world = simulate(StepSchedule({0: first, 99: then}, window=1), 2)
    for now in gradients_of(2, 4, (27, 43), dtype="float32"):
        world.step([{"w": g} for g in now], lr=0.1)
    before = [{k: x.copy() for k, x in state.items()} for state in states_of(world)]
    for exchange in world.exchanges:
        exchange.switch(exchange.bucket_states[0], 1)
    return world, before, states_of(world)


@pytest.mark.parametrize(
    "first, then",
    [
        (CDAdam(), CDAdam((0.8, 0.99), preconditioned=True)),
        (CDAdam(replica_lr=0.1), CDAdam(replica_lr=0.5, bits=2)),
        (CDAdam(compressor=TopK(0.1)), CDAdam(compressor=TopK(0.01))),
        (CDAdam(compressor=TopK(0.1)), CDAdam(compressor=PowerSGD(2))),
        (CDAdam(compressor=PowerSGD(1)), CDAdam(compressor=PowerSGD(2))),
    ],
)
def test_replicas_go_along_to_another_compressor(first: CDAdam, then: CDAdam) -> None:
    then = dataclasses.replace(then, betas=first.betas)  # levels must agree on exempt tensors
    world, before, after = switched(first, then)
    for old, new in zip(before, after, strict=True):
        for key in ("m", "v", "vmax", "count", "estimate"):
            assert np.array_equal(old[key], new[key]), key
        np.testing.assert_array_equal(old["error"].reshape(-1), new["error"].reshape(-1))
    for now in gradients_of(2, 3, (27, 43), seed=1, dtype="float32"):
        world.step([{"w": g} for g in now], lr=0.1)
    assert np.array_equal(states_of(world)[0]["estimate"], states_of(world)[1]["estimate"])


@pytest.mark.parametrize(
    "first, then",
    [
        (CDAdam(), CDAdam(compressor=TopK(0.1))),
        (CDAdam(), CDAdam(replica_lr=0.1)),
        (CDAdam(), CDAdam().dense()),
    ],
)
def test_replicas_that_mean_something_else_wait(first: CDAdam, then: Any) -> None:
    """Replicas that another level cannot use are zero there.

    They return unchanged, with their estimate, when the level is switched back.
    """
    world, before, after = switched(first, then)
    for new in after:
        assert not any(new[key].any() for key in ("estimate", "error") if key in new)
    for now in gradients_of(2, 3, (27, 43), seed=1, dtype="float32"):
        world.step([{"w": g} for g in now], lr=0.1)
    for exchange, old in zip(world.exchanges, before, strict=True):
        exchange.switch(exchange.bucket_states[0], 0)
        for key in ("estimate", "error", "server"):
            assert np.array_equal(exchange.bucket_states[0].state[key], old[key]), key
        assert exchange.bucket_states[0].state["count"][0] == (7 if isinstance(then, CDAdam) else 0)


def test_exact_stages_are_not_held_back_by_louder_gradients() -> None:
    """A switch to the dense stage resets vmax to v, because estimates made of signs are larger."""
    world, before, after = switched(CDAdam(), CDAdam().dense())
    for old, new in zip(before, after, strict=True):
        assert (old["vmax"] > old["v"]).any()
        for key in ("m", "v", "count"):
            assert np.array_equal(old[key], new[key]), key
        assert np.array_equal(new["vmax"], new["v"])
    world.step([{"w": g} for g in gradients_of(2, 1, (27, 43), seed=1, dtype="float32")[0]], lr=0.1)


# --------------------------------------------------------------------------------- graphs, refusals
@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@pytest.mark.parametrize("rule", [CDAdam(bits=0.5), CDAdam(compressor=RandomK(0.1))], ids=repr)
def test_traced(rule: CDAdam) -> None:
    """In a graph with the step as a tensor, results are NumPy's; each phase is traced once."""
    import tensorflow as tf

    ours, oracle, traces = Ranks(rule, 2, TENSORFLOW), Ranks(rule, 2), []

    @tf.function(autograph=False)
    def exchange(tensors: Any, states: Any, step: Any, phase: int) -> Any:
        traces.append(phase)
        return ours.exchange(tensors, states, step)

    state = ours.init(tf.zeros(SHAPE, tf.float64))
    for number, now in enumerate(gradients_of(2, 5)):
        ours.steps = number
        given = [tf.constant(g) for g in now], state, tf.constant(number, tf.int64)
        results = exchange(*given, rule.variant(number))
        state = [new for _, new in results]
        for (mean, _), wanted in zip(results, oracle.step(now), strict=True):
            np.testing.assert_allclose(mean.numpy(), wanted, atol=1e-10)
    assert traces == ([0, 1] if rule.period != 1 else [0])


def test_refusals_say_why() -> None:
    for bad, why in [
        ("topk", "is no compressor"),
        (DGC(), "returns no averaged gradients"),
        (FP16(), "has no residual"),
        (Threshold(0.1), "is not marked as contractive"),
    ]:
        with pytest.raises(ValueError, match=f"such as TopK\\(0.01\\): this one {why}"):
            CDAdam(compressor=bad)
    with pytest.raises(ValueError, match="preconditioned is True, but must be False with a comp"):
        CDAdam(compressor=TopK(0.1), preconditioned=True)
    with pytest.raises(ValueError, match="bits is 2, but must be 1 with a compressor"):
        CDAdam(compressor=TopK(0.1), bits=2)
    with pytest.raises(ValueError, match="replica_lr is 0.5, but must be 1 with a compressor"):
        CDAdam(compressor=TopK(0.1), replica_lr=0.5)


def test_the_constructor_shows_the_papers_arguments_first() -> None:
    known = inspect.signature(CDAdam).parameters.values()
    assert [x.name for x in known][:4] == ["betas", "eps", "bias_correction", "compressor"]
    assert sum(x.kind is x.KEYWORD_ONLY for x in known) == 3


def test_the_other_name() -> None:
    assert optimizers.CDAMSGrad is CDAdam
