"""Tests of averages in parts: against Algorithm 1 of the paper, their bytes, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from frameworks import Ranks, normals

from accordion_hvd import (
    QSGD,
    AdaComp,
    Codec,
    Compressor,
    Dense,
    DiLoCo,
    DoubleSqueeze,
    EFSignSGD,
    Info,
    Int8,
    Momentum,
    Natural,
    OneBit,
    RandomK,
    Threshold,
    TopK,
    parse,
    simulate,
)
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.recording import RecordingCommunicator
from accordion_hvd.ops import numpy

Array = np.ndarray


def signs(x: Array, width: int) -> Array:
    return np.abs(x).mean() * np.where(x >= 0, 1, -1)


def blocks(x: Array, width: int) -> Array:
    rows = x.reshape(-1, width)
    steps = np.abs(rows).max(1, keepdims=True) / 127
    return (np.rint(rows / np.where(steps, steps, 1)) * steps).reshape(-1)


def columns(x: Array, width: int) -> Array:
    rows = x.reshape(-1, width)
    out = np.zeros_like(rows)
    for row, values in zip(out, rows, strict=True):
        for chosen in (values >= 0, values < 0):
            row[chosen] = values[chosen].mean() if chosen.any() else 0
    return out.reshape(-1)


def tenth(x: Array, width: int) -> Array:
    out, index = np.zeros_like(x), np.argsort(-np.abs(x))[: x.size // 10]
    out[index] = x[index]
    return out


Code = Callable[[Array, int], Array]


def algorithm_1(
    gradients: list[list[Array]], first: Code, second: Code, order: Any, length: int, width: int
) -> list[Array]:
    """Return the means of steps by Algorithm 1 in fp64, with one server for each part.

    Args:
        gradients: by step and rank.
        order: function that returns a tensor as a vector, in the order in which it is cut.
        length: length of a part; the last parts are padded with zeros.
        width: number of neighbours that share a scale.
    """
    ranks, size = len(gradients[0]), gradients[0][0].size
    e = [np.zeros(ranks * length) for _ in range(ranks)]
    s, real, means = np.zeros(ranks * length), np.arange(ranks * length) < size, []
    parts = [slice(j * length, (j + 1) * length) for j in range(ranks)]
    for now in gradients:
        padded = [np.pad(order(g).astype(np.float64), (0, len(s) - size)) for g in now]
        v = [g + error for g, error in zip(padded, e, strict=True)]
        sent = [np.concatenate([first(x[part], width) for part in parts]) for x in v]
        e = [(x - c) * real for x, c in zip(v, sent, strict=True)]
        w = (np.mean(sent, 0) + s) * real
        c = np.concatenate([second(w[part], width) for part in parts])
        s = (w - c) * real
        means.append(c[:size])
    return means


def by_columns(x: Array) -> Array:
    return x.T.reshape(-1)


METHODS = [
    (DoubleSqueeze(EFSignSGD()), signs, signs, np.ravel, 304, 304),
    (DoubleSqueeze(EFSignSGD()), signs, signs, np.ravel, 184, 184),  # 8 elements of padding
    (DoubleSqueeze(Int8()), blocks, blocks, np.ravel, 304, 152),
    (DoubleSqueeze(TopK(0.1)), tenth, tenth, np.ravel, 304, 0),
    (DoubleSqueeze(OneBit()), columns, columns, by_columns, 312, 24),
    (DoubleSqueeze(EFSignSGD(), Int8(64)), signs, blocks, np.ravel, 320, 64),
    (DoubleSqueeze(TopK(0.1), EFSignSGD()), tenth, signs, np.ravel, 304, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    "method, first, second, order, length, width", METHODS,
    ids=[f"{method}-{length}-{width}" for method, *_, length, width in METHODS],
)  # fmt: skip
def test_it_is_algorithm_1(
    method: DoubleSqueeze, first: Code, second: Code, order: Any, length: int, width: int
) -> None:
    shape, ranks = (24, 38), -(-24 * 38 // length)
    gradients = [now for now in normals(shape, ranks, seed=3, steps=5)]
    world = Ranks(method, ranks)
    wanted = algorithm_1(gradients, first, second, order, length, width)
    for now, mean in zip(gradients, wanted, strict=True):
        found = world.step(now)[0]
        np.testing.assert_allclose(order(found), mean, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("codec", [QSGD(2), Natural()], ids=repr)
def test_no_two_draws_are_the_same(codec: Codec) -> None:
    """With equal parts on equal ranks, equal random numbers would give equal means of parts.

    They depend on the step and the name only, so that a resumed training draws them again.
    """
    part = np.full((2, 64), 0.3, np.float32)
    part[0, 0] = 1.0
    gradients = [np.concatenate([part] * 4)] * 4
    worlds = [Ranks(DoubleSqueeze(codec), 4) for _ in range(2)]
    first, again = (world.step(gradients)[0] for world in worlds)
    assert len({x.tobytes() for x in first.reshape(4, -1)}) == 4
    np.testing.assert_array_equal(first, again)
    assert (worlds[0].step(gradients)[0] != first).any()


def test_the_second_pass_draws_other_numbers_than_the_first() -> None:
    """An owner rounds the mean independently of its own message: errors do not correlate."""
    x = np.full(4096, 0.3, np.float32)
    x[::512] = 1.0
    world, errors = Ranks(DoubleSqueeze(QSGD(2)), 2), []
    for step in range(50):
        mine = Ranks(QSGD(2), 1, name="w")
        mine.steps = step
        own = mine.step([x])[0][:2048]  # the part of rank 0 in its own first message
        mean = world.step([x, x])[0][:2048]
        errors.append(np.mean((own - own.mean()) * (mean - mean.mean())) / own.var())
    assert 0.35 < np.mean(errors) < 0.65  # of two ranks' messages, one is the owner's


LAYERS = [(64, 64, 3, 3), (128, 512, 1, 1), (256, 256, 3, 3), (1000, 512)]
"""Some layers of a ResNet."""

FEWER = {QSGD(4): 7.5, Int8(): 3.9, EFSignSGD(): 30.0, OneBit(): 12.0, TopK(0.01): 60.0}
"""How many times fewer bytes are sent than without compression, at least."""


def sent_by(compressor: Compressor, ranks: int) -> float:
    """Return the bytes that one of `ranks` ranks sends for `LAYERS` in a step."""
    link, traffic = RecordingCommunicator(numpy, ranks), Traffic()
    for shape in LAYERS:
        gradient, info = np.ones(shape, np.float32), Info(0, 0, ranks, "w", shape=shape)
        state = compressor.init(numpy.spec(gradient), info)
        link.run("w", compressor.exchange(gradient, state, info), traffic)
    return traffic.sent


@pytest.mark.parametrize("codec", FEWER, ids=repr)
def test_bytes_do_not_grow_with_the_ranks(codec: Codec) -> None:
    sent = {ranks: sent_by(DoubleSqueeze(codec), ranks) for ranks in (4, 16, 64)}
    assert sent[16] == pytest.approx(sent[64], rel=0.07)
    assert sent[4] < sent[16]
    for ranks, size in sent.items():
        assert sent_by(Dense(), ranks) / size >= FEWER[codec]
    assert sent_by(codec, 64) > 16 * sent[64]  # gathered


@pytest.mark.parametrize("codec", [OneBit(), EFSignSGD(), Int8(), TopK(0.1)], ids=repr)
def test_small_tensors_that_share_a_call_are_cut_alike(codec: Codec) -> None:
    names = ["w0", "w1", "w2"]
    world = simulate(DoubleSqueeze(codec), 3)
    alone = [Ranks(DoubleSqueeze(codec), 3) for _ in names]
    for now in normals((3, 32, 33), 3, steps=3):
        means = world.step([dict(zip(names, g.copy(), strict=True)) for g in now], lr=0.1)[0]
        assert means is not None
        assert len(world.exchanges[0].layout.batches) == 1
        for i, name in enumerate(names):
            wanted = alone[i].step([g[i] for g in now])[0]
            np.testing.assert_array_equal(means[name], wanted)


def test_tensors_of_any_shape_share_a_call_if_nothing_is_owed() -> None:
    """Codecs without residuals encode them as one vector; a residual needs tensors of one shape."""
    assert DoubleSqueeze(QSGD(4)).batching == DoubleSqueeze(QSGD(4), Natural()).batching == "any"
    assert DoubleSqueeze(QSGD(4), TopK(0.1)).batching == "alike"
    assert DoubleSqueeze(TopK(0.1), QSGD(4)).batching == "alike"


def test_the_codec_of_means_must_accept_the_tensor_too() -> None:
    @dataclass(frozen=True)
    class Wide(QSGD):
        def accept(self, spec: Any, name: str) -> None:
            if spec.size < 100:
                raise ValueError(f"{name} has less than 100 elements")

    spec = numpy.spec(np.ones((9, 9), np.float32))
    DoubleSqueeze(QSGD(4)).accept(spec, "w")
    for method in (DoubleSqueeze(Wide(4)), DoubleSqueeze(QSGD(4), Wide(4))):
        with pytest.raises(ValueError, match="w has less than 100 elements"):
            method.accept(spec, "w")


def test_the_codec_of_means_is_the_one_that_serves_the_tensor() -> None:
    @dataclass(frozen=True)
    class ByShape(QSGD):
        def specialize(self, info: Info) -> Codec:
            return QSGD(info.shape[0])

    gradients = next(normals((8, 48), 3))
    means = [
        Ranks(DoubleSqueeze(QSGD(4), codec), 3).step([x.copy() for x in gradients])[0]
        for codec in (QSGD(8), ByShape(2), QSGD(2))
    ]
    np.testing.assert_array_equal(means[0], means[1])
    assert (means[0] != means[2]).any()


def test_owners_add_in_the_order_of_ranks() -> None:
    """In fp32, 1e8 - 1e8 + 1 is 1, and 1 - 1e8 + 1e8 is 0."""
    gradients = [np.full((4, 6), x, np.float32) for x in (3e8, -3e8, 3.0)]
    mean = Ranks(DoubleSqueeze(TopK(1.0)), 3).step(gradients)[0]
    np.testing.assert_allclose(mean, 1.0, rtol=1e-6)


@pytest.mark.parametrize("bad", ["qsgd", QSGD, Threshold(1.0), RandomK(0.1), Dense(), AdaComp()])
def test_a_mean_needs_such_a_codec_too(bad: Any) -> None:
    with pytest.raises(ValueError, match="DoubleSqueeze: mean is .* fixed size"):
        DoubleSqueeze(QSGD(4), bad)


def test_what_covers_parts_only_is_refused_where_it_must_cover_tensors() -> None:
    biased = DoubleSqueeze(EFSignSGD())
    with pytest.raises(ValueError, match="Momentum: compressor is DoubleSqueeze"):
        Momentum(biased)
    with pytest.raises(ValueError, match="DiLoCo: compressor is .* with residuals, DoubleSqueeze"):
        DiLoCo(4, compressor=biased)
    DiLoCo(4, compressor=DoubleSqueeze(QSGD(4)))
    Momentum(DoubleSqueeze(QSGD(4)))


def test_spec_strings() -> None:
    assert parse("doublesqueeze:qsgd:4") == DoubleSqueeze(QSGD(4))
    assert parse("DoubleSqueeze(qsgd(2), mean=qsgd(4))") == DoubleSqueeze(QSGD(2), QSGD(4))


@pytest.mark.parametrize(("codec", "bits"), [(Int8(), 8), (QSGD(4), 4), (EFSignSGD(), 1)], ids=repr)
@pytest.mark.parametrize("size", [64, 4400, 70_001])
def test_parts_are_cut_where_they_take_the_fewest_bytes(codec: Codec, bits: int, size: int) -> None:
    """No number of runs takes less; a run has whole bytes, and costs as much as 64 bits."""
    ranks = 4
    found = DoubleSqueeze(codec)._cut((size,), ranks)
    most, costs = codec.run((size,)), []
    for runs in range(1, 2 + 3 * size // (ranks * most)):
        width = -(-size // (ranks * runs))
        while runs * width % 8:
            width += 1
        if width <= most:
            costs.append(runs * width * bits + 64 * runs)
    assert found.length * bits + 64 * found.runs == min(costs)
    assert found.width <= most and found.length % 8 == 0 and ranks * found.length >= size
