"""Tests of PowerSGD against its paper, computed with plain matrices."""

from __future__ import annotations

import math

import laws
import numpy as np
import pytest
from frameworks import TENSORFLOW, Ranks, installed, normals

from accordion_hvd import PowerSGD, StepSchedule, simulate
from accordion_hvd.compressors.powersgd import matrix_shape
from accordion_hvd.core.base import Info
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.cost_model import bytes_sent
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator

# Layers as PyTorch has them: kernels of convolutions are (outputs, inputs, ...).
CHANNELS_FIRST = {
    "dense": (1000, 512),
    "ResNet's stem": (64, 3, 7, 7),
    "AlexNet's stem": (64, 3, 11, 11),
    "ViT's patches": (768, 3, 16, 16),
    "DQN's first layer": (32, 4, 8, 8),
    "3 x 3": (512, 256, 3, 3),
    "1 x 1": (2048, 512, 1, 1),
    "one group per channel": (96, 1, 7, 7),
    "three dimensions": (64, 3, 7, 7, 7),
    "one dimension": (384, 80, 3),
}


@pytest.mark.parametrize("shape", CHANNELS_FIRST.values(), ids=CHANNELS_FIRST)
def test_matrices_are_those_of_the_paper(shape: tuple[int, ...]) -> None:
    """A kernel's matrix has a row per output channel (section 3); that of Keras is transposed."""
    outputs, inputs, *kernel = shape
    rest = math.prod([inputs, *kernel])
    assert matrix_shape(shape) == (outputs, rest)
    if len(shape) > 2 and inputs > 1:
        assert matrix_shape((*kernel, inputs, outputs)) == (rest, outputs)


def test_matrices_of_other_tensors() -> None:
    assert matrix_shape((4,)) == (4, 1) and matrix_shape((1, 9)) == (1, 9)
    assert matrix_shape((768, 12, 64)) == (768, 768)  # Keras' queries: cut after the first axis
    assert matrix_shape((12, 64, 768)) == (768, 768)
    assert matrix_shape((1, 64, 3, 3)) == (192, 3)  # one output: the paper's row sends it all


def test_powersgd_follows_the_paper() -> None:
    """Two ranks follow Algorithms 1 and 2 of the paper, computed with plain (n, r) matrices."""
    rank, ranks, (n, m) = 2, 2, laws.SHAPE
    world = Ranks(PowerSGD(rank), ranks)
    world.states = world.init(np.zeros(laws.SHAPE, np.float32))
    q = world.states[0]["q"].T.astype(np.float64)  # (m, r)
    errors = [np.zeros((n, m)) for _ in range(ranks)]
    for gradients in normals(laws.SHAPE, ranks, steps=6):
        totals = [g + e for g, e in zip(gradients, errors, strict=True)]
        p = np.mean([total @ q for total in totals], 0)
        for j in range(rank):  # Gram-Schmidt
            for i in range(j):
                p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
            p[:, j] /= np.linalg.norm(p[:, j])
        q = np.mean([total.T @ p for total in totals], 0)
        np.testing.assert_allclose(world.step(gradients)[1], p @ q.T, atol=1e-4)
        errors = [total - p @ q.T for total in totals]


def gram_schmidt(x: np.ndarray) -> np.ndarray:
    """Return orthonormal columns that span those of x, in their order."""
    columns: list[np.ndarray] = []
    for column in x.T:
        for done in columns:
            column = column - (done @ column) * done
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, 1)


def test_alternation_follows_the_paper() -> None:
    """Four ranks follow Algorithm 2 of ACP-SGD, computed with plain (n, r) matrices.

    The residual of a rank is the error of the rank's own factor.
    """
    rank, ranks, (n, m) = 3, 4, laws.SHAPE
    world = Ranks(PowerSGD(rank, alternate=True), ranks)
    world.states = world.init(np.zeros(laws.SHAPE, np.float32))
    q = world.states[0]["q_mean"].T.astype(np.float64)  # (m, r)
    p, errors = np.zeros((n, rank)), [np.zeros((n, m)) for _ in range(ranks)]
    for step, gradients in enumerate(normals(laws.SHAPE, ranks, steps=9)):
        totals = [g + e for g, e in zip(gradients, errors, strict=True)]
        if step % 2 == 0:
            q = gram_schmidt(q)
            own = [total @ q for total in totals]
            p = np.mean(own, 0)
            errors = [total - mine @ q.T for total, mine in zip(totals, own, strict=True)]
        else:
            p = gram_schmidt(p)
            own = [total.T @ p for total in totals]
            q = np.mean(own, 0)
            errors = [total - p @ mine.T for total, mine in zip(totals, own, strict=True)]
        for mean in world.step(gradients):
            np.testing.assert_allclose(mean, p @ q.T, atol=1e-4)
        for residual, error in zip(world.residuals(), errors, strict=True):
            assert residual is not None
            np.testing.assert_allclose(residual.reshape(n, m), error, atol=1e-4)


def test_a_skipped_step_does_not_change_the_turn() -> None:
    world, twin = (simulate(PowerSGD(2, alternate=True), 2) for _ in "ab")
    for step, rows in enumerate(normals(laws.SHAPE, 2, steps=5)):
        if step == 3:
            bad = [{"w": row * np.float32(np.nan if rank else 1)} for rank, row in enumerate(rows)]
            assert world.step(bad) == [None, None]
        ours = world.step([{"w": row.copy()} for row in rows])
        theirs = twin.step([{"w": row.copy()} for row in rows])
        assert ours[0] is not None and theirs[0] is not None
        np.testing.assert_allclose(ours[0]["w"], theirs[0]["w"], atol=1e-5)


TURNS = PowerSGD(4, alternate=True), PowerSGD(1, alternate=True), PowerSGD(3)
WIRES = PowerSGD(4, wire="float16"), PowerSGD(2), PowerSGD(3, True, "float16")


@pytest.mark.parametrize("levels", [TURNS, WIRES], ids=["turns", "wires"])
@pytest.mark.parametrize("batched", [False, True])
def test_levels_that_alternate_switch_without_loss(
    batched: bool, levels: tuple[PowerSGD, ...]
) -> None:
    """Switches between alternating levels lose nothing: means plus residuals are the gradients.

    Levels switch after odd and even numbers of steps, with single layers and with batches.
    """
    shapes = {"a": (24, 50), "b": (24, 50), "c": (40, 30)} if batched else {"a": (24, 50)}
    schedule = {0: 0, 1: 1, 4: 0, 6: 2, 7: 0, 8: 1, 9: 2}
    policies = [
        StepSchedule({at: levels[level] for at, level in schedule.items()}, window=1),
        StepSchedule({0: levels[0]}, window=1),
    ]
    for policy in policies:
        world, draw = simulate(policy, 2), np.random.default_rng(0)
        sent = {name: np.zeros(shape) for name, shape in shapes.items()}
        given = {name: np.zeros(shape) for name, shape in shapes.items()}
        for _ in range(12):
            grads = [{k: draw.normal(size=s).astype("f") for k, s in shapes.items()} for _ in "ab"]
            for name in shapes:
                given[name] += (grads[0][name] + grads[1][name]) / 2
            means = world.step(grads)
            assert means[0] is not None and means[1] is not None
            for name in shapes:
                np.testing.assert_array_equal(means[0][name], means[1][name])
                sent[name] += means[0][name]
        for number, name in enumerate(shapes):
            entries = [exchange.bucket_states[number] for exchange in world.exchanges]
            waiting = [
                entry.residual(exchange.info(entry))
                for entry, exchange in zip(entries, world.exchanges, strict=True)
            ]
            mean = (waiting[0] + waiting[1]).reshape(shapes[name]) / 2
            np.testing.assert_allclose(sent[name] + mean, given[name], atol=1e-4)


def test_a_level_that_alternates_takes_over_both_factors() -> None:
    spec = Spec((24, 50), "float32", xp)
    for old in (*TURNS, *WIRES):
        world = Ranks(old, 2)
        for rows in normals(laws.SHAPE, 2, steps=4):
            world.step(rows)
        for new in (*TURNS, *WIRES):
            state = new.warm_start(new.init(spec, Info(name="w")), old, world.states[0])
            keys = ("q_mean", "p_mean") if new.alternate else ("q",)
            for key in keys:
                theirs = world.states[0][key if old.alternate else key[0]]
                if old.alternate and not new.alternate:
                    theirs = world.states[0]["q_mean"]
                same = min(old.rank, new.rank)
                assert state[key].shape[0] == new.rank
                np.testing.assert_array_equal(state[key][:same], theirs[:same])
            kept = new.deactivate(state)
            assert set(kept) == set(keys)


def test_prices_are_means_over_both_turns() -> None:
    for shape in ((24, 50), (500, 400)):
        both, one = (bytes_sent(PowerSGD(4, turn), shape, "float32", 4) for turn in (False, True))
        assert one == both / 2
        for turn, each in ((False, both), (True, one)):
            half = bytes_sent(PowerSGD(4, turn, "bfloat16"), shape, "float32", 4)
            assert half == each / 2
            assert bytes_sent(PowerSGD(4, turn, "float16"), shape, "float32", 4) == half + 1.5 * 4


def test_batches_survive_the_turns() -> None:
    """States of small layers are stacked once; a turn makes no new layout and copies no state."""
    world = simulate(PowerSGD(2, alternate=True), 2)
    layouts = []
    for rows in zip(*(normals((40, 30), 2, seed, steps=6) for seed in range(3)), strict=True):
        world.step([{str(i): row[rank] for i, row in enumerate(rows)} for rank in range(2)])
        layouts.append(world.exchanges[0].layout)
    assert len(layouts[-1].batches[0].entries) == 3
    assert all(layout is layouts[2] for layout in layouts[2:])


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_a_graph_contains_both_turns() -> None:
    """One trace serves both turns and a skipped step, with the means of the simulation."""
    import tensorflow as tf

    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    compressor, shapes = PowerSGD(2, alternate=True), {"v": (40, 50), "w": (30, 50)}
    link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
    tensors = [TensorInfo(name, shape, "float32") for name, shape in shapes.items()]
    exchange = TensorFlowExchange(link, as_policy(compressor), tensors)
    oracle = simulate(compressor, 1)
    exchange.prepare_trace()
    version, run = exchange.version, tf.function(exchange.traced, autograph=False)
    assert not exchange.switching
    streams = [
        [x[0] for x in normals(s, 1, seed, steps=9)] for seed, s in enumerate(shapes.values())
    ]
    streams[1][3] = streams[1][3] * np.nan
    for gradients in zip(*streams, strict=True):
        means = run([tf.constant(x) for x in gradients], tf.constant(0.1))
        rows = dict(zip(shapes, (x.copy() for x in gradients), strict=True))
        wanted = oracle.step([rows])[0]
        for name, mean in zip(shapes, means, strict=True):
            if wanted is None:
                assert np.isnan(mean.numpy()).all()
            else:
                np.testing.assert_allclose(mean.numpy(), wanted[name], atol=1e-4)
        exchange.prepare_trace()
        assert exchange.version == version
    assert run.experimental_get_tracing_count() == 1
    assert (exchange.steps, exchange.skipped) == (9, 1)
    assert exchange.stats()["dense"] == oracle.exchanges[0].stats()["dense"]


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@pytest.mark.parametrize("calls", [1, 4])
def test_bytes_of_both_turns_are_counted(calls: int) -> None:
    import tensorflow as tf

    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
    tensors = [TensorInfo("w", (40, 50), "float32")]
    policy = as_policy(PowerSGD(2, alternate=True))
    exchange, gradient = TensorFlowExchange(link, policy, tensors), tf.ones((40, 50))
    exchange.prepare_trace()
    run = tf.function(exchange.traced, autograph=False)
    for step in range(7):
        run([gradient], tf.constant(0.1))
        if step % calls == 0:
            exchange.account()
    assert exchange.stats()["payload"] == 4 * (8 + 4 * 2 * 40) + 3 * (8 + 4 * 2 * 50)


def test_powersgd_finds_a_low_rank_gradient() -> None:
    """A gradient of rank 2 is exact after a few steps: the power iteration is warm-started."""
    rng = np.random.default_rng(0)
    low = (rng.standard_normal((24, 2)) @ rng.standard_normal((2, 50))).astype(np.float32)
    world = Ranks(PowerSGD(2), 2)
    for _ in range(4):
        mean = world.step([low, low])[0]
    np.testing.assert_allclose(mean, low, atol=1e-4)
    world = Ranks(PowerSGD(2, alternate=True), 2)
    for _ in range(3):  # P is averaged first, then Q in P's span: no residual
        sent = world.step([low, low])[0] + world.step([low, low])[0]
        np.testing.assert_allclose(sent, 2 * low, atol=1e-4)
        np.testing.assert_allclose(world.mean_residual(low.size), 0, atol=1e-4)


def rounded(x: np.ndarray, wire: str) -> np.ndarray:
    """Return x, rounded to 11 significant bits (fp16) or 8 (bfloat16)."""
    mantissa, exponent = np.frexp(x)
    bits = {"float16": 11, "bfloat16": 8}[wire]
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_factors_are_rounded_and_residuals_take_it_up(wire: str) -> None:
    """Two ranks follow the paper with rounded factors, computed with plain matrices.

    A step sends what is rounded twice, by the rank and as a mean. The factors have no numbers that
    are so small beside the largest ones that fp16 would round them more.
    """
    rank, ranks, (n, m) = 3, 2, laws.SHAPE
    world = Ranks(PowerSGD(rank, wire=wire), ranks)
    world.states = world.init(np.zeros(laws.SHAPE, np.float32))
    q = world.states[0]["q"].T.astype(np.float64)
    errors, apart = [np.zeros((n, m)) for _ in range(ranks)], []
    for step, gradients in enumerate(normals(laws.SHAPE, ranks, steps=6)):
        totals = [g + e for g, e in zip(gradients, errors, strict=True)]
        own = [total @ q for total in totals]
        if wire == "float16" and step == 0:  # the ranks do not know each other's norms yet
            units = [2.0 ** np.floor(np.log2(1 / np.linalg.norm(x))) for x in totals]
            own = [unit * x for unit, x in zip(units, own, strict=True)]
        p = gram_schmidt(rounded(np.mean([rounded(x, wire) for x in own], 0), wire))
        q = rounded(np.mean([rounded(total.T @ p, wire) for total in totals], 0), wire)
        sent = world.step(gradients)[1]
        apart.append(np.abs(sent - p @ q.T).max())
        kept = world.residuals()
        for total, residual in zip(totals, kept, strict=True):
            assert residual is not None
            np.testing.assert_allclose(residual.reshape(n, m), total - sent, atol=2e-6)
        errors = [total - sent for total in totals]
        q = world.states[0]["q"].T.astype(np.float64)  # else one flipped bit would stay
    unit = 2.0 ** -{"float16": 11, "bfloat16": 8}[wire]
    assert max(apart) < 8 * unit and np.median(apart) < unit, apart


SIZES = (1e-30, 1e-12, 1e-5, 1.0, 1e6, 1e12)


@pytest.mark.parametrize("ranks", [1, 3, 64])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("alternate", [False, True])
def test_no_gradient_and_no_sum_overflows(
    alternate: bool, native: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of any size, zeros and leaps arrive, also where an engine adds in fp16.

    Mean plus mean residual is the mean gradient, up to fp32 rounding, in each step. In the worst
    case, all ranks have one gradient, whose norm is in one element.
    """
    monkeypatch.setattr(SimulatedCommunicator, "native_fp16_allreduce", native)
    spike = np.zeros((6, 9), np.float32)
    spike[2, 3] = 1
    leaps = (1e12, 1e-20, 0.0, 0.0, 1e9, 1.0)
    for sizes in (leaps, *((size,) * 4 for size in SIZES)):
        for rows in (None, [spike] * ranks):
            world = Ranks(PowerSGD(2, alternate, "float16"), ranks)
            owed, carried = 0.0, np.zeros(spike.size)
            for size, drawn in zip(sizes, normals(spike.shape, ranks), strict=False):
                gradients = [np.float32(size) * x for x in rows or drawn]
                mean = world.step(gradients)[0].reshape(-1).astype(np.float64)
                exact = np.mean([g.astype(np.float64) for g in gradients], 0).reshape(-1)
                owed = max(owed, max(np.abs(g).max() for g in gradients))
                after = world.mean_residual(spike.size)
                assert np.isfinite(mean).all()
                assert np.abs(carried + exact - mean - after).max() <= 1e-6 * owed
                carried = after
            if sizes is not leaps and size > 1e-20:  # the last means bring what was sent
                assert np.linalg.norm(mean) > 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("alternate", [False, True])
def test_training_goes_on_after_a_large_gradient(alternate: bool) -> None:
    """One gradient of one rank is 1e4 times as large; fp16 and fp32 find the same minimum."""
    apart = []
    for wire in ("float32", "float16"):
        world, weights = Ranks(PowerSGD(4, alternate, wire), 4), np.zeros(laws.SHAPE)
        for step, noise in enumerate(normals(laws.SHAPE, 4, steps=150)):
            pulls = [(0.05 * (weights - 1) + 0.01 * x).astype("f") for x in noise]
            pulls[1] *= np.float32(1e4 if step == 20 else 1.0)
            mean = world.step(pulls)[0]
            weights = weights - mean / max(1.0, float(np.linalg.norm(mean)))  # as clipping does
        apart.append(np.linalg.norm(weights - 1))
    assert apart[1] < 1.5 * apart[0] < 0.1 * np.linalg.norm(np.ones(laws.SHAPE)), apart


@pytest.mark.parametrize("alternate", [False, True])
def test_16_bits_take_half_the_bytes(alternate: bool) -> None:
    shapes = {"a": (240, 500), "b": (400, 300)}
    payload = {}
    for wire in ("float32", "float16", "bfloat16"):
        world = simulate(PowerSGD(4, alternate, wire), 2)
        for _ in range(2):
            draw = np.random.default_rng(0)
            grads = {k: draw.normal(size=s).astype("f") for k, s in shapes.items()}
            world.step([{k: x.copy() for k, x in grads.items()} for _ in "ab"])
        payload[wire] = world.exchanges[0].stats()["payload"]
    flags = payload["float32"] - 2 * payload["float32"] + 2 * payload["bfloat16"]
    assert 0 < flags <= 2 * 2 * 8  # a flag and the number of the plan in each group
    assert payload["float16"] == payload["bfloat16"] + 2 * 2 * 4  # a norm for each matrix


def test_the_first_factor_of_a_training_is_in_units_that_all_ranks_know() -> None:
    """In the first step of `alternate`, no norm is known yet; results are those in fp32."""
    gradients = next(normals((40, 30), 3))
    exact = Ranks(PowerSGD(4, True), 3).step([x.copy() for x in gradients])[0]
    found = Ranks(PowerSGD(4, True, "float16"), 3).step(gradients)[0]
    np.testing.assert_allclose(found, exact, atol=2e-3 * np.abs(exact).max())
