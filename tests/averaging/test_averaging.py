"""Tests of the methods that average models, in NumPy, PyTorch and TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, parameters, same_bits
from model_ranks import Ranks, Update

import accordion_hvd
from accordion_hvd import (
    COLD,
    DPSGD,
    LGC,
    QSGD,
    WAGMA,
    DiLoCo,
    DoubleSqueeze,
    DynaCOLD,
    EFSignSGD,
    Info,
    LocalSGD,
    Momentum,
    Nesterov,
    PowerSGD,
    RandomK,
    SignSGD,
    Threshold,
    TopAgg,
    TopK,
    Topology,
    TwoLevel,
    simulate,
)
from accordion_hvd.averaging import cold
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.core.base import Allreduce, Broadcast
from accordion_hvd.core.codec import Shifted, Wrapper
from accordion_hvd.core.running import within_group
from accordion_hvd.engine.averages import Averages, ModelParameters, by_shares


class Mixed(ModelParameters):
    """Parameters of three dtypes, with values that others cannot hold."""

    def __init__(self) -> None:
        kinds = {np.float16: 60_000, np.float64: 1 + 2**-40, np.float32: 1 + 2**-20}
        self.values = [np.full(3, value, dtype) for dtype, value in kinds.items()]

    def tensors(self) -> Any:
        return ()

    def read(self) -> list[Any]:
        return self.values

    def write(self, values: Sequence[Any]) -> None:
        self.values = list(values)


def test_parameters_add_in_their_dtypes_and_halves_in_fp32() -> None:
    model, wanted = Mixed(), Mixed().values
    averages = Averages(LocalSGD(1), LocalCommunicator(NUMPY.xp, 2), Traffic())
    averages.begin("", model.read(), {})
    averages.average(model, 0, 0.1)
    for mine, value in zip(model.values, wanted, strict=True):
        assert same_bits(mine, value)


class Dealing(Ranks):
    """Simulated ranks whose engine has no groups: alltoalls among all ranks compute their means."""

    def _hold(self, generators: Sequence[Any]) -> np.ndarray:
        size = len(self.links)
        return super()._hold(
            [by_shares(generator, rank, size) for rank, generator in enumerate(generators)]
        )


def noise(rank: int, step: int, model: np.ndarray) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=model.shape).astype(model.dtype)


def still(rank: int, step: int, model: np.ndarray) -> np.ndarray:
    return np.zeros_like(model)


def start_apart(rank: int, step: int, model: np.ndarray) -> np.ndarray:
    return noise(rank, 0, model) if step == 0 else np.zeros_like(model)


# ---------------------------------------------------------------------------------------- WAGMA
@pytest.mark.parametrize(("ranks", "each"), [(8, 4), (8, 2), (6, 3), (5, 2), (7, 3), (16, 4)])
def test_models_become_one_without_updates(ranks: int, each: int) -> None:
    """Models are equal after `reach` steps if group size and number of ranks are powers of two.

    With other numbers, the models only come closer to their mean.
    """
    method = WAGMA(each, period=100)
    world = Ranks(method, ranks, np.zeros(5))
    schedule = method.schedule(ranks)
    assert schedule.reach is not None
    for _ in range(schedule.reach):
        models = world.take(start_apart)
    mean = np.mean([noise(rank, 0, np.zeros(5)) for rank in range(ranks)], 0)
    if ranks & (ranks - 1) == 0 and each & (each - 1) == 0:
        np.testing.assert_allclose(models, np.tile(mean, (ranks, 1)), atol=1e-14)
    assert np.abs(models - mean).max() < 0.6 * np.abs(noise(0, 0, mean) - mean).max()


@pytest.mark.parametrize("compressor", [None, TopK(0.3), RandomK(0.5), EFSignSGD()], ids=repr)
def test_the_mean_over_ranks_follows_the_updates(compressor: Any) -> None:
    """The mean of the models contains all updates: a rank keeps the unsent part in its model."""
    world = Ranks(WAGMA(2, period=5, compressor=compressor), 6, np.zeros(40))
    due = np.zeros(40)
    for step in range(12):
        due += np.mean([noise(rank, step, due) for rank in range(6)], 0)
        models = world.take(noise)
        np.testing.assert_allclose(models.mean(0), due, atol=2e-5)
        if world.method.equal(step):
            assert (models == models[0]).all()


def test_compression_without_loss_is_none() -> None:
    plain, lossless = (Ranks(WAGMA(2, 4, compressor=c), 4, np.ones(30)) for c in (None, TopK(1.0)))
    for _ in range(9):
        np.testing.assert_allclose(plain.take(noise), lossless.take(noise), atol=1e-5)


def test_compressed_groups_agree_better_than_none() -> None:
    """Compressed averages keep models closer than local SGD, but less close than exact averages."""
    apart = {}
    for method in (WAGMA(2, 50, compressor=TopK(0.2)), WAGMA(2, 50), LocalSGD(50)):
        world = Ranks(method, 8, np.zeros(50))
        for _ in range(40):
            models = world.take(noise)
        apart[repr(method)] = float(models.std(0).mean())
    harsh, plain, local = apart.values()
    assert plain < harsh < 0.6 * local


def test_extremes_are_other_methods() -> None:
    """One group of all ranks equals a period of 1, and groups of one rank equal local SGD."""
    runs = {
        "all": Ranks(WAGMA(6, period=4), 6, np.zeros(8)),
        "every step": Ranks(WAGMA(2, period=1), 6, np.zeros(8)),
        "ones": Ranks(WAGMA(1, period=4), 6, np.zeros(8)),
        "local": Ranks(LocalSGD(4), 6, np.zeros(8)),
    }
    for step in range(9):
        models = {name: world.take(noise) for name, world in runs.items()}
        np.testing.assert_allclose(models["all"], models["every step"], atol=1e-12)
        assert (models["ones"] == models["local"]).all()
        assert (models["local"] == models["local"][0]).all() == ((step + 1) % 4 == 0)


@pytest.mark.parametrize("method", [LocalSGD(1), WAGMA(2, period=1), DPSGD("complete")], ids=repr)
def test_averaging_models_each_step_is_averaging_gradients(method: Averaging) -> None:
    """With SGD on f_i = 0.5 ||x - c_i||^2, all models take the steps of averaged gradients."""
    centres = np.random.default_rng(0).normal(size=(4, 6))
    world, x = Ranks(method, 4, np.zeros(6)), np.zeros(6)
    for _ in range(10):
        models = world.take(lambda rank, step, model: -0.1 * (model - centres[rank]))
        x = x - 0.1 * (x - centres.mean(0))
        np.testing.assert_allclose(models, np.tile(x, (4, 1)), atol=1e-12)


METHODS = [
    WAGMA(2, 3),
    WAGMA(2, 3, compressor=TopK(0.2)),
    LocalSGD(3),
    DiLoCo(3),
    DiLoCo(3, compressor=TopK(0.5)),
    DPSGD("torus"),
    COLD("ring"),
    COLD("ring", 0.5, TopK(0.5)),
    COLD("exponential", 0.5, PowerSGD(1)),
    DynaCOLD("ring"),
]


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_all_frameworks_do_the_same(method: Averaging, framework: Framework) -> None:
    first = np.random.default_rng(1).normal(size=37).astype(np.float32)
    ours, theirs = Ranks(method, 4, first), Ranks(method, 4, first, framework)
    for _ in range(7):
        models = ours.take(noise), theirs.take(noise)
        np.testing.assert_allclose(*models, rtol=1e-4, atol=1e-4)
    assert [sorted(s) for s in ours.states] == [sorted(s) for s in theirs.states]
    assert models[1].dtype == np.float32


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_states_keep_their_keys_and_all_settle(method: Averaging) -> None:
    world = Ranks(method, 4, np.ones(12))
    keys = [sorted(state) for state in world.states]
    for _ in range(4):
        before = world.take(noise)
    after = world.synchronize()
    assert [sorted(state) for state in world.states] == keys
    assert (after == after[0]).all()
    np.testing.assert_allclose(after[0], before.mean(0), atol=1e-12)


def test_default_groups_and_repr() -> None:
    assert WAGMA().schedule(64).group_size == 8
    assert repr(WAGMA(4)) == "WAGMA(group_size=4)"
    assert repr(COLD(compressor=TopK(0.1))) == (
        "COLD(topology=Topology('ring'), compressor=TopK(ratio=0.1))"
    )
    assert WAGMA(4).groups(8) == WAGMA(4).schedule(8).all()


# --------------------------------------------------------------------------------------- DiLoCo
def test_the_common_model_is_a_copy() -> None:
    """The optimizer's steps on a model that became the common one leave the common one alone."""
    model = np.ones(4)
    info = Info(step=0, rank=0, size=2, name="model")
    states = [DiLoCo(3).start(model, info)]
    states.append(DiLoCo(3).synchronized(states[0], model))
    model += 1
    assert all((state["common"] == 1).all() for state in states)


def test_diloco_is_nesterov_on_deltas() -> None:
    """DiLoCo equals a loop of Nesterov steps; with lr 1 and momentum 0, DiLoCo is local SGD."""
    outer = Nesterov(0.7, 0.9)
    world, plain = Ranks(DiLoCo(3, outer), 4, np.zeros(5)), Ranks(LocalSGD(3), 4, np.zeros(5))
    simple = Ranks(DiLoCo(3, Nesterov(1.0, 0.0)), 4, np.zeros(5))
    common, velocity = np.zeros(5), np.zeros(5)
    for window in range(4):
        ends = []
        for rank in range(4):
            ends.append(common + sum(noise(rank, 3 * window + i, common) for i in range(3)))
        delta = common - np.mean(ends, 0)
        velocity = 0.9 * velocity + delta
        common = common - 0.7 * (delta + 0.9 * velocity)
        for _ in range(3):
            models, averaged, same = world.take(noise), plain.take(noise), simple.take(noise)
        np.testing.assert_allclose(models, np.tile(common, (4, 1)), atol=1e-12)
        np.testing.assert_allclose(averaged, same, atol=1e-12)


# ------------------------------------------------------------------------------------- topologies
KINDS = ["ring", "torus", "hypercube", "exponential", "complete"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 9, 16, 17, 64])
def test_topologies_are_doubly_stochastic(kind: str, size: int) -> None:
    graph = Topology(kind)
    if kind == "hypercube" and size & (size - 1):
        with pytest.raises(ValueError, match="a power of two"):
            graph.weights(size)
        return
    weights = graph.weights(size)
    assert (weights >= 0).all() and (weights == weights.T).all()
    np.testing.assert_allclose(weights.sum(0), 1, atol=1e-12)
    assert graph.gap(size) > 0
    Topology(weights)  # passes its own checks
    degrees = [len(graph.of(rank, size)) for rank in range(size)]
    most = {"ring": 2, "torus": 4, "hypercube": math.log2(size), "complete": size - 1}
    assert max(degrees) <= most.get(kind, 2 * max(1, (size - 1).bit_length()))
    assert all(graph.of(rank, size) == graph.to(rank, size) for rank in range(size))


def test_weights_of_the_ring_are_thirds() -> None:
    """A ring's weights are 1/3, as in the D-PSGD of WAGMA's authors; a complete graph has gap 1."""
    assert np.allclose(Topology("ring").weights(5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    assert Topology("complete").gap(7) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["ring", "torus", "exponential", "complete"])
def test_gossip_keeps_the_mean_and_contracts_by_the_gap(kind: str) -> None:
    graph = Topology(kind)
    world = Ranks(DPSGD(graph), 9, np.zeros(4))
    models = world.take(start_apart)
    mean, before = models.mean(0), np.linalg.norm(models - models.mean(0))
    for _ in range(5):
        models = world.take(start_apart)
        np.testing.assert_allclose(models.mean(0), mean, atol=1e-13)
        after = np.linalg.norm(models - mean)
        assert after <= (1 - graph.gap(9)) * before + 1e-12
        before = after


def test_a_directed_graph_will_do_for_gossip() -> None:
    """D-PSGD accepts a doubly stochastic matrix that is not symmetric, but COLD refuses it.

    In the graph of this matrix, each rank receives from the two ranks before it.
    """
    weights = 0.6 * np.eye(5) + 0.3 * np.roll(np.eye(5), 1, 0) + 0.1 * np.roll(np.eye(5), 2, 0)
    graph = Topology(weights)
    assert graph.of(1, 5) == (0, 4) and graph.to(1, 5) == (2, 3)
    world = Ranks(DPSGD(graph), 5, np.zeros(3))
    first = np.stack([noise(rank, 0, np.zeros(3)) for rank in range(5)])
    np.testing.assert_allclose(world.take(start_apart), weights @ first, atol=1e-14)
    with pytest.raises(ValueError, match="COLD: topology is .* must be symmetric"):
        Ranks(COLD(graph), 5, np.zeros(3))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("star", "one of 'ring'"),
        (np.zeros((2, 3)), "a square matrix"),
        (np.ones((2, 2)), "rows that sum to 2', but must be doubly stochastic"),
        ([[0.5, 0.5], [1.0, 0.0]], "columns that sum to 1.5"),
        ([[1.5, -0.5], [-0.5, 1.5]], "minimum -0.5"),
        (np.eye(3), "disconnected graph', but must be connected"),
        ([[0.0, 1.0], [1.0, 0.0]], "magnitude 1"),
        ([[np.nan, 1.0], [1.0, 0.0]], "at least 0"),
    ],
)
def test_bad_topologies_are_refused(kind: Any, words: str) -> None:
    with pytest.raises(ValueError, match="Topology: kind is"):
        Topology(kind)
    with pytest.raises(ValueError) as caught:
        DPSGD(kind)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------ COLD
class Quadratics:
    """Different, strongly convex functions of the ranks: f_i = 0.5 (x - c_i)^T A_i (x - c_i)."""

    def __init__(self, ranks: int, size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.ranks, self.size = ranks, size
        self.a = []
        for _ in range(ranks):
            q = np.linalg.qr(rng.normal(size=(size, size)))[0]
            self.a.append((q * np.geomspace(0.5, 2.0, size)) @ q.T)
        self.c = rng.normal(size=(ranks, size))
        total = sum(self.a)
        self.best = np.linalg.solve(total, sum(a @ c for a, c in zip(self.a, self.c, strict=True)))

    def gradient(self, rank: int, x: np.ndarray) -> np.ndarray:
        return self.a[rank] @ (x - self.c[rank])

    def descent(self, lr: float) -> Update:
        return lambda rank, step, x: -lr * self.gradient(rank, x)

    def error(self, models: np.ndarray) -> float:
        return float(np.linalg.norm(models - self.best) / np.linalg.norm(self.best))


def nids(problem: Quadratics, weights: np.ndarray, lr: float, steps: int) -> list[np.ndarray]:
    """Return all models after each step of NIDS, by the two-step recursion of its authors."""

    def gradients(x: np.ndarray) -> np.ndarray:
        return np.stack([problem.gradient(rank, row) for rank, row in enumerate(x)])

    mix = (np.eye(len(weights)) + weights) / 2
    old = np.zeros((problem.ranks, problem.size))
    new = mix @ (old - lr * gradients(old))
    found = [new]
    while len(found) < steps:
        old, new = new, mix @ (2 * new - old - lr * gradients(new) + lr * gradients(old))
        found.append(new)
    return found


def test_cold_without_compression_is_nids() -> None:
    problem = Quadratics(6, 10)
    world = Ranks(COLD("ring"), 6, np.zeros(10))
    for due in nids(problem, Topology("ring").weights(6), 0.25, 40):
        np.testing.assert_allclose(world.take(problem.descent(0.25), 0.25), due, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (COLD("ring"), 110),
        (COLD("ring", 1.0, TopK(0.5)), 110),
        (COLD("exponential", 0.5, TopK(0.3)), 110),
        (COLD("ring", 0.5, QSGD(4)), 240),
        (COLD("ring", 0.5, RandomK(0.5)), 220),
        (DynaCOLD("ring", theta=0.93), 350),
    ],
    ids=repr,
)
def test_linear_convergence_to_the_optimum(method: Averaging, steps: int) -> None:
    problem = Quadratics(5, 20)
    world, errors = Ranks(method, 5, np.zeros(20)), []
    for _ in range(steps):
        models = world.take(problem.descent(0.8), 0.8)
        errors.append(problem.error(models))
        duals = np.stack([state["dual"] for state in world.states])
        assert np.abs(duals.sum(0)).max() <= 1e-10 * max(1.0, np.abs(duals).max())
    assert errors[-1] < 1e-8
    third = len(errors) // 3
    assert errors[2 * third] < 1e-2 * errors[third], "linearly, not in the end only"


def test_the_rate_of_one_bit_is_theta() -> None:
    problem = Quadratics(5, 20)
    world, errors = Ranks(DynaCOLD("ring", theta=0.96, scale=20.0), 5, np.zeros(20)), []
    for _ in range(400):
        errors.append(problem.error(world.take(problem.descent(0.5), 0.5)))
    slope = np.polyfit(range(150, 400), np.log(errors[150:]), 1)[0]
    assert slope == pytest.approx(math.log(0.96), rel=0.01)
    assert all(float(state["doublings"][0]) == 0 for state in world.states), "never saturated"


@pytest.mark.parametrize(("theta", "scale"), [(0.96, 0.01), (0.8, 20.0), (0.96, 1e-6)])
def test_saturation_is_noticed_and_recovered_from(theta: float, scale: float) -> None:
    """DynaCOLD doubles a scale that begins too small or falls too fast, and still converges.

    The published method diverges with such a scale.
    """
    problem = Quadratics(5, 20)
    method = DynaCOLD("ring", theta=theta, scale=scale)
    world = Ranks(method, 5, np.zeros(20))
    for _ in range(400):
        models = world.take(problem.descent(0.8), 0.8)
    assert problem.error(models) < 1e-5
    reports = [float(method.report(state)["doublings"][0]) for state in world.states]
    assert max(reports) > 0


def test_one_bit_is_one_bit() -> None:
    """A message to a neighbour has p / 8 + 1 bytes for p elements, which decode to +-s / 2."""
    method, model = DynaCOLD("ring", scale=3.0), np.linspace(-1, 1, 80)
    generator = method.exchange(model, method.start(model, Info()), Info(size=4, lr=0.1))
    asked: Any = generator.send(None)
    assert asked.tensor.nbytes == 11 and asked.to == (1, 3)
    zeros = np.zeros_like(asked.tensor)  # all signs negative
    _, state = pytest.raises(StopIteration, generator.send, (zeros, zeros)).value.value
    assert set(np.abs(state["mine"])) == {1.5}
    np.testing.assert_allclose(state["theirs"], -1.5 * 2 / 3)


def test_the_optimum_is_a_fixed_point() -> None:
    problem = Quadratics(5, 7)
    world = Ranks(COLD("ring", 0.5, TopK(0.3)), 5, problem.best)
    for rank, state in enumerate(world.states):
        state["dual"] = -problem.gradient(rank, problem.best)
        state["mine"] = problem.best.copy()
        weights = Topology("ring").weights(5)[rank]
        state["theirs"] = problem.best * (1 - weights[rank])
    for _ in range(20):
        models = world.take(problem.descent(0.25), 0.25)
    np.testing.assert_allclose(models, np.tile(problem.best, (5, 1)), atol=1e-12)


def test_sending_models_instead_of_innovations_would_not_do() -> None:
    """COLD misses the optimum if it forgets its estimates, and so compresses whole models."""

    class Forgetful(COLD):
        def exchange(self, model: Any, state: Any, info: Info) -> Any:
            blank = {**state, "mine": state["mine"] * 0, "theirs": state["theirs"] * 0}
            return (yield from super().exchange(model, blank, info))

    problem = Quadratics(5, 20)
    world = Ranks(Forgetful("ring", 0.5, TopK(0.5)), 5, np.zeros(20))
    for _ in range(200):
        models = world.take(problem.descent(0.8), 0.8)
    assert problem.error(models) > 1e-3


def test_consensus_keeps_the_mean() -> None:
    """With f_i = 0.5 ||x - c_i||^2 and step size 1, all models converge to the mean of the c_i."""
    centres = np.random.default_rng(3).normal(size=(5, 12))
    world = Ranks(DynaCOLD("ring", theta=0.94), 5, np.zeros(12))
    for _ in range(400):
        models = world.take(lambda rank, step, x: centres[rank] - x, 1.0)
    np.testing.assert_allclose(models, np.tile(centres.mean(0), (5, 1)), atol=1e-9)


@pytest.mark.parametrize(("rates", "first"), [((0.0, 0.05), 0), ((), 100)])
def test_dyna_cold_measures_its_scale_when_it_can(rates: tuple[float, ...], first: int) -> None:
    """A warm-up may begin with a rate of 0; an elastic job begins such a state at a later step."""
    world = Ranks(DynaCOLD("ring", theta=0.94), 5, np.zeros(12))
    world.step = first
    for number in range(200):
        lr = rates[number] if number < len(rates) else 0.1
        models = world.take(lambda rank, _, model, lr=lr: lr * (rank - model), lr)
    assert np.abs(models - 2).max() < 0.01, models


@pytest.mark.parametrize("method", [COLD("ring", 0.5, TopK(0.5)), DynaCOLD("ring")], ids=repr)
def test_a_step_of_size_zero_changes_nothing(method: Averaging) -> None:
    """A step with learning rate 0, with which schedules end, changes neither models nor states.

    The training can continue with a rate above 0. COLD then computes the same models as without
    such steps.
    """
    problem = Quadratics(5, 20)
    paused, other = (Ranks(method, 5, np.zeros(20)) for _ in range(2))
    for step in range(40):
        models = other.take(problem.descent(0.5), 0.5)
        if step == 20:
            before = [{k: np.copy(x) for k, x in state.items()} for state in paused.states]
            kept = np.copy(paused.models)
            for _ in range(3):
                np.testing.assert_array_equal(paused.take(still, lr=0.0), kept)
            for state, old in zip(paused.states, before, strict=True):
                assert all(np.array_equal(state[key], x) for key, x in old.items())
        found = paused.take(problem.descent(0.5), 0.5)
        if isinstance(method, COLD):  # the scale of DynaCOLD follows the number of steps
            np.testing.assert_array_equal(found, models)


def test_cold_needs_a_learning_rate() -> None:
    with pytest.raises(ValueError, match="COLD: learning rate is -0.1, but must be .* least 0"):
        Ranks(COLD(), 2, np.zeros(3)).take(still, lr=-0.1)


# ------------------------------------------------------------------------- groups without an engine
def test_a_group_speaks_of_its_members() -> None:
    """`within_group` replaces positions in a group by ranks: in roots, senders and subgroups."""

    def generator() -> Any:
        yield Allreduce(np.ones(2), op="sum", sender=1)
        yield Broadcast(np.ones(2), root=0), Allreduce(np.ones(2), group=(1, 2))

    asked = within_group((2, 5, 6), generator())
    first = next(asked)
    root, pair = asked.send(None)
    assert (first.group, first.sender) == ((2, 5, 6), 5)
    assert (root.root, root.group, pair.group) == (2, (2, 5, 6), (5, 6))


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize(("ranks", "size"), [(3, 2), (4, 2), (5, 4), (7, 3), (8, 8)])
def test_shares_among_all_are_means_of_groups(ranks: int, size: int, framework: Framework) -> None:
    """Alltoalls among all ranks compute the means of groups, even if no group divides a vector."""
    start = np.zeros(11, np.float32)
    worlds = [kind(WAGMA(size, 4), ranks, start, framework) for kind in (Ranks, Dealing)]
    for _ in range(9):
        one, other = (world.take(noise) for world in worlds)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------- point-to-point messages
def compressors() -> list[Any]:
    kinds = [getattr(accordion_hvd.compressors, name) for name in accordion_hvd.compressors.__all__]
    made = [
        kind(TopK(0.1)) if issubclass(kind, Wrapper) else kind()
        for kind in kinds
        if kind not in (TwoLevel, Momentum) and not issubclass(kind, Shifted)
    ]
    kept = [c for c in made if c.output == "gradient" and not c.sharded]
    return [*kept, DoubleSqueeze(QSGD(4))]


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("compressor", compressors(), ids=repr)
def test_a_message_means_the_same_to_both(compressor: Any, framework: Framework) -> None:
    """The sender and the receiver decode a message to the same bits in each step.

    This holds for every compressor except those that are refused, whose messages change in size.
    """
    kept: Any = {}
    for step in range(3):
        values = np.random.default_rng(step).normal(size=600).astype(np.float32)
        info = Info(step=step, rank=1, size=4, name="model")
        try:
            x = framework.tensor(values)
            message, mine, kept = cold.encode(compressor, x, kept, info)
        except ValueError as error:
            assert "whose size changes" in str(error)
            assert type(compressor).__name__ in ("AdaComp", "DGC", "Threshold", "ScaleCom")
            return
        like = framework.tensor(np.zeros(600, np.float32))
        reader = Info(step=step, rank=3, size=4, name="model")
        theirs = cold.decode(compressor, message, like, reader, sender=1)
        assert (framework.array(mine) == framework.array(theirs)).all()
        assert framework.array(mine).any()


def test_messages_whose_size_changes_are_refused() -> None:
    with pytest.raises(ValueError, match="Threshold.* sends messages whose size changes"):
        Ranks(COLD("ring", 0.5, Threshold(0.1)), 4, np.zeros(5)).take(noise)


# ---------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: WAGMA(0), "WAGMA: group_size is 0, but must be an integer of at least 1"),
        (lambda: WAGMA(2.5), "WAGMA: group_size is 2.5"),  # type: ignore[arg-type]
        (
            lambda: WAGMA(9).groups(8),
            "group_size is 9, but must be an integer from 1 to 8, the number of ranks",
        ),
        (lambda: WAGMA(period=0), "WAGMA: period is 0, but must be an integer of at least 1"),
        (lambda: WAGMA(wait_avoiding="no"), "wait_avoiding is 'no'"),
        (lambda: WAGMA(compressor=SignSGD()), "WAGMA: compressor is SignSGD"),
        (lambda: WAGMA(compressor=LocalSGD()), "WAGMA: compressor is LocalSGD"),
        (lambda: WAGMA(compressor=TwoLevel(TopK())), "WAGMA: compressor is TwoLevel"),
        (lambda: DiLoCo(compressor=LGC()), "DiLoCo: compressor is LGC"),
        (lambda: COLD(compressor=PowerSGD(2, alternate=True)), "COLD: compressor is PowerSGD"),
        (lambda: WAGMA(compressor=TopAgg(1, None, 1.0)), "WAGMA: compressor is TopAgg"),
        (lambda: WAGMA(wait_avoiding=True, compressor=TopK()), "'auto' with a compressor"),
        (lambda: LocalSGD(0), "LocalSGD: period is 0"),
        (lambda: DiLoCo(0), "DiLoCo: period is 0"),
        (lambda: DiLoCo(outer="sgd"), "DiLoCo: outer is 'sgd'"),  # type: ignore[arg-type]
        (lambda: Nesterov(-1.0), "Nesterov: lr is -1.0"),
        (lambda: Nesterov(momentum=1.0), "Nesterov: momentum is 1.0"),
        (lambda: DPSGD(3), "DPSGD: topology is 3"),
        (lambda: COLD(gamma=0), "COLD: gamma is 0, but must be a number in (0, 1]"),
        (lambda: COLD(compressor="topk"), "COLD: compressor is 'topk'"),  # type: ignore[arg-type]
        (lambda: DynaCOLD(theta=1.0), "DynaCOLD: theta is 1.0"),
        (lambda: DynaCOLD(scale=0.0), "DynaCOLD: scale is 0.0"),
        (lambda: simulate(WAGMA(), 2), "simulate: compression is WAGMA"),
        (lambda: DPSGD(np.eye(1)).groups(2), "a matrix of 2 rows, one per rank"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), (1, 5))))
def test_few_ranks_and_elements(sizes: tuple[int, int]) -> None:
    ranks, size = sizes
    for method in (WAGMA(), LocalSGD(2), DiLoCo(2), DPSGD(), COLD(), DynaCOLD()):
        world = Ranks(method, ranks, np.zeros(size))
        for _ in range(3):
            assert np.isfinite(world.take(noise)).all()
