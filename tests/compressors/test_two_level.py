"""Tests of TwoLevel: exchanges of the inner compressor between hosts, and residuals of slices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from alternating import Alternating
from frameworks import NUMPY, Framework, Ranks, normals, parameters, same_bits
from laws import SHAPE, several, step

from accordion_hvd import (
    DGC,
    FP16,
    Accordion,
    Allgather,
    Allreduce,
    Broadcast,
    Compressor,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    Info,
    Momentum,
    PowerSGD,
    RandomK,
    ScaleCom,
    SignSGD,
    StepSchedule,
    TopK,
    TwoLevel,
    parse,
    simulate,
)
from accordion_hvd.comm.agreement import VARIABLE, discover_hosts
from accordion_hvd.compressors.two_level import slice_shape
from accordion_hvd.core.base import consecutive, groups, place
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.checkpoint_files import read_manifest
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, World

INNER = [Dense(), FP16(), TopK(0.1), RandomK(0.1), PowerSGD(2)]


# ------------------------------------------------------------------------------------ the layouts
@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_one_rank_a_machine_is_the_compressor_itself(inner: Compressor) -> None:
    ours, plain = simulate(TwoLevel(inner), 3), simulate(inner, 3)
    for gradients in several(3, 3):
        pairs = zip(step(ours, NUMPY, gradients), step(plain, NUMPY, gradients), strict=True)
        for mine, wanted in pairs:
            assert mine is not None and wanted is not None
            assert all(same_bits(mine[name], wanted[name]) for name in wanted)
    traffic = [(e.stats()["sent"], e.stats()["between"]) for e in ours.exchanges]
    assert all(sent == between > 0 for sent, between in traffic)


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_one_machine_is_the_plain_mean(inner: Compressor) -> None:
    ours, plain = simulate(TwoLevel(inner), 4, local_size=4), simulate(Dense(), 4)
    for gradients in several(4, 2):
        pairs = zip(step(ours, NUMPY, gradients), step(plain, NUMPY, gradients), strict=True)
        for mine, wanted in pairs:
            assert mine is not None and wanted is not None
            assert all(same_bits(mine[name], wanted[name]) for name in wanted)
    assert all(e.stats()["between"] == 0 < e.stats()["sent"] for e in ours.exchanges)
    assert not any(entry.state for e in ours.exchanges for entry in e.bucket_states)


UPDATES = [DGC(0.1), Momentum(TopK(0.1)), SignSGD()]


@pytest.mark.parametrize("inner", UPDATES, ids=repr)
def test_updates_within_one_host_are_those_of_exempt_tensors(inner: Compressor) -> None:
    alone = inner.plain()
    assert alone is not None
    ours, plain = simulate(TwoLevel(inner), 4, local_size=4), simulate(alone, 4)
    for gradients in several(4, 4):
        mine, wanted = step(ours, NUMPY, gradients)[0], step(plain, NUMPY, gradients)[0]
        assert mine is not None and wanted is not None
        assert all(same_bits(mine[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("inner", UPDATES, ids=repr)
def test_updates_switch_between_tensors_and_slices(inner: Compressor) -> None:
    """Momentum of slices is not that of tensors: it begins anew."""
    orders = itertools.permutations((inner, TwoLevel(inner)))
    for local, levels in itertools.product((1, 2, 4), orders):
        world = simulate(StepSchedule(dict(enumerate(levels)), window=3), 4, local_size=local)
        for gradients in several(4, 6):
            found = step(world, NUMPY, gradients)[0]
            assert found is not None and all(np.isfinite(x).all() for x in found.values())
        assert repr(levels[1]) in world.exchanges[0].levels().values()


def test_machines_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the hosts have 3, 3, 1 ranks, but to .* they must"):
        step(simulate(TwoLevel(TopK(0.1)), 7, local_size=3), NUMPY, several(7, 1)[0])
    step(simulate(TopK(0.1), 7, local_size=3), NUMPY, several(7, 1)[0])  # TopK allows it


def test_places_and_groups() -> None:
    machines = consecutive(6, 3)
    assert machines == ((0, 1, 2), (3, 4, 5))
    here = place(machines, 4, 6)
    assert (here.intra, here.inter, here.local_rank, here.host) == ((3, 4, 5), (1, 4), 1, 1)
    assert groups(machines) == [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)]
    assert groups(consecutive(4, 1)) == groups(consecutive(4, 4)) == []
    scattered = place(((0, 2), (1, 3)), 3, 4)
    assert (scattered.intra, scattered.inter) == ((1, 3), (2, 3))
    irregular = ((0, 3), (1, 2))  # engines number the ranks of a group in ascending order
    assert groups(irregular) == [(0, 3), (1, 2), (0, 1), (2, 3)]
    there = place(irregular, 3, 4)
    assert (there.inter, there.host, place(irregular, 2, 4).host) == ((2, 3), 1, 0)


@pytest.mark.parametrize("inner", [TopK(0.1), DoubleSqueeze(EFSignSGD())], ids=repr)
def test_the_law_holds_on_irregular_hosts(inner: Compressor) -> None:
    world = simulate(TwoLevel(inner), 4, local_size=2)
    world._hub.hosts = ((0, 3), (1, 2))
    rng, owed = np.random.default_rng(0), np.zeros((40, 40))
    for _ in range(15):
        made = [rng.standard_normal((40, 40)).astype("f4") for _ in range(4)]
        owed += np.mean(made, 0) - np.asarray(world.step([{"w": x} for x in made])[0]["w"])
    (entries,) = zip(*(x.bucket_states for x in world.exchanges), strict=True)
    pairs = zip(world.exchanges, entries, strict=True)
    found = np.mean([entry.residual(each.info(entry)) for each, entry in pairs], 0)
    np.testing.assert_allclose(found, owed, atol=1e-4)
    assert np.abs(found).max() < 100


def test_levels_switch_within_one_host() -> None:
    """Without a second host, no inner compressor has a state."""
    for policy in (
        StepSchedule({0: TwoLevel(PowerSGD(2)), 1: TwoLevel(PowerSGD(1))}, window=2),
        StepSchedule({0: TwoLevel(PowerSGD(2)), 1: TopK(0.1)}, window=2),
    ):
        world = simulate(policy, 2, local_size=2)
        for gradients in several(2, 5):
            step(world, NUMPY, gradients)
        assert "TwoLevel(PowerSGD(rank=2))" not in str(world.exchanges[0].levels())


@pytest.mark.parametrize("word", ["0", "-1", "two"])
def test_the_variable_is_checked(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, word)
    communicator = SimulatedCommunicator(Hub(2), 0, NUMPY.xp)
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{word}', but must be an integer"):
        discover_hosts(communicator, as_policy(TwoLevel()).topology_aware)
    discover_hosts(
        communicator, as_policy(TopK()).topology_aware
    )  # needs no hosts, so the variable is not read


# ------------------------------------------------------------------------------------- the slices
@pytest.mark.parametrize(
    ("shape", "ranks", "wanted"),
    [
        ((24, 50), 2, (12, 50)),
        ((25, 50), 4, (7, 50)),
        ((16, 3, 3, 3), 2, (8, 27)),
        ((3, 3, 3, 16), 3, (9, 16)),
        ((13,), 4, (4,)),
        ((1, 7), 2, (4,)),
        ((), 2, (1,)),
    ],
)
def test_slices(shape: tuple[int, ...], ranks: int, wanted: tuple[int, ...]) -> None:
    assert slice_shape(shape, ranks) == wanted


@pytest.mark.parametrize("inner", [PowerSGD(2), TopK(0.1), RandomK(0.2)], ids=repr)
@pytest.mark.parametrize("shape", [(24, 50), (25, 50), (1, 1201)])
def test_each_slice_is_exchanged_by_the_compressor(
    inner: Compressor, shape: tuple[int, ...]
) -> None:
    """With two hosts of three ranks, three pairs of ranks exchange a third of the tensor each."""
    size, cut = int(np.prod(shape)), slice_shape(shape, 3)
    ours, between = Ranks(TwoLevel(inner), 6), [Ranks(inner, 2) for _ in range(3)]
    for gradients in normals(shape, 6, steps=4):
        machines = [sum(gradients[i : i + 3][1:], gradients[i]) / np.float32(3) for i in (0, 3)]
        filled = [np.resize(np.append(m, np.zeros(9999, "f")), (3, *cut)) for m in machines]
        means = [peers.step([m[j] for m in filled])[0] for j, peers in enumerate(between)]
        wanted = np.concatenate(means).reshape(-1)[:size].reshape(shape)
        for mean in ours.step(gradients):
            assert same_bits(mean, wanted)
    for rank, state in enumerate(ours.states):
        theirs = between[rank % 3].states[rank // 3]
        assert state.keys() == theirs.keys()
        assert all(same_bits(state[key], theirs[key]) for key in state)


@dataclass(frozen=True)
class Spy(Compressor):
    """A compressor that makes each kind of request, to all of its ranks or to a group."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        assert (info.size, info.hosts) == (2, ())
        mine = np.full(1, 10.0 + info.rank, "f")
        assert float((yield Broadcast(mine, root=1))[0]) == 11
        both, alone = yield Allgather(mine), Allreduce(mine, group=(info.rank,))
        assert [float(x[0]) for x in both] == [10, 11]
        assert float(alone[0]) == 10 + info.rank
        return (yield Allreduce(grad)), state


def test_requests_reach_the_ranks_of_the_same_place() -> None:
    world = simulate(TwoLevel(Spy()), 6, local_size=3)
    for gradients in several(6, 2):
        means = step(world, NUMPY, gradients)
        wanted = np.mean([mine["w"] for mine in gradients], 0)
        assert means[0] is not None
        np.testing.assert_allclose(means[0]["w"], wanted, atol=1e-6)


def test_a_rank_holds_its_part_of_the_error() -> None:
    world = simulate(TwoLevel(TopK(0.1)), 8, local_size=4)
    step(world, NUMPY, several(8, 1)[0])
    for exchange in world.exchanges:
        sizes = [
            entry.state["error"].size for entry in exchange.bucket_states if entry.bucket.compress
        ]
        assert sizes == [24 * 50 // 4, 40 * 30 // 4]


def test_it_declares_what_the_compressor_declares() -> None:
    @dataclass(frozen=True)
    class Phased(Dense):
        scope = "flat"
        output = "update"

        def variant(self, step: int) -> int:
            return step // 10

    ours = TwoLevel(Phased())
    assert (ours.output, ours.scope) == ("update", "flat")
    assert ours.variant(25) == 2 and ours.period == 0
    assert TwoLevel(TopK()).period == 1
    assert as_policy(ours).topology_aware and as_policy(ours).scope == "flat"
    assert Accordion(low=Dense(), high=TwoLevel(PowerSGD(1))).topology_aware
    assert not Accordion(low=Dense(), high=PowerSGD(1)).topology_aware


def test_words() -> None:
    assert parse("twolevel:powersgd:1") == TwoLevel(PowerSGD(1))
    assert parse("twolevel:topk:ratio=0.1") == TwoLevel(TopK(0.1))
    assert parse("twolevel:dense") == TwoLevel(Dense())
    assert parse("TwoLevel(PowerSGD(1))") == TwoLevel(PowerSGD(1))


# ------------------------------------------------------------------------------- errors of slices
def debts(world: World, name: str) -> np.ndarray:
    """Return the ranks' mean of the residual of bucket `name`, for its whole tensor."""
    found = []
    for exchange in world.exchanges:
        (entry,) = [entry for entry in exchange.bucket_states if entry.bucket.name == name]
        residual, carried = entry.compressor.residual(entry.state), np.zeros(entry.bucket.shape)
        if residual is not None:
            whole = entry.compressor.expand_residual(residual, entry.spec, exchange.info(entry))
            carried += NUMPY.array(entry.spec.xp.reshape(whole, entry.bucket.shape))
        if entry.carried is not None:
            carried += NUMPY.array(entry.spec.xp.reshape(entry.carried, entry.bucket.shape))
        found.append(carried)
    return np.mean(found, 0)


SWITCHES = [
    (TwoLevel(PowerSGD(4)), TwoLevel(PowerSGD(1))),
    (TwoLevel(Dense()), TwoLevel(TopK(0.1))),
    (Dense(), TwoLevel(TopK(0.1))),
    (TwoLevel(TopK(0.1)), PowerSGD(1)),
    (TopK(0.1), TwoLevel(PowerSGD(1))),
]


@pytest.mark.seldom(tensorflow=lambda low: low != SWITCHES[3][0])
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize(("low", "high"), SWITCHES, ids=repr)
def test_nothing_is_lost_at_a_switch(
    low: Compressor, high: Compressor, framework: Framework
) -> None:
    world = simulate(Alternating(low, high, [2, 4, 5, 6]), 6, local_size=3)
    total = {"w": np.zeros((24, 50)), "v": np.zeros((40, 30))}
    for number, gradients in enumerate(several(6, 9)):
        if number == 4:  # right after a switch
            gradients[1]["v"][3, 3] = np.nan
        means = step(world, framework, gradients)
        for name in total:
            if means[0] is not None:
                total[name] += np.mean([g[name] for g in gradients], 0) - means[0][name]
            difference = np.abs(total[name] - debts(world, name)).max()
            assert difference <= 6e-5, f"{name} at step {number}"


@pytest.mark.parametrize("inner", [DGC(0.1), ScaleCom(0.1, beta=0.3), TopK(0.1)], ids=repr)
def test_equal_levels_are_the_static_compressor(inner: Compressor) -> None:
    """A residual that moves to another level must not enter its momentum."""
    ours, plain = (
        simulate(method, 4, local_size=2)
        for method in (Alternating(TwoLevel(inner), TwoLevel(inner), [2, 4]), TwoLevel(inner))
    )
    for gradients in several(4, 6):
        mine, wanted = (step(world, NUMPY, gradients)[0] for world in (ours, plain))
        assert same_bits(mine["w"], wanted["w"])


def test_powersgd_hands_over_its_factor() -> None:
    world = simulate(
        Alternating(TwoLevel(PowerSGD(4)), TwoLevel(PowerSGD(1)), [3]), 4, local_size=2
    )
    *before, last = several(4, 4)
    for gradients in before:
        step(world, NUMPY, gradients)
    (exchange, *_) = world.exchanges
    entry = exchange.bucket_states[0]
    kept = entry.state["q"].copy()
    exchange.switch(entry, 1)
    assert same_bits(entry.state["q"], kept[:1])


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("local_size", [1, 3, 6])
def test_nothing_is_lost_when_ranks_move(local_size: int, switched: bool) -> None:
    """No gradient is lost if an elastic job goes on with its ranks on other hosts."""
    world, total = simulate(Alternating(*SWITCHES[0], []), 6, local_size=2), np.zeros(SHAPE)
    for number, gradients in enumerate(several(6, 6)):
        if number == 3:
            for exchange in world.exchanges:
                exchange.communicator.hosts = consecutive(6, local_size)
                if switched:
                    exchange.policy.current["w"] = 1
                    exchange.switch(exchange.bucket_states[0], 1)
        means = step(world, NUMPY, gradients)
        assert means[0] is not None
        total += np.mean([g["w"] for g in gradients], 0) - means[0]["w"]
        np.testing.assert_allclose(total, debts(world, "w"), atol=2e-5)


# ------------------------------------------------------------------------------------ checkpoints
def save(folder: Path, world: World) -> None:
    """Write a checkpoint like that of `save_state`, without collectives."""
    rows = [checkpoint._write(folder, [exchange]) for exchange in world.exchanges]
    checkpoint._complete(folder, world.exchanges[:1], rows, 0, "a job")


def load(folder: Path, compression: Any, ranks: int, local_size: int) -> World:
    world = simulate(compression, ranks, local_size=local_size)
    world._build(several(ranks, 1)[0][0])
    manifest = read_manifest(folder)
    for exchange in world.exchanges:
        owner = SimpleNamespace(exchange=exchange, expect=lambda names: None)
        checkpoint._prepare(manifest, [owner], [])
        for restore in checkpoint._restoring(folder, manifest, [owner]):
            restore()
    return world


@pytest.mark.parametrize("inner", [PowerSGD(1), TopK(0.1)], ids=repr)
def test_resuming_on_the_same_machines_is_exact(inner: Compressor, tmp_path: Path) -> None:
    world, steps = simulate(TwoLevel(inner), 4, local_size=2), several(4, 6)
    for gradients in steps[:3]:
        step(world, NUMPY, gradients)
    save(tmp_path, world)
    resumed = load(tmp_path, TwoLevel(inner), 4, 2)
    for gradients in steps[3:]:
        copied = [{k: g.copy() for k, g in mine.items()} for mine in gradients]
        ours, wanted = step(resumed, NUMPY, copied)[0], step(world, NUMPY, gradients)[0]
        assert ours is not None and wanted is not None
        assert all(same_bits(ours[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("levels", [SWITCHES[0], SWITCHES[3], SWITCHES[3][::-1]], ids=repr)
@pytest.mark.parametrize(("ranks", "local_size"), [(4, 1), (4, 4), (2, 1), (6, 3), (1, 1)])
def test_resuming_on_others_keeps_what_is_owed(
    levels: tuple[Compressor, Compressor],
    switched: bool,
    ranks: int,
    local_size: int,
    tmp_path: Path,
) -> None:
    """A checkpoint loaded with another number of ranks or hosts keeps the mean of the residuals.

    The next steps send these residuals with the gradients, as for whole tensors. After a switch,
    the residual of the first level may still await the first step of the second.
    """
    world = simulate(Alternating(*levels, []), 4, local_size=2)
    for gradients in several(4, 3):
        step(world, NUMPY, gradients)
    for exchange in world.exchanges if switched else ():
        exchange.policy.current["w"] = 1
        exchange.switch(exchange.bucket_states[0], 1)
    owed = debts(world, "w")
    save(tmp_path, world)
    resumed = load(tmp_path, Alternating(*levels, []), ranks, local_size)
    gradients = several(ranks, 1, seed=5)[0]
    given = np.mean([mine["w"] for mine in gradients], 0)
    means = step(resumed, NUMPY, gradients)
    assert means[0] is not None and np.abs(owed).max() > 0.25
    np.testing.assert_allclose(means[0]["w"] + debts(resumed, "w"), given + owed, atol=2e-5)
