"""Tests of Birder: its random signs, moments, exchanges, stages, and effect on training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import laws
import numpy as np
import pytest
from frameworks import (
    NUMPY,
    POISONED,
    TENSORFLOW,
    TORCH,
    Framework,
    Ranks,
    combined,
    installed,
    parameters,
    same_bits,
)
from rules import BirderOracle, birder_rounds, numbers

from accordion_hvd import Accordion, StepSchedule, simulate
from accordion_hvd.core.base import Info, consecutive
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops import quantization, random
from accordion_hvd.optimizers import Birder
from accordion_hvd.optimizers.birder import Draw

HALVES = np.array([-1, -0.999, -0.5, -0.01, 0, 0.3, 0.75, 1])
PLACES = [(3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (4, 4)]
"""Numbers of ranks, and of ranks on a machine."""


def placed(rule: Birder, ranks: int, local: int, framework: Framework = NUMPY) -> Ranks:
    world = Ranks(rule, ranks, framework)
    world.hosts = consecutive(ranks, local)
    return world


def signs(packed: np.ndarray, count: int) -> np.ndarray:
    return quantization.unpack_bits(packed, 1, count) * 2.0 - 1


# ------------------------------------------------------------------------------------- one draw
Signs = Callable[[np.ndarray, int], np.ndarray]


def check_unbiased(draw: Signs) -> None:
    """Check the means and variances of 200 000 draws, up to the sampling error.

    These draws differ in position. For 5000 draws that differ in the seed, means are checked.
    """
    count = 200_000
    for u in HALVES:
        bound = 4 * np.sqrt((1 - u**2) / count) + 2**-16
        found = signs(draw(np.full(count, u, np.float32), 7), count)
        assert abs(found.mean() - u) < bound
        assert abs(found.var() - (1 - u**2)) < 2 * bound
    x = np.float32(HALVES)
    seeds = [random.key("unbiased", seed) for seed in range(5_000)]
    found = np.mean([signs(draw(x, seed), x.size) for seed in seeds], 0)
    assert (np.abs(found - x) <= 4 * np.sqrt((1 - x**2) / len(seeds)) + 2**-16).all()


def test_a_random_bit_is_unbiased() -> None:
    check_unbiased(xp.pack_random_signs)


def test_plain_signs_are_found_out() -> None:
    """The check of unbiased draws fails for plain signs, which are biased (negative control)."""
    with pytest.raises(AssertionError):
        check_unbiased(lambda x, seed: xp.pack_signs(x))


@pytest.mark.parametrize("size", [1, 13, 150_001])
def test_a_bit_is_a_comparison_with_the_table(size: int) -> None:
    """Each bit tells whether the table's number is at least (1 - x) / 2, up to rounding of ties."""
    x = np.random.default_rng(size).uniform(-1, 1, size).astype(np.float32)
    x[::3] = 0
    r = numbers(size, 9).astype(float)
    clear = np.abs(np.abs(r - 0.5) - np.abs(x / 2)) > 1e-6
    found = signs(xp.pack_random_signs(x, 9), size)
    np.testing.assert_array_equal(found[clear], np.where(r >= (1 - x) / 2, 1, -1)[clear])


def test_certain_bits_are_certain() -> None:
    x = np.tile(np.float32([-1, 1, np.nextafter(np.float32(1), np.float32(2))]), 100_000)
    for seed in range(5):
        drawn = signs(xp.pack_random_signs(x, random.key(seed)), x.size)
        np.testing.assert_array_equal(drawn, np.sign(x))


# -------------------------------------------------------------------------------------- moments
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_m_never_exceeds_b(framework: Framework) -> None:
    """|m| never exceeds b, and b stays finite, in steps whose scales vary wildly."""
    rng = np.random.default_rng(0)
    world = Ranks(Birder(), 2, framework)
    for _ in range(1000 if framework is NUMPY else 50):
        scale = 10.0 ** rng.uniform(-18, 18, (2, 1, 41))
        steps = world.step(list(np.float32(rng.normal(size=(2, 3, 41)) * scale)))
        assert all(same_bits(mine, steps[0]) for mine in steps)
        for state in world.states:
            m, b = (framework.array(state[key]) for key in ("m", "b"))
            excess = 1e-6 if framework is TENSORFLOW else 0.0
            assert (np.abs(m) <= b * (1 + excess)).all()
            assert np.isfinite(b).all()


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH)))
def test_a_step_taken_back_leaves_ratios_within_bounds(framework: Framework) -> None:
    """After a huge step is taken back, all elements of later steps are still -1 or 1.

    The rounding errors of the subtraction may exceed the previous m and b.
    """
    world = simulate(Birder(), 2)
    rng = np.random.default_rng(1)
    for step in range(8):
        grads = rng.normal(size=(2, 40, 30)) * (1e20 if step == 4 else 1e-5)
        if step == 4:
            grads[1, 0, 0] = np.inf
        found = laws.step(world, framework, [{"w": np.float32(g)} for g in grads])
        if step == 4:
            assert found == [None, None]
        else:
            assert all((np.abs(mine["w"]) == 1).all() for mine in found if mine)


@pytest.mark.parametrize("ranks, local", [(1, 1), (3, 1), (4, 2), (129, 1)])
def test_steady_gradients_give_their_signs(ranks: int, local: int) -> None:
    """Steps are the gradients' signs from the first step on, also on more than 128 ranks."""
    g = np.random.default_rng(2).normal(size=200)
    for within in (None, "bits", "half") if local > 1 else (None,):
        world = placed(Birder(within=within), ranks, local)
        for _ in range(3):
            for step in world.step([g.copy() * (1 + r) for r in range(ranks)]):
                np.testing.assert_array_equal(step, np.sign(g))


@pytest.mark.parametrize("local", [1, 2])
def test_scale_does_not_matter(local: int) -> None:
    rng = np.random.default_rng(3)
    worlds = [placed(Birder(within="bits"), 4, local) for _ in range(2)]
    for _ in range(20):
        grads = rng.normal(size=(4, 500))
        one, other = (w.step(list(grads * f)) for w, f in zip(worlds, (1, 1000), strict=True))
        np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize("slow, rests", [(None, False), (0.99, True)])
def test_a_slower_scale_lets_elements_rest(slow: float | None, rests: bool) -> None:
    """After a single gradient, u falls from 1 to 0 if `beta_b` is set, and stays 1 otherwise."""
    world = Ranks(Birder(beta=0.9, beta_b=slow).dense(), 2)
    steps = [world.step([g, g])[0] for g in [np.ones(30), *np.zeros((80, 30))]]
    assert (np.abs(steps) <= 1).all()
    np.testing.assert_allclose(steps[0], 1)
    np.testing.assert_allclose(steps[-1], 0 if rests else 1, atol=1e-3)


# ------------------------------------------------------------------------------------- two bits
@pytest.mark.parametrize("inner", [0.0625, 0.5])
def test_two_random_bits_are_unbiased(inner: float) -> None:
    """A draw is one of the two levels next to u, with mean u and the variance that follows."""
    count = 200_000
    for u in (*HALVES, inner, -inner, 1.5):
        draw = Draw(7, inner)
        packed, _ = draw.of(np.full(count, u, np.float32))
        found = draw.values(xp, packed, np.zeros(count, np.float32)).astype(float)
        wanted, levels = np.clip(u, -1, 1), np.array([-1, -inner, inner, 1])
        beside = levels[levels <= wanted + 1e-7].max(), levels[levels >= wanted - 1e-7].min()
        assert set(found) <= set(beside)
        spread = np.prod(np.abs(np.array(beside) - wanted))
        bound = 4 * np.sqrt(spread / count) + 2**-16
        assert abs(found.mean() - wanted) < bound
        assert abs(found.var() - spread) < 2 * bound


@pytest.mark.parametrize("ranks, local, within", [(3, 1, None), (4, 2, "bits"), (6, 2, "half")])
def test_steps_have_two_lengths(ranks: int, local: int, within: str | None) -> None:
    world = placed(Birder(within=within, bits=2), ranks, local)
    inner = np.sqrt(0.05 / 1.95 / ranks)
    for grads in np.random.default_rng(6).normal(size=(3, ranks, 500)):
        steps = world.step(list(grads))
        assert all(same_bits(mine, steps[0]) for mine in steps)
        small = np.abs(steps[0]) < 0.9
        assert 0 < small.mean() < 1 and (np.abs(steps[0][~small]) == 1).all()
        np.testing.assert_allclose(np.abs(steps[0][small]), inner, atol=2**-13)


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize(
    "options, told",
    [
        ({"bits": 1.5, "feedback": True}, [2, 2, 2, 0]),
        ({"bits": 0.5, "feedback": True}, [1, 0]),
        ({"bits": 1.5, "feedback": True, "within": "half"}, [2, 2, 2, 0]),
    ],
)
def test_a_fraction_of_bits_is_met_by_turns(
    framework: Framework, options: dict[str, Any], told: list[int]
) -> None:
    """Steps follow the oracle, and no element moves in a silent exchange."""
    rule = Birder(**options)
    local = 2 if rule.within else 1
    world = simulate(rule, 2 * local, local_size=local)
    oracle = BirderOracle(
        2 * local, 1161, rule, local, silent=lambda step: not told[step % len(told)]
    )
    rng = np.random.default_rng(8)
    for step in range(8):
        now = rng.normal(size=(2 * local, 27, 43))
        found = laws.step(world, framework, [{"w": g} for g in now])
        wanted = oracle.step(now.reshape(2 * local, -1), 0.0)
        for mine in found:
            assert mine is not None and found[0] is not None
            assert same_bits(mine["w"], found[0]["w"])
            np.testing.assert_allclose(mine["w"].reshape(-1), wanted, atol=1e-10)
        assert told[step % len(told)] or not wanted.any()
    assert rule.period == 0 and Birder(bits=2).period == 1
    if not rule.within:
        sent = world.exchanges[0].stats()["sent"]
        assert abs(sent / 8 - rule.bits * 1161 / 8) < 30, "bits and flags"


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
def test_a_nan_is_skipped_where_nothing_is_drawn(framework: Framework) -> None:
    """A skipped exchange does not count in the order of turns, but counts in the random seeds."""
    rule = Birder(bits=0.5, feedback=True)
    world, oracle = simulate(rule, 2), BirderOracle(2, 1161, rule, silent=lambda step: step == 2)
    for step, now in enumerate(np.random.default_rng(8).normal(size=(4, 2, 27, 43))):
        if step == 1:
            now[1, 3, 3] = np.nan
        found = laws.step(world, framework, [{"w": g} for g in now])
        if step == 1:
            assert found == [None, None]
            oracle.steps += 1
            continue
        wanted = oracle.step(now.reshape(2, -1), 0.0)
        assert found[0] is not None
        np.testing.assert_allclose(found[0]["w"].reshape(-1), wanted, atol=1e-10)


# ------------------------------------------------------------------------------------- exchanges
def check_mean(rule: Birder, ranks: int, local: int, steps: int = 100) -> None:
    """Check that the mean of many steps is the ranks' mean of u, with m and b held constant."""
    kinds, alike = 16, 64
    u = np.random.default_rng(4).uniform(-1, 1, (ranks, kinds))
    u[:, :3] = 1, -1, 0
    u[0, 3], u[1:, 3] = 1, -1
    world, total = placed(rule, ranks, local), np.zeros(kinds)
    world.step(list(np.zeros((ranks, kinds * alike))))
    states = [{"m": np.repeat(mine, alike), "b": np.ones(kinds * alike)} for mine in u]
    for _ in range(steps):
        world.states = [{**old, **copied(s)} for old, s in zip(world.states, states, strict=True)]
        found = world.step(list(np.zeros((ranks, kinds * alike))))
        assert all(same_bits(mine, found[0]) for mine in found)
        assert (np.abs(found[0]) == 1).all()
        total += found[0].reshape(kinds, alike).mean(1)
    mean = u.mean(0)
    rounding = 2**-12 if rule.within == "half" else 2**-15
    bound = 4.5 * np.sqrt((1 - mean**2) / (steps * alike)) + rounding
    assert (np.abs(total / steps - mean) <= bound).all()


def copied(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: x.copy() for key, x in state.items()}


@pytest.mark.parametrize("within", [None, "bits", "half"])
@pytest.mark.parametrize("ranks, local", PLACES)
def test_both_draws_together_are_unbiased(ranks: int, local: int, within: str | None) -> None:
    if local > 1 or within is None:
        check_mean(Birder(within=within), ranks, local)


def test_signs_of_averages_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xp, "pack_random_signs", lambda x, seed: xp.pack_signs(x))
    with pytest.raises(AssertionError):
        check_mean(Birder(), 3, 1, steps=20)


OFTEN = [(0.5, None), (1, None), (1.9, "bits"), (2, "half")]
"""What `make test` looks at of long random walks."""

SOME = {NUMPY: PLACES, POISONED: PLACES[2:3], TORCH: PLACES[2:], TENSORFLOW: PLACES[2:4]}


@pytest.mark.seldom(tensorflow=lambda places: places != PLACES[2])
@pytest.mark.parametrize("framework, places", combined(SOME))
@pytest.mark.parametrize("within", ["bits", "half"])
@pytest.mark.parametrize("bits, feedback", [(1, False), (1, True), (2, True)])
def test_machines(
    framework: Framework, places: tuple[int, int], within: str, bits: int, feedback: bool
) -> None:
    """Steps equal those of a loop over hosts, ranks and chunks, in any framework.

    One vector does not fill its last chunk; the other one fills fewer chunks than there are.
    """
    ranks, local = places
    rule = Birder(within=within, feedback=feedback, bits=bits)
    for size in (1161, 7):
        world, oracle = (
            placed(rule, ranks, local, framework),
            BirderOracle(ranks, size, rule, local),
        )
        rng = np.random.default_rng(size)
        for _ in range(5):
            grads = rng.normal(size=(ranks, size)) ** 3
            wanted = oracle.step(grads, 0.1)
            for mine in world.step(list(grads)):
                np.testing.assert_array_equal(mine, wanted)


def test_machines_need_not_have_neighbouring_ranks() -> None:
    """The ranks of a host need not be consecutive: all ranks get the signs of equal gradients."""
    u = np.random.default_rng(5).uniform(-1, 1, 600)
    for within in ("bits", "half"):
        world = placed(Birder(within=within, beta=0.99), 6, 3)
        world.hosts = ((0, 4, 5), (1, 2, 3))
        world.step([np.sign(u)] * 6)
        found = world.step([np.sign(u)] * 6)
        assert all(same_bits(mine, found[0]) for mine in found)
        np.testing.assert_array_equal(found[0], np.sign(u))


@pytest.mark.parametrize("within", ["bits", "half"])
@pytest.mark.parametrize("ranks, local", [(4, 2), (6, 3), (4, 4), (4, 1)])
def test_bytes_by_machine(ranks: int, local: int, within: str) -> None:
    """The payload and the bytes between hosts are as predicted.

    With L ranks a host, an exchange that ignores hosts would send L times as many between them.
    """
    rule, size, steps = Birder(within=within), 27 * 43, 3
    world = simulate(rule, ranks, local_size=local)
    for seed in range(steps):
        rng = np.random.default_rng(seed)
        world.step([{"w": rng.normal(size=(27, 43)).astype(np.float32)} for _ in range(ranks)])
    stats, machines = world.exchanges[0].stats(), ranks // local
    rounds = birder_rounds(rule, local)(size, ranks, 4)
    assert stats["payload"] == steps * (8 + sum(moved for _, moved in rounds))
    chunk = -(-size // (8 * ranks))
    between = 2 * (machines - 1) * chunk
    flags = stats["between"] - steps * between
    assert 0 <= flags <= steps * 8 * ranks


def test_uneven_machines_are_refused() -> None:
    given = [{"w": np.ones((40, 30), np.float32)} for _ in range(3)]
    with pytest.raises(ValueError, match="the hosts have 2, 1 ranks, but to exchange"):
        simulate(Birder(within="bits"), 3, local_size=2).step(given)
    assert simulate(Birder(), 3, local_size=2).step(given)[0] is not None


def test_moments_stay_when_ranks_move() -> None:
    """Moments are kept if the ranks of an elastic job move to other hosts.

    The steps after the move are those of the new placement, from the moments before it.
    """
    rule, size = Birder(0.5, within="half"), 40 * 30
    world, rng = simulate(rule, 4, local_size=2), np.random.default_rng(6)
    before, after = (BirderOracle(4, size, rule, local) for local in (2, 4))
    apart = 0
    for step in range(6):
        if step == 3:
            for exchange in world.exchanges:
                exchange.communicator.hosts = consecutive(4, 4)
        grads = rng.normal(size=(4, 40, 30))
        wanted = [oracle.step(grads.reshape(4, -1), 0.1) for oracle in (before, after)]
        apart += step >= 3 and not np.array_equal(*wanted)
        for mine in world.step([{"w": g.copy()} for g in grads]):
            assert mine is not None
            np.testing.assert_array_equal(mine["w"].reshape(-1), wanted[step >= 3])
        for rank, exchange in enumerate(world.exchanges):
            state = exchange.bucket_states[0].state
            np.testing.assert_allclose(state["m"], after.m[rank], atol=1e-12)
            np.testing.assert_allclose(state["b"], after.b[rank], atol=1e-12)
    assert apart == 3, "the places must matter to the steps"


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@pytest.mark.parametrize("within", [None, "half"])
def test_traced(within: str | None) -> None:
    """In a graph with the step as a tensor, steps are NumPy's, and the graph is traced once."""
    import tensorflow as tf

    rule = Birder(within=within, feedback=True)
    ours, oracle, traces = Ranks(rule, 4, TENSORFLOW), Ranks(rule, 4, NUMPY), []

    @tf.function(autograph=False)
    def exchange(tensors: Any, states: Any, step: Any) -> Any:
        traces.append(1)
        return ours.exchange(tensors, states, step)

    states, rng = ours.init(tf.zeros(300, tf.float64)), np.random.default_rng(7)
    for number in range(4):
        grads = rng.normal(size=(4, 300))
        results = exchange([tf.constant(g) for g in grads], states, tf.constant(number, tf.int64))
        states = [state for _, state in results]
        for (mine, _), wanted in zip(results, oracle.step(list(grads)), strict=True):
            np.testing.assert_array_equal(mine.numpy(), wanted)
    assert len(traces) == 1


# ------------------------------------------------------------------------------------- stages
def test_stages_share_moments() -> None:
    """Moments continue across stages, and the dense stage averages u exactly."""
    rule = Birder(beta=0.7)
    assert Accordion(low=rule.dense(), high=rule).output == "update"
    world = simulate(StepSchedule({0: rule.dense(), 3: rule, 6: rule.dense()}, window=1), 2)
    oracles = [BirderOracle(2, 1200, r) for r in (rule.dense(), rule)]
    rng, stages = np.random.default_rng(8), []
    for step in range(8):
        grads = rng.normal(size=(2, 40, 30))
        for oracle in oracles:
            oracle.steps = step
        wanted = [oracle.step(grads.reshape(2, -1), 0.1) for oracle in oracles]
        found = world.step([{"w": g} for g in grads], 0.1)
        stages.append("Exact" not in world.exchanges[0].levels()["w"])
        assert found[1] is not None
        mine = found[1]["w"].reshape(-1)
        np.testing.assert_allclose(mine, wanted[stages[-1]], atol=1e-12)
    assert stages == 3 * [False] + 3 * [True] + 2 * [False]


def test_rescaled_moments() -> None:
    """On another number of ranks, m and b are the means of the old ranks' m and b.

    So |m| <= b still holds. The mean residual of ranks includes the residuals of chunk owners.
    """
    rule = Birder(feedback=True)
    world = Ranks(rule, 3)
    for seed in range(5):
        world.step(list(np.random.default_rng(seed).normal(size=(3, 100))))
    spec = xp.spec(np.zeros(100))
    made = [rule.rescale(world.states, spec, Info(rank=r, size=4)) for r in range(4)]
    for state in made:
        for key in ("m", "b"):
            np.testing.assert_allclose(state[key], np.mean([s[key] for s in world.states], 0))
        assert (np.abs(state["m"]) <= state["b"]).all()
    carried = np.mean([s["error"] for s in world.states], 0)
    carried += np.concatenate([s["server"] for s in world.states])[:100]
    np.testing.assert_allclose(np.mean([s["error"] for s in made], 0), carried)
    alone = rule.rescale_from_one(world.states[1], spec, Info(rank=0, size=1))
    assert same_bits(alone["m"], world.states[1]["m"]) and not alone["error"].any()


# ------------------------------------------------------------------------------------- training
def loss_after(
    rule: Birder, steps: int = 1000, lr: float = 1e-2, apart: float = 0.0, ranks: int = 8
) -> float:
    """Return the loss of a quadratic in 64 dimensions after training.

    Curvatures are 1 to e^3, and gradients have noise of 0.5. lr falls twice by a factor of 10.
    `apart` scales the differences of the ranks' optima.
    """
    rng, size = np.random.default_rng(9), 64
    curvature, optima = np.exp(np.linspace(0, 3, size)), apart * rng.normal(size=(ranks, size))
    x, world = rng.normal(size=size), Ranks(rule, ranks)
    for step in range(steps):
        rate = lr * (1.0 if step < steps / 2 else 0.1 if step < 0.8 * steps else 0.01)
        noise = 0.5 * rng.normal(size=(ranks, size))
        x -= rate * world.step(list(curvature * (x - optima) + noise))[0]
    return float(0.5 * (curvature * (x - optima.mean(0)) ** 2).sum())


def test_converges_where_data_are_alike() -> None:
    """Random signs converge, with hosts or without, and end nearer to the optimum with feedback."""
    rules = [Birder(), Birder(feedback=True), Birder().dense()]
    plain, fed, exact = (loss_after(rule) for rule in rules)
    machines = loss_after(Birder(within="half"), ranks=4)
    assert exact < plain < 1e-2 and exact < machines < 1e-2
    assert fed < 2e-3


def test_different_data_are_a_bias() -> None:
    """With different data, each rank's own normaliser is a known bias, in both stages."""
    assert loss_after(Birder(), 600, apart=1.0, ranks=4) > 5
    assert loss_after(Birder().dense(), 600, apart=1.0, ranks=4) > 5


def wandering(rule: Birder, local: int, steps: int = 400) -> np.ndarray:
    """Return the RMS distance of elements without gradients from their start, in lr: (steps,)."""
    world, rng = placed(rule, 4, local), np.random.default_rng(10)
    moved, found = np.zeros(400), []
    for _ in range(steps):
        grads = rng.normal(size=(4, 400)) + 1
        grads[:, ::2] = 0
        moved += world.step(list(grads))[0]
        found.append(np.sqrt((moved[::2] ** 2).mean()))
    assert moved[1::2].min() > 0, "the others go where they must"
    return np.array(found)


def test_steps_without_gradients_are_fair_coins() -> None:
    """Elements without gradients take independent random steps, as in the paper: a random walk."""
    found = wandering(Birder(), 1)
    np.testing.assert_allclose(found[[99, 399]], [10, 20], rtol=0.15)


@pytest.mark.seldom(where=lambda bits, within: (bits, within) not in OFTEN)
@pytest.mark.parametrize("within", [None, "bits", "half"])
@pytest.mark.parametrize("bits", [0.5, 0.9, 1, 1.9, 2])
def test_feedback_holds_elements_without_gradients(within: str | None, bits: float) -> None:
    """Elements without gradients stay near their start, also if some exchanges send nothing."""
    assert wandering(Birder(within=within, feedback=True, bits=bits), 2).max() < 4


@pytest.mark.parametrize("feedback", [False, True])
def test_draws_of_two_steps_are_independent(feedback: bool) -> None:
    """Draws are independent without feedback; with feedback, the second cancels the first."""
    world = Ranks(Birder(feedback=feedback), 1)
    first, second = (world.step([np.zeros(100_000)])[0] for _ in range(2))
    agree = (first * second).mean()
    assert abs(agree) < 0.02 if not feedback else agree == -1


def test_feedback_tracks_the_sum() -> None:
    """Sums of steps stay within a few steps of sums of u, instead of drifting from them."""
    for within, local in ((None, 1), ("half", 4), ("half", 2), ("bits", 2)):
        rule = Birder(feedback=True, within=within)
        world, exact = (placed(r, 4, local) for r in (rule, rule.dense()))
        rng, apart = np.random.default_rng(11), np.zeros(300)
        for _ in range(100):
            grads = rng.normal(size=(4, 300)) + 0.3
            apart += world.step(list(grads))[0] - exact.step(list(grads))[0]
            assert np.abs(apart).max() <= 6.01


def test_a_slower_scale_ends_what_one_gradient_began() -> None:
    """With `beta_b`, an element comes to rest after its only gradient.

    u does not depend on the gradient's scale, so by default the element moves on for ever.
    """
    for slow, on in ((None, True), (0.99, False)):
        world, late = Ranks(Birder(0.9, feedback=True, beta_b=slow), 2), np.zeros(100)
        for step in range(300):
            grads = np.full((2, 100), 1.0 if step == 0 else 0.0)
            late += world.step(list(grads))[0] * (step >= 200)
        assert (late == 100).all() if on else (np.abs(late) <= 4).all()


def test_the_constructor_shows_the_papers_arguments_first() -> None:
    known = inspect.signature(Birder).parameters.values()
    ours = [x.name for x in known if x.kind is x.KEYWORD_ONLY]
    assert [x.name for x in known][:2] == ["beta", "within"] and len(ours) == 3
    assert repr(Birder().dense()) == "ExactBirder(beta=0.95)"
