"""Tests of codecs and their wrappers: error feedback, EF21, DIANA and momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import laws
import numpy as np
import pytest
from alternating import Alternating
from frameworks import NUMPY, Framework, Ranks, exact_mean, normals, parameters, same_bits

from accordion_hvd import (
    BF16,
    COLD,
    DGC,
    EF21,
    FP16,
    QSGD,
    WAGMA,
    AdaComp,
    Codec,
    Compressor,
    Dense,
    Diana,
    EFSignSGD,
    ErrorFeedback,
    Gathered,
    Info,
    Int8,
    Momentum,
    Natural,
    OneBit,
    RandomK,
    SignSGD,
    Threshold,
    TopK,
    TwoLevel,
    simulate,
)
from accordion_hvd.core.codec import Message, Shifted, parse
from accordion_hvd.simulation.one_process import World

CODECS = [
    TopK(0.1),
    TopK(0.1, "float16"),
    Threshold(1.0),
    AdaComp(50),
    Int8(),
    EFSignSGD(),
    OneBit(),
    QSGD(4),
    Natural(),
    RandomK(0.1),
    Dense(),
    FP16(),
    BF16(),
]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def message_of(codec: Codec, x: np.ndarray, framework: Framework) -> Any:
    """Return the message that encodes x, and the decoded tensor."""
    layout = codec.layout(x.shape)
    message = codec.encode(framework.tensor(x.reshape(layout)), Info())
    parsed = parse(codec, message, layout, 0)
    room = framework.tensor(np.zeros(layout, np.float32))
    return message, framework.array(codec.decode(parsed, room, Info())).reshape(x.shape)


@by_codec
@pytest.mark.parametrize("framework", parameters())
def test_a_codec_is_usable_by_itself(codec: Codec, framework: Framework) -> None:
    """A decoded message equals the mean that one rank alone returns for the same gradient."""
    (gradient,) = next(normals(laws.SHAPE, 1))
    _, meaning = message_of(codec, gradient, framework)
    wanted = Ranks(codec, 1, framework, name="").step([gradient])[0]
    np.testing.assert_allclose(meaning, wanted, atol=1e-6)
    assert np.abs(meaning - gradient).max() <= np.abs(gradient).max()


@by_codec
@pytest.mark.parametrize("framework", parameters())
def test_the_mean_is_that_of_meanings(codec: Codec, framework: Framework) -> None:
    """`Codec.mean` of several messages equals the mean of the decoded messages."""
    gradients, layout = next(normals(laws.SHAPE, 3)), codec.layout(laws.SHAPE)
    parsed, meanings = [], []
    for gradient in gradients:
        message, meaning = message_of(codec, gradient, framework)
        parsed.append(parse(codec, message, layout, 0))
        meanings.append(meaning.reshape(layout))
    room = framework.tensor(np.zeros(layout, np.float32))
    mean = framework.array(codec.mean(parsed, room, Info()))
    np.testing.assert_allclose(mean, np.mean(meanings, 0), atol=1e-5)


@by_codec
def test_what_is_removed_is_the_meaning(codec: Codec) -> None:
    (gradient,) = next(normals(laws.SHAPE, 1))
    layout = codec.layout(laws.SHAPE)
    message, meaning = message_of(codec, gradient, NUMPY)
    parsed = parse(codec, message, layout, 0)
    rest = codec.remove(gradient.reshape(layout).copy(), parsed, Info())
    np.testing.assert_allclose(rest, (gradient - meaning).reshape(layout), atol=1e-6)


@pytest.mark.parametrize("framework", parameters())
def test_feedback_is_the_same_whoever_adds_it(framework: Framework) -> None:
    one, other = (Ranks(c, 2, framework) for c in (TopK(0.1), ErrorFeedback(TopK(0.1))))
    for gradients in normals(laws.SHAPE, 2, steps=4):
        for a, b in zip(one.step(gradients), other.step(gradients), strict=True):
            assert same_bits(a, b)


def test_without_feedback_the_rest_is_lost() -> None:
    world = Ranks(Gathered(TopK(0.1)), 1)
    (gradient,) = next(normals(laws.SHAPE, 1))
    first, second = world.step([gradient])[0], world.step([gradient])[0]
    assert same_bits(first, second) and np.count_nonzero(first) == 120
    assert world.residuals() == [None]


@dataclass(frozen=True)
class Rounded(Codec):
    """A codec as short as possible: it rounds to integers, and decodes one message at a time."""

    contractive: ClassVar[bool] = True

    def encode(self, x: Any, info: Info) -> Message:
        return (np.rint(x).astype(np.int8),)

    def decode(self, message: Message, like: Any, info: Info) -> Any:
        return message[0].astype(np.float32)


def test_a_codec_needs_no_more_than_two_methods() -> None:
    """A codec with only `encode` and `decode` has error feedback, EF21 and means over ranks."""
    for compressor in (Rounded(), ErrorFeedback(Rounded())):
        world, total = Ranks(compressor, 3), np.zeros(laws.SHAPE)
        for gradients in normals(laws.SHAPE, 3, steps=6):
            total += exact_mean(gradients) - world.step(gradients)[0]
        carried = world.mean_residual(total.size)
        np.testing.assert_allclose(total.reshape(-1), carried, atol=1e-5)
        assert np.abs(carried).max() <= 0.5 + 1e-6
    shifted = Ranks(EF21(Rounded()), 2)
    for gradients in normals(laws.SHAPE, 2, steps=3):
        assert np.abs(shifted.step(gradients)[0] - exact_mean(gradients)).max() <= 0.5 + 1e-5


def test_a_codec_without_a_meaning_says_so() -> None:
    @dataclass(frozen=True)
    class Mute(Codec):
        def encode(self, x: Any, info: Info) -> Message:
            return (x,)

    with pytest.raises(TypeError, match="Mute defines neither decode"):
        Ranks(Mute(), 1).step([np.ones(laws.SHAPE, np.float32)])


# ----------------------------------------------------------------- residuals of other levels
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize(
    "method",
    [
        EF21(TopK(0.1)),
        TwoLevel(Diana(QSGD(4))),
        Momentum(Dense()),
        Momentum(QSGD(4)),
        TwoLevel(DGC(0.1)),
        SignSGD(0.9),
    ],
    ids=repr,
)
def test_a_residual_of_another_level_counts_once(method: Compressor, framework: Framework) -> None:
    """Momentum must not multiply it, and neither shifts nor signs may forget it."""
    worlds = [simulate(method, 4, local_size=2) for _ in range(2)]
    owed = {"w": np.stack(next(normals(laws.SHAPE, 4))), "v": np.stack(next(normals((40, 30), 4)))}
    for number, gradients in enumerate(laws.several(4, 6)):
        if number == 2:
            for rank, exchange in enumerate(worlds[0].exchanges):
                for entry in exchange.bucket_states:
                    if entry.bucket.name in owed:
                        entry.carried = framework.tensor(owed[entry.bucket.name][rank])
        mine, usual = (laws.step(world, framework, gradients)[0] for world in worlds)
        for name in owed:
            wanted = usual[name] + owed[name].mean(0) * (number == 2)
            np.testing.assert_allclose(mine[name], wanted, atol=1e-5, err_msg=str(number))


# ------------------------------------------------------------------------------- EF21 and DIANA
def topk_of(x: np.ndarray, count: int) -> np.ndarray:
    """Return x with zeros in place of all but the `count` largest magnitudes."""
    kept = np.zeros_like(x)
    largest = np.argsort(-np.abs(x))[:count]
    kept[largest] = x[largest]
    return kept


@pytest.mark.parametrize("framework", parameters())
def test_ef21_follows_the_paper(framework: Framework) -> None:
    """Two ranks follow Algorithm 2 of the paper."""
    ours, size = Ranks(EF21(TopK(0.1)), 2, framework), 1200
    own, mean = np.zeros((2, size)), np.zeros(size)
    for gradients in normals(laws.SHAPE, 2, steps=6):
        sent = [topk_of(g.reshape(-1) - h, 120) for g, h in zip(gradients, own, strict=True)]
        own += sent
        mean += np.mean(sent, 0)
        np.testing.assert_allclose(ours.step(gradients)[1].reshape(-1), mean, atol=1e-5)


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("method", [EF21(TopK(0.1)), EF21(OneBit()), Diana(QSGD(4), 0.3)], ids=repr)
def test_h_is_the_mean_of_all_h_i(method: Shifted, framework: Framework) -> None:
    world = Ranks(method, 4, framework)
    for gradients in normals(laws.SHAPE, 4, steps=5):
        world.step(gradients)
        own = [framework.array(state["local"]) for state in world.states]
        for state in world.states:
            np.testing.assert_allclose(framework.array(state["mean"]), np.mean(own, 0), atol=1e-5)


def test_where_gradients_settle_ef21_is_exact() -> None:
    """For constant gradients, the result of EF21 tends to the exact mean.

    With error feedback, the result keeps jumping.
    """
    gradients = next(normals(laws.SHAPE, 2))
    exact, world = exact_mean(gradients), Ranks(EF21(TopK(0.1)), 2)
    gaps = [np.abs(world.step(gradients)[0] - exact).max() for _ in range(12)]
    assert gaps[-1] < 1e-5 < gaps[3]
    plain = Ranks(TopK(0.1), 2)
    assert min(np.abs(plain.step(gradients)[0] - exact).max() for _ in range(12)) > 0.1


def test_where_gradients_settle_diana_has_no_variance() -> None:
    gradients = next(normals(laws.SHAPE, 2))
    exact, world = exact_mean(gradients), Ranks(Diana(QSGD(4)), 2)
    gaps = [np.abs(world.step(gradients)[0] - exact).max() for _ in range(40)]
    assert gaps[-1] < 1e-4 < 1e-2 < gaps[0]


def test_diana_is_unbiased() -> None:
    """The mean of the second results of 200 runs with the same gradients is the exact mean."""
    gradients, found = next(normals((24, 50), 2)), []
    for number in range(200):
        world = Ranks(Diana(QSGD(2)), 2, name=f"run {number}")
        world.step(gradients)
        found.append(world.step(gradients)[0])
    wrong = np.mean(found, 0) - exact_mean(gradients)
    alone = np.std(found, 0)
    assert np.abs(wrong).max() < 6 * alone.max() / 200**0.5


def shifts(world: World) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (mean of the ranks' h_i, h on rank 0) for each large tensor."""
    rows = []
    for i, entry in enumerate(world.exchanges[0].bucket_states):
        if entry.state and "local" in entry.state:
            own = [exchange.bucket_states[i].state["local"] for exchange in world.exchanges]
            rows.append((np.mean(own, 0), entry.state["mean"]))
    return rows


def test_levels_of_ef21_hand_their_shifts_over() -> None:
    """When EF21 levels switch, h keeps its value, and it stays the mean of all h_i."""
    world = simulate(Alternating(EF21(TopK(0.5)), EF21(TopK(0.05)), [2, 4, 7]), 3)
    for number, gradients in enumerate(laws.several(3, 9)):
        before = shifts(world) if number else []
        laws.step(world, NUMPY, gradients)
        if number in (2, 4, 7):  # another level: h has moved by its messages alone
            pairs = zip(before, shifts(world), strict=True)
            moved = [np.mean(old[1] != new[1]) for old, new in pairs]
            assert all(0 < part <= (0.16 if number != 4 else 1) for part in moved), moved
        for mean, shift in shifts(world):
            np.testing.assert_allclose(mean, shift, atol=1e-5)
    assert shifts(world)


def test_another_number_of_ranks_goes_on_from_h() -> None:
    rng = np.random.default_rng(0)
    states = [{"local": rng.normal(size=8), "mean": np.zeros(8)} for _ in range(3)]
    mean = np.mean([state["local"] for state in states], 0)
    states = [{**state, "mean": mean} for state in states]
    spec = NUMPY.xp.spec(np.zeros(8, np.float32))
    method, moving = EF21(TopK(0.1)), [state | {"momentum": state["mean"]} for state in states]
    for state in (
        method.rescale(states, spec, Info(size=5)),
        method.rescale_from_one(states[1], spec, Info()),
        Momentum(method).rescale(moving, spec, Info()),
    ):
        np.testing.assert_array_equal(state["local"], mean)
        np.testing.assert_array_equal(state["mean"], mean)


@pytest.mark.parametrize("method", [partial(COLD, "ring"), WAGMA], ids=["COLD", "WAGMA"])
def test_methods_whose_partners_change_refuse_shifts(method: Any) -> None:
    """COLD and WAGMA refuse EF21 as their compressor.

    Partners change between steps, and a new partner would not know the shifts.
    """
    with pytest.raises(ValueError, match="compressor is EF21"):
        method(compressor=EF21(TopK(0.1)))


# ----------------------------------------------------------------------------------- momentum
@pytest.mark.parametrize("framework", parameters())
def test_momentum_of_dense_is_momentum(framework: Framework) -> None:
    world, velocity = Ranks(Momentum(Dense(), 0.9), 2, framework), np.zeros(laws.SHAPE)
    for gradients in normals(laws.SHAPE, 2, steps=5):
        velocity = 0.9 * velocity + exact_mean(gradients)
        np.testing.assert_allclose(world.step(gradients)[0], velocity, atol=1e-5)


def test_momentum_is_compressed_with_feedback() -> None:
    """The sum of results plus the mean residual is the sum of the mean momenta."""
    world = Ranks(Momentum(TopK(0.1), 0.5), 2)
    own, total = np.zeros((2, *laws.SHAPE)), np.zeros(laws.SHAPE)
    for gradients in normals(laws.SHAPE, 2, steps=6):
        own = 0.5 * own + np.array(gradients)
        total += own.mean(0) - world.step(gradients)[0]
    np.testing.assert_allclose(total.reshape(-1), world.mean_residual(1200), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda bad: Diana(QSGD(4), bad), "alpha"),
        (lambda bad: Momentum(TopK(0.1), bad), "momentum"),
    ],
)
@pytest.mark.parametrize("bad", [-0.1, 1.5, "a", None, True])
def test_numbers_are_refused(make: Any, name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is "):
        make(bad)


def test_they_read_back_what_they_show() -> None:
    from accordion_hvd import parse as read

    for word in ("ef21(topk(0.01))", "diana(qsgd(4), alpha=0.25)", "momentum(natural(), 0.5)"):
        assert read(repr(read(word))) == read(word)
    levels: Sequence[Any] = (EF21(TopK(0.01)), Diana(QSGD(4)), Gathered(Natural()))
    assert [repr(level) for level in levels] == [
        "EF21(codec=TopK(ratio=0.01))",
        "Diana(codec=QSGD(bits=4))",
        "Gathered(codec=Natural())",
    ]
