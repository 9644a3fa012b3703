"""Laws of residuals that are stored in bfloat16 (`residual_dtype`)."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, installed, parameters, same_bits

from accordion_hvd import (
    QSGD,
    Accordion,
    Compressor,
    Dense,
    DoubleSqueeze,
    Fixed,
    LocalSGD,
    PowerSGD,
    StepSchedule,
    TopK,
    TwoLevel,
    parse,
    simulate,
)
from accordion_hvd.core.base import Info, widened
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import Batch, BucketState, TensorInfo
from accordion_hvd.ops import namespace, quantization, random
from accordion_hvd.resolve import resolve
from accordion_hvd.simulation import one_process
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, World
from accordion_hvd.validate import Use, validate

SHAPES = {"a": (24, 50), "b": (24, 50), "large": (300, 260), "bias": (7,)}
FEEDBACK = [case for case in CASES if case.feedback]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have simulated ranks store their residuals in bfloat16."""
    kind = functools.partial(Exchange, residual_dtype="bfloat16")
    monkeypatch.setattr(one_process, "Exchange", kind)


def gradients(ranks: int, step: int, framework: Framework = NUMPY) -> list[dict[str, Any]]:
    return [
        {
            name: framework.tensor(
                np.random.default_rng([step, rank, i]).standard_normal(shape).astype(np.float32)
            )
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        for rank in range(ranks)
    ]


def train(world: World, steps: range, framework: Framework = NUMPY) -> list[Any]:
    return [world.step(gradients(len(world._policies), s, framework), 0.1) for s in steps]


def entries(world: World) -> list[BucketState]:
    return [entry for exchange in world.exchanges for entry in exchange.bucket_states]


def words(world: World) -> list[np.ndarray]:
    """Return the stored residuals of all ranks and buckets."""
    found = [entry.stored["error"] for entry in entries(world) if "error" in (entry.stored or {})]
    return [np.array(namespace(x).to_numpy(x)) for x in found]


def unit(x: np.ndarray) -> np.ndarray:
    """Return the distance of the neighbours of x in bfloat16."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)


@dataclass
class Rounding:
    """A step's exact residuals, and those that were stored."""

    exact: np.ndarray
    stored: np.ndarray


@pytest.fixture
def roundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rounding]]:
    """Record the roundings of the steps of all batches."""
    found: list[Rounding] = []
    plain = Batch.narrowed

    def recorded(batch: Batch, state: Any, info: Info) -> Any:
        compressor = batch.first.compressor
        exact = compressor.residual(state)
        if exact is None:
            return plain(batch, state, info)
        exact = exact.copy()
        new = plain(batch, state, info)
        assert compressor.residual(widened(new)) is not None
        found.append(Rounding(exact, compressor.residual(widened(new)).reshape(exact.shape)))
        return new

    monkeypatch.setattr(Batch, "narrowed", recorded)
    yield found


# -------------------------------------------------------------------------------------- rounding
@pytest.mark.parametrize("case", FEEDBACK, ids=lambda case: case.name)
@pytest.mark.seldom(where=lambda case: case not in FEEDBACK[::6])
def test_a_stored_residual_is_within_one_unit(case: Case, roundings: list[Rounding]) -> None:
    world = simulate(case.compressor, ranks=2)
    train(world, range(4))
    assert roundings and all(x.dtype == np.int16 for x in words(world))
    for row in roundings:
        assert (np.abs(row.stored - row.exact) < unit(row.exact)).all()


def deviation(roundings: list[Rounding]) -> float:
    """Return the mean error of many steps, in units of its standard error."""
    errors = [((row.stored - row.exact) / unit(row.exact)).mean() for row in roundings]
    assert len(errors) == 1000
    return abs(np.mean(errors)) / (np.std(errors) / math.sqrt(len(errors)))


@pytest.mark.parametrize("spec", ["topk:0.05", "powersgd:1"])
def test_errors_have_no_mean(spec: str, roundings: list[Rounding]) -> None:
    """Over 1,000 steps, the mean error lies within three standard errors of zero."""
    world = simulate(parse(spec), ranks=1)
    for step in range(1000):
        world.step([{"w": np.random.default_rng(step).standard_normal((32, 40), np.float32)}])
    assert deviation(roundings) < 3


@pytest.mark.parametrize("bits", [0x0000, 0x7FFF])
def test_errors_of_other_roundings_have_a_mean(
    bits: int, roundings: list[Rounding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law sees a rounding toward zero, and one that sends ties away from zero.

    Ties are frequent: the gradients are multiples of half a unit.
    """

    def planted(x: np.ndarray, names: Any, seed: Any) -> np.ndarray:
        whole = (np.ascontiguousarray(x).view(np.uint32) + np.uint32(bits + (bits > 0))) >> 16
        return whole.astype(np.uint16).view(np.int16)

    monkeypatch.setattr(NUMPY.xp, "narrow", planted)
    world = simulate(TopK(0.05), ranks=1)
    for step in range(1000):
        draws = np.random.default_rng(step).integers(256, 512, (32, 40))
        world.step([{"w": draws.astype(np.float32) / 2**9}])
    assert deviation(roundings) > 3


def test_every_neighbour_is_drawn_as_often_as_it_is_near() -> None:
    """Over the whole table, a value is rounded up as often as the law says, exactly."""
    noise = quantization.sixteens()[: quantization.TABLE]
    assert (np.bincount(noise) == quantization.TABLE >> 16).all()
    x = np.full(1 << 14, 1 + 2.0**-9, np.float32)  # a quarter of a unit above 1
    ups = [(quantization.widen(quantization.narrow(x, ["w"], s)) > 1).mean() for s in range(200)]
    assert abs(np.mean(ups) - 0.25) < 3 * np.std(ups) / math.sqrt(len(ups))


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
@pytest.mark.parametrize(
    "case", [case for case in FEEDBACK if case.bitwise], ids=lambda case: case.name
)
@pytest.mark.seldom(where=lambda case: case not in FEEDBACK[::6])
def test_frameworks_store_the_same_words(framework: Framework, case: Case) -> None:
    worlds = [simulate(case.compressor, ranks=2) for _ in range(2)]
    for world, each in zip(worlds, (NUMPY, framework), strict=True):
        train(world, range(3), each)
    for mine, other in zip(*map(words, worlds), strict=True):
        assert same_bits(mine, other)


def test_ranks_steps_and_tensors_have_numbers_of_their_own() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    x[1] = x[0]
    draws = [
        quantization.narrow(x, ["a", "b"], random.key("residual", rank, step)).reshape(2, -1)
        for rank, step in itertools.product(range(2), range(2))
    ]
    rows = [row for draw in draws for row in draw]
    assert all((a != b).any() for a, b in itertools.combinations(rows, 2))


# --------------------------------------------------------------------------- steps and checkpoints
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("spec", ["topk:0.05", "powersgd:2", "dgc:0.05"])
def test_a_skipped_step_leaves_every_bit(framework: Framework, spec: str) -> None:
    with framework.running():
        world = simulate(parse(spec), ranks=2)
        train(world, range(2), framework)
        before = words(world)
        given = gradients(2, 2, framework)
        bad = np.full(SHAPES["large"], np.nan, np.float32)
        given[1]["large"] = framework.tensor(bad)
        world.step(given)
        assert all(map(same_bits, words(world), before))
        train(world, range(3, 4), framework)


def test_absent_tensors_keep_their_words() -> None:
    world = simulate(TopK(0.05), ranks=2)
    train(world, range(2))
    before = words(world)
    given: Any = [{**row, "b": None} for row in gradients(2, 2)]
    means = world.step(given)
    assert means[0] is not None and means[0]["b"] is None
    names = [entry.bucket.name for entry in entries(world) if "error" in (entry.stored or {})]
    same = [same_bits(*pair) for pair in zip(words(world), before, strict=True)]
    assert same == [name == "b" for name in names]


def snapshots(world: World) -> list[dict[str, Any]]:
    return [checkpoint.snapshot(exchange) for exchange in world.exchanges]


def resumed(compression: Any, saved: list[dict[str, Any]], framework: Framework = NUMPY) -> World:
    """Return simulated ranks that have taken over snapshots."""
    world = simulate(compression, ranks=len(saved))
    train(world, range(1), framework)
    for exchange, row in zip(world.exchanges, saved, strict=True):
        checkpoint.adopt(exchange, row)
    return world


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize(
    "compression",
    [TopK(0.05), PowerSGD(2), StepSchedule({0: TopK(0.05), 3: PowerSGD(1)}, window=1)],
    ids=repr,
)
def test_a_resumed_training_draws_the_same_numbers(framework: Framework, compression: Any) -> None:
    whole = simulate(compression, ranks=2)
    train(whole, range(2), framework)
    saved = snapshots(whole)
    assert saved[0]["about"]["residual_dtype"] == "bfloat16"
    rows = {k: v for k, v in saved[0]["tensors"].items() if k.endswith("/error")}
    assert rows and all(framework.xp.dtype(x) == "int16" for x in rows.values())
    second = resumed(compression, saved, framework)
    for world in (whole, second):
        train(world, range(2, 6), framework)
    assert all(map(same_bits, words(whole), words(second)))


@pytest.mark.parametrize("spec", ["topk:0.05", "powersgd:2"])
def test_checkpoints_convert_the_dtype(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def residuals(world: World) -> list[np.ndarray]:
        found = [entry.compressor.residual(entry.state or {}) for entry in entries(world)]
        return [x.astype(np.float64) for x in found if x is not None]

    short = simulate(parse(spec), ranks=2)
    train(short, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(one_process, "Exchange", Exchange)
        long = resumed(parse(spec), snapshots(short))
        assert all(map(np.array_equal, residuals(short), residuals(long)))
        assert not words(long) or all(x.dtype == np.float32 for x in words(long))
        train(long, range(3, 5))
    again = resumed(parse(spec), snapshots(long))
    assert words(again) and all(x.dtype == np.int16 for x in words(again))
    for mine, exact in zip(residuals(again), residuals(long), strict=True):
        assert (np.abs(mine - exact) < unit(exact)).all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_get_the_mean(ranks: int) -> None:
    """The mean residual over the ranks stays the same, up to the rounding of what is stored."""
    old, new = simulate(TopK(0.05), ranks=2), simulate(TopK(0.05), ranks=ranks)
    train(old, range(2))
    train(new, range(1))
    parts = [checkpoint.expanded(x, checkpoint.describe(x)) for x in old.exchanges]
    for exchange in new.exchanges:
        pairs = zip(exchange.bucket_states, zip(*parts, strict=True), strict=True)
        states = [checkpoint.merged(exchange, entry, saved) for entry, saved in pairs]
        checkpoint.restoring(exchange, states, checkpoint.describe(old.exchanges[0]))()

    def mean(world: World) -> list[np.ndarray]:
        rows = [[e.residual(x.info(e)) for e in x.bucket_states] for x in world.exchanges]
        return [np.mean(x, 0) for x in zip(*rows, strict=True) if x[0] is not None]

    assert words(new)[0].dtype == np.int16
    for mine, exact in zip(mean(new), mean(old), strict=True):
        assert (np.abs(mine - exact) < unit(exact)).all()


@pytest.mark.parametrize(
    "levels", [(TopK(0.05), PowerSGD(1)), (PowerSGD(2), PowerSGD(1)), (TopK(0.05), Dense()),
               (TwoLevel(TopK(0.05)), TopK(0.05))], ids=repr,
)  # fmt: skip
def test_changes_of_level_lose_no_more_than_roundings(levels: tuple[Any, Any]) -> None:
    """Means and residuals add up to the gradients, except for a unit a step."""
    schedule = StepSchedule({0: levels[0], 2: levels[1], 4: levels[0]}, window=1)
    world = simulate(schedule, ranks=2, local_size=2)
    given, means, size = 0.0, 0.0, 0.0
    for step in range(6):
        rows = gradients(2, step)
        given = given + np.mean([row["large"].astype(np.float64) for row in rows], 0)
        row = world.step(rows)[0]
        assert row is not None
        means = means + row["large"].astype(np.float64)
        size += float(np.abs(given - means).max())
    left = [e.residual(x.info(e)) for x in world.exchanges for e in x.bucket_states
            if e.bucket.name == "large"]  # fmt: skip
    owed = np.zeros(SHAPES["large"]) if left[0] is None else np.mean(left, 0)
    np.testing.assert_allclose(means + owed, given, atol=2 * size * 2.0**-7)


# ----------------------------------------------------------------------------------------- memory
SIDE = 512


def held(compression: Any, dtype: str) -> float:
    """Return the bytes per parameter that PyTorch holds after steps, gradients in bf16 included."""
    import torch

    def allocated() -> int:
        gc.collect()
        found = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in found}.values())

    before = allocated()
    link = SimulatedCommunicator(Hub(1), 0, TORCH.xp)
    tensors = [TensorInfo(name, (SIDE, SIDE), "bfloat16") for name in ("a", "b")]
    exchange = Exchange(link, resolve(compression).serving, tensors, residual_dtype=dtype)
    given = [torch.zeros(SIDE, SIDE, dtype=torch.bfloat16) for _ in tensors]
    for step in range(3):
        for grad in given:
            grad.normal_(generator=torch.Generator().manual_seed(step))
        exchange.begin(0.1)
        exchange.give(given)
        assert exchange.finish()
        for grad, mean in zip(given, exchange.means(), strict=True):
            grad.copy_(mean)
        for batch in exchange.layout.batches:
            batch.mean = None
    del grad, mean
    return (allocated() - before) / (len(given) * SIDE**2)


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "bytes_"), [("powersgd:1", 2), ("topk:0.01", 2), ("dgc:0.01", 6)])
def test_bytes_held_per_parameter(spec: str, bytes_: int, dtype: str) -> None:
    """With gradients in bf16, PowerSGD holds four bytes in all; six with residuals in fp32."""
    wanted = 2 + bytes_ + (2 if dtype == "float32" else 0)
    assert wanted <= held(parse(spec), dtype) < wanted + 0.1
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert f"| {'fp32' if dtype == 'float32' else 'bfloat16'} | {wanted} |" in page


# ----------------------------------------------------------------------------------------- refusals
USE = Use("accordion_hvd.torch", 2, 2)


@pytest.mark.parametrize("dtype", ["float16", "bf16", None, 16])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="residual_dtype is .* one of 'float32', 'bfloat16'"):
        validate(resolve(TopK(0.1)), replace(USE, residual_dtype=dtype))


def test_averaged_models_have_no_such_residuals() -> None:
    with pytest.raises(ValueError, match="must be 'float32' with LocalSGD.*averages models"):
        validate(resolve(LocalSGD(2)), replace(USE, residual_dtype="bfloat16"))
    validate(resolve(Fixed(Dense())), replace(USE, residual_dtype="bfloat16"))


WHOLE = [TensorInfo("w", (64, 64), "float32")]


def test_a_residual_of_another_name_is_refused() -> None:
    class Own(TopK):
        def init(self, spec: Any, info: Info) -> Any:
            return {"rest": super().init(spec, info)["error"]}

        def residual(self, state: Any) -> Any:
            return state["rest"]

        def with_residual(self, state: Any, residual: Any) -> Any:
            return {"rest": residual}

    told = "residual_dtype is 'bfloat16', but must be 'float32', because its residual is not"
    server = DoubleSqueeze(QSGD(4), TopK(0.1))
    for method in (Own(0.1), server, TwoLevel(server), Accordion(Own(0.1), TopK(0.1))):
        link = SimulatedCommunicator(Hub(4, ((0, 1), (2, 3))), 0, NUMPY.xp)
        with pytest.raises(ValueError, match=told):  # before the first step
            Exchange(link, resolve(method).serving, WHOLE, residual_dtype="bfloat16")
        Exchange(link, resolve(method).serving, WHOLE)


@pytest.mark.parametrize("compressor", [Dense(), parse("qsgd:4"), parse("ef21(topk(0.05))")])
def test_without_a_residual_nothing_changes(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Callable[[], Any] | Any] = [train(simulate(compressor, ranks=2), range(3))]
    monkeypatch.setattr(one_process, "Exchange", Exchange)
    results.append(train(simulate(compressor, ranks=2), range(3)))
    for mine, other in zip(*results, strict=True):
        for name, mean in mine[0].items():
            assert same_bits(mean, other[0][name])


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@pytest.mark.parametrize(
    "compression", [TopK(0.05), Accordion(low=TopK(0.2), high=TopK(0.05), window=2)], ids=repr
)
def test_a_graph_stores_words_in_its_variables(compression: Any) -> None:
    """A graph's steps, a skipped one among them, leave the words of steps outside of graphs."""
    import tensorflow as tf

    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    policy: Any = copy.deepcopy(resolve(compression).serving)
    link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
    tensors = [TensorInfo(name, shape, "float32") for name, shape in SHAPES.items()]
    exchange: Any = TensorFlowExchange(link, policy, tensors, residual_dtype="bfloat16")
    world = simulate(compression, ranks=1)
    for step in range(5):
        rows = gradients(1, step)
        if step == 2:
            rows[0]["a"][0] = np.nan
        exchange.catch_up(0.1)
        run = tf.function(exchange.traced, autograph=False)
        run([tf.constant(rows[0][name]) for name in SHAPES], tf.constant(0.1))
        world.step(rows, 0.1)
        stored = [e.stored["error"] for e in exchange.bucket_states if "error" in e.stored]
        assert all(isinstance(x, tf.Variable) and x.dtype == tf.int16 for x in stored)
        for mine, other in zip([x.numpy() for x in stored], words(world), strict=True):
            assert same_bits(mine, other)
