"""Tests of the exchange and the simulator: packing, order, plans, accounts, extension."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import CASES, FIRST, Case
from frameworks import (
    NUMPY,
    POISONED,
    TENSORFLOW,
    TORCH,
    Framework,
    installed,
    parameters,
    same_bits,
)
from laws import several, states, step

from accordion_hvd import (
    FP16,
    STC,
    Accordion,
    Allreduce,
    Compressor,
    Dense,
    EFSignSGD,
    Fixed,
    Info,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    StepSchedule,
    TopK,
    simulate,
)
from accordion_hvd.engine import layout
from accordion_hvd.engine.exchange import IN_A_ROW, Exchange
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, World, lockstep


def exchanges(
    ranks: int, tensors: list[TensorInfo], compression: Any = "dense", **options: Any
) -> list[Exchange]:
    hub = Hub(ranks)
    return [
        Exchange(
            SimulatedCommunicator(hub, r, NUMPY.xp), as_policy(compression), tensors, **options
        )
        for r in range(ranks)
    ]


def one_step(world: list[Exchange]) -> None:
    """Run one step in which ranks have different values in each tensor."""
    for rank, exchange in enumerate(world):
        exchange.begin(0.1)
        exchange.give([values(rank, tensor) for tensor in exchange.tensors])
    while not all([exchange.advance() for exchange in world]):
        pass
    assert all([exchange.close() for exchange in world])


def values(rank: int, tensor: TensorInfo) -> np.ndarray:
    rng = np.random.default_rng([rank, tensor.size, len(tensor.name)])
    return rng.standard_normal(tensor.shape).astype(tensor.dtype)


MODEL = [
    TensorInfo("conv", (16, 8, 3, 3), "float32"),
    TensorInfo("conv.bias", (16,), "float32"),
    TensorInfo("half", (64, 32), "float16"),
    TensorInfo("half.bias", (32,), "float16"),
    TensorInfo("scalar", (), "float32"),
    TensorInfo("double", (40, 40), "float64"),
    TensorInfo("embedding", (100, 20), "float32"),
]
NEAR = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-5}


@pytest.mark.parametrize("compression", ["dense", "topk:1.0", "powersgd:10000", "randomk:1.0"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_tensor_gets_its_mean(compression: str, ranks: int) -> None:
    """Each tensor's mean has the tensor's shape and dtype, whatever its bucket."""
    world = simulate(compression, ranks, skip=["emb*"])
    given = [{tensor.name: values(rank, tensor) for tensor in MODEL} for rank in range(ranks)]
    for means in step(world, NUMPY, given):
        assert means is not None and means.keys() == given[0].keys()
        for tensor in MODEL:
            mean = means[tensor.name]
            wanted = np.mean([mine[tensor.name].astype(float) for mine in given], 0)
            assert mean.shape == tensor.shape and mean.dtype == tensor.dtype
            np.testing.assert_allclose(mean, wanted, atol=NEAR[tensor.dtype])


@pytest.mark.parametrize("framework", parameters())
def test_ranks_may_start_in_any_order(framework: Framework) -> None:
    """If ranks start buckets in different orders, means are bitwise the same."""
    ranks, wanted = 3, None
    for seed in range(3):
        world, rng = simulate(TopK(0.1), ranks), np.random.default_rng(seed)
        gradients = several(ranks, 4)
        step(world, framework, gradients[0])  # makes the exchanges
        for now in gradients[1:]:
            with framework.running():
                for exchange, mine in zip(world.exchanges, now, strict=True):
                    exchange.open(0.1)
                    units = exchange.layout.batches
                    for index in rng.permutation(len(units)):
                        names = [exchange.tensors[m].name for m in units[index].members]
                        parts = [framework.tensor(mine[name]) for name in names]
                        exchange.start(int(index), exchange.layout.batches[int(index)].pack(parts))
                while not all([exchange.advance() for exchange in world.exchanges]):
                    pass
                assert all([exchange.close() for exchange in world.exchanges])
                means = [framework.array(e.means()[0]) for e in world.exchanges]
        assert all(same_bits(mean, means[0]) for mean in means)
        wanted = means[0] if wanted is None else wanted
        assert same_bits(means[0], wanted)


def test_extension() -> None:
    """Tensors that are added later are exchanged, too, and earlier tensors' states remain."""
    ranks = 2
    grown, plain = exchanges(ranks, MODEL[:2], TopK(0.1)), exchanges(ranks, MODEL[:2], TopK(0.1))
    more = [TensorInfo("late", (50, 50), "float32"), TensorInfo("late.bias", (3,), "float32")]
    for number in range(4):
        if number == 2:
            for exchange in grown:
                exchange.extend(more)
        for world in (grown, plain):
            one_step(world)
        for one, other in zip(grown, plain, strict=True):
            assert same_bits(one.means()[0], other.means()[0])
    assert len(grown[0].bucket_states) == 4
    late = np.mean([values(rank, more[1]) for rank in range(ranks)], 0)
    np.testing.assert_allclose(grown[0].means()[3], late, atol=1e-6)


def test_skip_and_overrides_are_by_name() -> None:
    policy = Fixed(TopK(0.1), overrides={"v*": PowerSGD(2)})
    world = simulate(policy, 2, skip=["w"])
    for gradients in several(2, 2):
        means = step(world, NUMPY, gradients)
        exact = np.mean([mine["w"] for mine in gradients], 0)
        np.testing.assert_allclose(means[0]["w"], exact, atol=1e-6)
    levels = world.exchanges[0].levels()
    assert levels["v"] == repr(PowerSGD(2))
    assert {level for name, level in levels.items() if name != "v"} == {repr(Dense())}


def test_few_operations_a_step() -> None:
    """The number of operations depends on the rounds, not on the number of layers."""

    class Counted(SimulatedCommunicator):
        calls = 0

        def _put(self, *arguments: Any) -> Any:
            type(self).calls += 1
            return super()._put(*arguments)

    tensors = [TensorInfo(f"layer{i}", (40, 30 + i), "float32") for i in range(30)]
    tensors += [TensorInfo(f"bias{i}", (40,), "float32") for i in range(30)]
    for compression, most in [("dense", 1), ("topk", 2), ("powersgd", 2), ("randomk", 1)]:
        Counted.calls = 0
        exchange = Exchange(Counted(Hub(1), 0, NUMPY.xp), as_policy(compression), tensors)
        one_step([exchange])
        assert Counted.calls <= most, compression


def test_names_are_those_of_every_step() -> None:
    """Operations have the same names in each step, since engines match and cache by name."""

    class Named(SimulatedCommunicator):
        seen: list[str] = []

        def _put(self, name: str, *arguments: Any) -> Any:
            self.seen.append(name)
            return super()._put(name, *arguments)

    exchange = Exchange(Named(Hub(1), 0, NUMPY.xp), as_policy("powersgd"), MODEL, name="mine")
    for _ in range(2):
        one_step([exchange])
    half = len(Named.seen) // 2
    assert Named.seen[:half] == Named.seen[half:]
    assert len(set(Named.seen)) == half
    assert all(name.startswith("mine.") for name in Named.seen)


def test_accounts_of_time() -> None:
    world = simulate(TopK(0.1), 2)
    step(world, NUMPY, several(2, 1)[0])
    seconds = world.exchanges[0].stats()["seconds"]
    assert seconds.keys() == {"encode", "wait", "decode"}
    assert seconds["encode"] > 0 and seconds["decode"] > 0


def test_an_algorithm_may_work_in_subgroups() -> None:
    """An exchange generator may average over pairs of ranks first, and then over all."""

    class Pairs(Compressor):
        def exchange(self, grad: Any, state: Any, info: Info) -> Any:
            pair = (info.rank // 2 * 2, info.rank // 2 * 2 + 1)
            near = yield Allreduce(grad, group=pair)
            far = yield Allreduce(near, group=(info.rank % 2, info.rank % 2 + 2))
            return far, state

    gradients = several(4, 1)[0]
    for means in step(simulate(Pairs(), 4), NUMPY, gradients):
        assert means is not None
        np.testing.assert_allclose(
            means["w"], np.mean([mine["w"] for mine in gradients], 0), atol=1e-6
        )


def test_rounds_may_differ_between_buckets() -> None:
    """Exchange generators of different buckets may have different numbers of rounds."""
    world = simulate(Fixed(PowerSGD(1), overrides={"w": TopK(0.5), "v": Dense()}), 2)
    for gradients in several(2, 3):
        means = step(world, NUMPY, gradients)
        exact = np.mean([mine["v"] for mine in gradients], 0)
        np.testing.assert_allclose(means[1]["v"], exact, atol=1e-6)


def test_lockstep_returns_what_generators_return() -> None:
    def generator(rank: int) -> Any:
        total = 0.0
        for _ in range(rank % 1 + 3):
            total += float((yield Allreduce(np.full(1, rank, np.float64), op="sum"))[0])
        return rank, total

    hub = Hub(3)
    communicators = [SimulatedCommunicator(hub, rank, NUMPY.xp) for rank in range(3)]
    assert lockstep(communicators, [generator(r) for r in range(3)]) == [
        (0, 9.0),
        (1, 9.0),
        (2, 9.0),
    ]


def test_an_abandoned_step_can_be_begun_again() -> None:
    (exchange,) = exchanges(1, MODEL, TopK(0.1))
    exchange.begin(0.1)
    exchange.start(0, values(0, MODEL[0]))
    exchange.abort()
    assert exchange.running is None
    one_step([exchange])


def test_gradients_are_free_to_use_but_results_are_not_shared() -> None:
    """Changes that a rank makes to its mean are not visible to other ranks."""
    for compression in ("dense", "topk", "powersgd", "fp16"):
        world = simulate(compression, 2)
        means = step(world, NUMPY, several(2, 1)[0])
        for one, other in itertools.pairwise(means):
            before = other["w"].copy()
            one["w"][:] = 7
            assert same_bits(other["w"], before)


def test_simulated_ranks_that_ask_for_different_things_do_not_wait_for_ever() -> None:
    def asks(count: int) -> Any:
        for _ in range(count):
            yield Allreduce(np.ones(2, np.float32))

    hub = Hub(2)
    ranks = [SimulatedCommunicator(hub, rank, NUMPY.xp) for rank in range(2)]
    with pytest.raises(RuntimeError, match="wait for each other"):
        lockstep(ranks, [asks(1), asks(2)])


@pytest.mark.parametrize("framework", parameters())
def test_a_step_that_is_given_up_leaves_no_trace(framework: Framework) -> None:
    """After an aborted step, residuals and evidence are as before the step."""
    policy = Accordion(low=TopK(0.1), high=PowerSGD(1), window=100)
    tensors = [TensorInfo("w", (40, 50), "float32")]
    link = SimulatedCommunicator(Hub(1), 0, framework.xp)
    exchange = Exchange(link, policy, tensors)

    def values(seed: int) -> Any:
        return np.random.default_rng(seed).standard_normal((40, 50)).astype(np.float32)

    def begin(seed: int) -> None:
        exchange.begin(0.1)
        exchange.start(0, framework.tensor(values(seed)))

    with framework.running():
        begin(1)
        exchange.finish()
        entry = exchange.bucket_states[0]
        error = framework.array(entry.state["error"]).copy()
        seen = framework.array(entry.evidence["gradients"]).copy()
        begin(2)
        exchange.abort()
        assert exchange.running is None
        np.testing.assert_allclose(framework.array(entry.state["error"]), error, atol=1e-6)
        np.testing.assert_allclose(framework.array(entry.evidence["gradients"]), seen, atol=1e-6)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_different_plans_are_told_before_any_state_changes(
    framework: Framework, late: bool
) -> None:
    """An accelerator's host reads the number of a plan that ranks know with the flags."""
    world, (first, second, third) = simulate(TopK(0.1), 2), several(2, 3)
    step(world, framework, first)  # finds the sizes of messages, by which the plan is made
    step(world, framework, second)
    before = states(world, framework)
    world.exchanges[1].layout.number += 1
    for exchange in world.exchanges:
        exchange.layout.compares_early = not late
    with pytest.raises(RuntimeError, match="ranks disagree about the tensors to exchange"):
        step(world, framework, third)
    for exchange in world.exchanges:  # as wrappers do after an error
        exchange.abort()
    for mine, was in zip(states(world, framework), before, strict=True):
        for key, x in mine.items():
            np.testing.assert_allclose(x, was[key], atol=1e-6)


TWINS = [("a", (24, 50)), ("b", (40, 30)), ("c", (24, 50)), ("d", (24, 50)), ("e", (40, 30))]


def apart_and_together(
    monkeypatch: pytest.MonkeyPatch, framework: Framework, compression: Any, steps: int
) -> tuple[World, World, list[tuple[Any, Any]]]:
    """Run the same steps with a bucket batch per tensor, and with batches of small tensors."""
    worlds, results = [], []
    for largest in (0, layout.CPU.stacked):
        monkeypatch.setattr(layout, "CPU", replace(layout.CPU, stacked=largest))
        world, rng, means = simulate(copy.deepcopy(compression), 2), np.random.default_rng(3), []
        for _ in range(steps):
            mine = [
                {k: framework.tensor(rng.standard_normal(s).astype(np.float32)) for k, s in TWINS}
                for _ in range(2)
            ]
            with framework.running():
                (first, second) = world.step(mine, 0.1)
            assert first is not None and second is not None
            means += (mine := [framework.array(first[name]) for name, _ in TWINS])
            others = [framework.array(second[name]) for name, _ in TWINS]
            assert all(map(same_bits, mine, others))
        worlds.append(world)
        results.append(means)
    assert len(worlds[0].exchanges[0].layout.batches) == len(TWINS)
    return worlds[0], worlds[1], list(zip(*results, strict=True))


@pytest.mark.seldom(tensorflow=lambda case: case not in FIRST)
@pytest.mark.parametrize(
    ("case", "framework"),
    [
        pytest.param(case, *where.values, id=f"{where.id}-{case.name}", marks=where.marks)
        for where in parameters((POISONED, TORCH, TENSORFLOW))
        for case in CASES
        if case.compressor.scope == "tensor"  # otherwise all tensors are one bucket
        if where.values[0] is POISONED or not case.bitwise  # `laws.worlds_agree` shows the others
    ],
)
def test_sharing_a_bucket_batch_changes_nothing(
    case: Case, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shared, pairs = apart_and_together(monkeypatch, framework, case.compressor, 4)
    for alone, together in pairs:
        if isinstance(case.compressor, RandomK):
            assert np.count_nonzero(alone) == np.count_nonzero(together)  # another choice
        elif case.apart:
            assert np.abs(alone - together).max() <= case.apart * 5  # of normal numbers
        else:
            np.testing.assert_allclose(alone, together, atol=1e-5, rtol=1e-5)
    batching = case.compressor.batching
    units = {"alike": 2, "any": 1, "": len(TWINS)}[batching]
    assert len(shared.exchanges[0].layout.batches) == units


@pytest.mark.parametrize("framework", parameters())
def test_reading_a_state_leaves_it_where_it_is(framework: Framework) -> None:
    """Reading the state of a small tensor leaves it in the tensor that holds several states."""
    policy = Accordion(low=TopK(0.3), high=TopK(0.1), window=9, interval=1)
    world, rng = simulate(policy, 2), np.random.default_rng(0)
    for _ in range(3):
        mine = [
            {k: framework.tensor(rng.standard_normal(s).astype(np.float32)) for k, s in TWINS}
            for _ in range(2)
        ]
        with framework.running():
            world.step(mine, 0.1)
        (memory, *_) = (m for m in world.exchanges[0].layout.batches if len(m.entries) > 1)
        stack = memory.state["error"]
        for place, entry in enumerate(memory.entries):
            assert same_bits(framework.array(entry.state["error"]), framework.array(stack[place]))
            assert set(entry.evidence) == set(entry.saved().evidence) == {"gradients"}
        assert memory.state["error"] is stack
        assert all(entry._stack is memory for entry in memory.entries)


@pytest.mark.seldom(tensorflow=lambda signal: signal == "local")
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("signal", ["local", "reduced"])
@pytest.mark.parametrize("low", [Dense(), TopK(0.3)], ids=repr)
def test_sharing_a_bucket_batch_changes_no_decision(
    low: Compressor, signal: str, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Accordion(low=low, high=TopK(0.1), window=2, interval=1, signal=signal, threshold=0.03)
    apart, shared, pairs = apart_and_together(monkeypatch, framework, policy, 9)
    for alone, together in pairs:
        np.testing.assert_allclose(alone, together, atol=1e-5, rtol=1e-5)
    ours, theirs = (world.exchanges[0].policy.history for world in (apart, shared))
    assert len({row["level"] for row in ours}) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert all(one[key] == other[key] for key in ("name", "level", "reason"))
        np.testing.assert_allclose(one["norm"], other["norm"], rtol=1e-5)


@pytest.mark.parametrize(
    "compressor", [TopK(0.1), PowerSGD(2), EFSignSGD(), OneBit(), Int8(), STC(0.1)], ids=repr
)
def test_large_finite_gradients_count(compressor: Compressor) -> None:
    """A step is not skipped unless the norm of a gradient is above 1e15."""
    for value, counts in ((1e13, True), (1e14, False)):
        world = simulate(compressor, 2)
        means = world.step([{"w": np.full((40, 30), value, np.float32)}] * 2)
        assert world.exchanges[0].skipped == (not counts) and means[0] is not None
        assert np.isfinite(means[0]["w"]).all()
        assert abs(means[0]["w"]).max() > value / 10 if counts else not means[0]["w"].any()


def test_a_good_step_ends_a_row_of_skipped_ones() -> None:
    """Steps that are too large have zeros as means, and NaN after `IN_A_ROW` in succession."""
    world, lost = simulate(TopK(0.1), 2), []
    for large in [True] * IN_A_ROW + [False] + [True] * (IN_A_ROW + 1):
        values = np.full((40, 30), 1e14 if large else 1.0, np.float32)
        means = world.step([{"w": values.copy()}] * 2)
        lost.append(means[0] is None)
        assert means[0] is None or large == (not means[0]["w"].any())
    assert lost == [False] * (2 * IN_A_ROW + 1) + [True]


@pytest.mark.parametrize("case", [c for c in CASES if not c.private], ids=lambda case: case.name)
def test_training_goes_on_after_a_spike(case: Case) -> None:
    """One gradient of any finite size has finite means, and the third step after it is ordinary."""
    for size in (1e10, 1e13, 1e19, 3e37):
        world, good = simulate(case.compressor, 2, local_size=2), several(2, 8)
        overflows = isinstance(case.compressor, FP16)  # as it says
        for number, gradients in enumerate(good):
            if number == 3:
                gradients = [{k: x * np.float32(size) for k, x in g.items()} for g in gradients]
            with np.errstate(over="ignore", invalid="ignore"):
                means = step(world, NUMPY, gradients)
            finite = all(np.isfinite(x).all() for x in (means[0] or {"w": np.inf}).values())
            assert finite or number == 3 and overflows, size
        for state in states(world, NUMPY):
            assert all(np.isfinite(x).all() for x in state.values()), size


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_a_level_that_was_left_keeps_no_variables() -> None:
    import tensorflow as tf

    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    policy = StepSchedule({0: TopK(0.1), 1: EFSignSGD(), 2: OneBit()}, window=1)
    link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
    exchange = TensorFlowExchange(link, policy, [TensorInfo("w", (40, 50), "float32")])
    exchange.prepare_trace()

    def train() -> list[weakref.ref[Any]]:
        """Take a step; return the variables of its level, which its graph holds, too."""
        found = [weakref.ref(x) for e in exchange.bucket_states for x in (e.state or {}).values()]
        run = tf.function(exchange.traced, autograph=False)
        run([tf.ones((40, 50))], tf.constant(0.1))
        exchange.catch_up(0.1)
        return found

    left = [train() for _ in range(3)]
    gc.collect()
    assert all(left) and not any(x() is not None for x in left[0] + left[1])


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_an_exchange_that_is_gone_waits_for_nobody() -> None:
    """Its graph may have failed, and its variable still say when the exchange began."""
    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    class Watched(SimulatedCommunicator):
        def watch(self, began: Any) -> None:
            self.began = began

    link = Watched(Hub(1), 0, TENSORFLOW.xp)
    exchange = TensorFlowExchange(link, as_policy(Dense()), [TensorInfo("w", (4, 5), "float32")])
    exchange.prepare_trace()
    exchange._began.assign(7.0)
    assert link.began() == 7.0
    del exchange
    gc.collect()
    assert link.began() == 0.0
