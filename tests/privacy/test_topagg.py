"""Tests of TopAgg: the sensitivity of its sums, its noise, and its refusals.

Signs and noise cannot be seeded: bounds are at six standard errors, which chance alone passes
once in 500 million runs.
"""

from __future__ import annotations

import math
import random as python_random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frameworks import (
    FRAMEWORKS,
    NUMPY,
    TENSORFLOW,
    TORCH,
    Framework,
    Ranks,
    installed,
    normals,
    parameters,
    same_bits,
)
from scipy import stats

from accordion_hvd import (
    Accordion,
    AdaQS,
    Dense,
    Fixed,
    Info,
    PrivacyBudget,
    Replay,
    StepSchedule,
    TopAgg,
    TopK,
    parse,
    simulate,
)
from accordion_hvd.ops import random, secret

SIZE = 60


def teachers(count: int, **more: Any) -> TopAgg:
    """Return a TopAgg without noise, in which `count` teachers vote."""
    settings = {"k": 7, "clip": None, "sigma": 0.0, "unprotected": True} | more
    return TopAgg(unit="teacher", contributors=count, **settings)


def seeded(**more: Any) -> TopAgg:
    """Return a TopAgg with noise from a known seed, which warns that it protects nothing."""
    with pytest.warns(RuntimeWarning, match="protects NOTHING"):
        return TopAgg(**{"k": 7, "clip": None, "sigma": 30.0, "deterministic": True} | more)


def examples(count: int) -> TopAgg:
    """Return a TopAgg without noise, in which about `count` sampled examples vote.

    Without noise, signs come from a known seed.
    """
    return TopAgg(7, None, 0.0, unit="example", contributors=count, unprotected=True)


def votes_of(method: TopAgg, gradients: np.ndarray, step: int = 0) -> np.ndarray:
    """Return the sum of the votes of one rank's contributors, the rows of `gradients`."""
    return method.votes(gradients[:, None, :].astype(np.float32), Info(step=step, name="w"))


# --------------------------------------------------------------------------------- how far it moves
def strange(rng: np.random.Generator) -> np.ndarray:
    """Return a random gradient, of a kind that might break the bound."""
    normal = rng.standard_normal(SIZE)
    kinds: list[np.ndarray] = [
        normal,
        np.zeros(SIZE),
        np.full(SIZE, 1e38),
        normal * 1e-44,  # denormal
        np.where(rng.random(SIZE) < 0.5, np.nan, normal),
        np.where(rng.random(SIZE) < 0.5, np.inf, -np.inf),
        np.full(SIZE, np.nan),
        np.round(normal),  # ties, zeros
        np.eye(SIZE)[rng.integers(SIZE)] * 1e30,
        -np.abs(normal),
        np.where(np.arange(SIZE) < 7, 1.0, 1e-30),
    ]
    return kinds[rng.integers(len(kinds))]


def test_neighbours_move_the_sum_by_no_more_than_the_sensitivity() -> None:
    """Replacing one teacher's gradient moves the sum by at most the sensitivity.

    In 1,000 trials, the new gradient is the negated one, or a random one of a hostile kind.
    """
    rng = np.random.default_rng(0)
    for trial in range(1000):
        clip = [None, 1e-5, 1.0][trial % 3]
        method = teachers(5, clip=clip)
        mine = np.stack([strange(rng) for _ in range(5)])
        other, who = mine.copy(), rng.integers(5)
        other[who] = -mine[who] if trial % 4 == 0 else strange(rng)
        moved = votes_of(method, mine, trial) - votes_of(method, other, trial)
        assert np.linalg.norm(moved) <= method.sensitivity == 2 * math.sqrt(7)


def test_one_example_more_moves_it_by_half_as_much() -> None:
    rng = np.random.default_rng(1)
    method = examples(5)
    for trial in range(1000):
        mine = np.stack([strange(rng) for _ in range(5)])
        fewer = np.delete(mine, rng.integers(5), 0)  # later rows move up
        moved = votes_of(method, mine, trial) - votes_of(method, fewer, trial)
        assert np.linalg.norm(moved) <= method.sensitivity == math.sqrt(7)


def test_the_bounds_are_reached() -> None:
    """Flipping all signs of a teacher, or adding an example, moves the sum by the sensitivity.

    The bounds are thus tight, and a smaller noise would not suffice.
    """
    mine = np.zeros((3, SIZE))
    mine[:, :7] = 1.0
    other = mine.copy()
    other[1] *= -1
    method = teachers(3)
    assert np.linalg.norm(votes_of(method, mine) - votes_of(method, other)) == method.sensitivity
    example = examples(5)
    moved = votes_of(example, mine) - votes_of(example, mine[:2])
    assert np.linalg.norm(moved) == example.sensitivity


def test_a_bound_common_to_all_would_break_it() -> None:
    """With one B for all contributors, a change of one gradient exceeds the sensitivity.

    A common B would change everybody's votes. With a B for each contributor, the bound holds.
    """
    mine = np.ones((50, SIZE)) * 0.1
    other = np.concatenate([mine[:-1], np.full((1, SIZE), 100.0)])
    chances = [0.5 + 0.5 * x / np.abs(x).max() for x in (mine, other)]
    moved = chances[0].sum(0) - chances[1].sum(0)  # expectations of the sums
    assert np.linalg.norm(moved) > teachers(50, k=SIZE).sensitivity
    votes = [votes_of(teachers(50, k=SIZE), x) for x in (mine, other)]
    assert np.linalg.norm(votes[0] - votes[1]) <= teachers(50, k=SIZE).sensitivity


# --------------------------------------------------------------------------------- what a vote is
def test_each_vote_is_k_signs_on_the_largest() -> None:
    rng = np.random.default_rng(2)
    for trial in range(50):
        gradient = rng.standard_normal((1, SIZE))
        vote = votes_of(teachers(1), gradient, trial)
        assert set(np.unique(vote)) <= {-1, 0, 1} and np.count_nonzero(vote) == 7
        assert set(np.flatnonzero(vote)) == set(np.argsort(-np.abs(gradient[0]))[:7])


@pytest.mark.parametrize(
    ("clip", "wanted"), [(None, [1, -0.5556, 0.2222]), (0.3, [1, -1, 0.6667]), (1e-5, [1, -1, 1])]
)
def test_votes_are_unbiased(clip: float | None, wanted: list[float]) -> None:
    """The mean of 40,000 votes is the clipped gradient's direction, to the sampling error."""
    gradient = np.zeros((1, SIZE))
    gradient[0, :4] = 0.9, -0.5, 0.2, 0.1
    count = 40_000
    mean = votes_of(teachers(count, k=3, clip=clip), np.repeat(gradient, count, 0)) / count
    error = np.sqrt((1 - np.square(wanted)) / count)
    assert (np.abs(mean[:3] - wanted) <= 6 * error + 1e-4).all()
    assert not mean[3:].any()


def test_nothing_in_a_gradient_is_no_vote() -> None:
    assert not votes_of(teachers(2), np.zeros((2, SIZE))).any()
    assert not votes_of(teachers(2), np.full((2, SIZE), np.nan)).any()
    assert not votes_of(teachers(2), np.zeros((0, SIZE))).any()


def test_unanimous_teachers_are_followed() -> None:
    gradient = np.random.default_rng(3).standard_normal(SIZE).astype(np.float32)
    top = np.argsort(-np.abs(gradient))[:7]
    wanted = np.zeros(SIZE)
    wanted[top] = np.sign(gradient[top])
    for beta in (0.0, 0.5, 0.99):
        method = teachers(12, clip=1e-6, threshold=beta)
        world = simulate(method, 4)
        means = world.step([{"w": np.repeat(gradient[None], 3, 0)} for _ in range(4)])
        np.testing.assert_array_equal(means[0]["w"], wanted)


def test_many_ranks_count_what_one_does() -> None:
    """Without chance, several ranks get the result of one process with all teachers."""
    signs = np.sign(np.random.default_rng(4).standard_normal((12, SIZE))).astype(np.float32)
    method = teachers(12)
    alone = simulate(method, 1).step([{"w": signs.copy()}])[0]["w"]
    parts = [{"w": signs[:2].copy()}, {"w": signs[2:2]}, {"w": signs[2:].copy()}]
    for mean in simulate(method, 3).step(parts):
        assert same_bits(mean["w"], alone)


def test_a_quadratic_is_minimised() -> None:
    """Votes of teachers minimise a quadratic, with noise of a tenth of the number of teachers."""
    x, gamma = np.random.default_rng(5).standard_normal(SIZE).astype(np.float32), 0.05
    method = teachers(100, sigma=10.0, threshold=0.1, unprotected=False)
    world, start = simulate(method, 2), np.linalg.norm(x)
    noise = np.random.default_rng(6)
    for _ in range(600):
        wanted = [
            {"w": -x + 0.1 * noise.standard_normal((50, SIZE)).astype(np.float32)} for _ in "ab"
        ]
        x = x + gamma * world.step(wanted)[0]["w"]
    assert np.linalg.norm(x) < 0.2 * start
    assert np.abs(x).max() < 6 * gamma


# ------------------------------------------------------------------------------------------- noise
NOISY = TopAgg(1, None, 40.0)


def noise_of(method: TopAgg, ranks: int, size: int, steps: int = 1) -> np.ndarray:
    """Return the sums of steps in which nobody votes, which are noise alone."""
    world = simulate(method, ranks)
    return np.stack(
        [
            world.step([{"w": np.zeros(size, np.float32)} for _ in range(ranks)])[0]["w"] * ranks
            for _ in range(steps)
        ]
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_noise_is_added_once(ranks: int) -> None:
    """The noise is a rounded normal of variance sigma^2 for any number of ranks."""
    noise = noise_of(NOISY, ranks, 40_000)[0]
    assert (noise == np.round(noise)).all()
    assert abs(noise.mean()) < 6 * 40 / 200
    assert abs(noise.var() / (1600 + 1 / 12) - 1) < 6 * math.sqrt(2 / 40_000)
    edges = np.concatenate([[-np.inf], np.arange(-99.5, 100), [np.inf]])
    counts = np.histogram(noise, edges)[0]
    expected = np.diff(stats.norm.cdf(edges, scale=40)) * noise.size
    assert stats.chisquare(counts, expected).pvalue > 1e-8


def test_noise_is_on_every_coordinate_and_new_each_time() -> None:
    noise = noise_of(NOISY, 2, 5000, steps=2)
    assert abs(np.corrcoef(noise)[0, 1]) < 6 / math.sqrt(5000)
    assert np.count_nonzero(noise) > 0.97 * noise.size
    gradient = np.zeros(5000, np.float32)
    gradient[3] = 1
    swamped = simulate(NOISY, 1).step([{"w": gradient}])[0]["w"]
    assert abs(swamped.std() / 40 - 1) < 0.1


def test_blocks_of_noise_are_independent() -> None:
    """Long noise is drawn in blocks, each of which has new values and the right spread."""
    count = secret._BLOCK
    noise = secret.rounded_normal(3 * count + 5, 1000.0, "int16")
    blocks = noise[: 3 * count].reshape(3, count)
    assert noise.shape == (3 * count + 5,) and np.count_nonzero(noise[-5:])
    assert (abs(blocks.std(1) / 1000 - 1) < 6 / math.sqrt(2 * count)).all()
    assert abs(np.corrcoef(blocks) - np.eye(3)).max() < 6 / math.sqrt(count)
    wrapped = secret.rounded_normal(2 * count, 100.0, "int8")
    assert wrapped.min() < -120 and wrapped.max() > 120


def test_tails_reach_far() -> None:
    rare = secret.normal(2_000_000)
    assert 4.4 < np.abs(rare).max() < 7.5
    assert stats.kstest(rare[:200_000], "norm").pvalue > 1e-8
    assert 0.49 < (secret.uniform(100_000) < 0.5).mean() < 0.51


def test_chance_alone_passes_the_threshold_as_often_as_it_should() -> None:
    """Elements without votes pass the threshold by chance.

    The probability is 2 (1 - Phi(beta N / sigma)), with the threshold rounded to whole votes.
    """
    method = teachers(100, k=5, sigma=90.0, threshold=0.7, unprotected=False)
    gradients = np.zeros((100, 20_000), np.float32)
    gradients[:, 0] = 1.0
    passed = simulate(method, 1).step([{"w": gradients}])[0]["w"][5:] != 0
    chance = 2 * stats.norm.sf(70.5 / 90)  # more than 70 is at least 70.5 before rounding
    assert abs(passed.mean() - chance) < 6 * math.sqrt(chance * (1 - chance) / passed.size)


def reseed() -> None:
    python_random.seed(1)
    np.random.seed(1)
    if installed(TORCH):
        import torch

        torch.manual_seed(1)
    if installed(TENSORFLOW):
        import tensorflow as tf

        tf.random.set_seed(1)


@pytest.mark.parametrize("framework", parameters(FRAMEWORKS))
def test_seeds_do_not_repeat_the_noise(framework: Framework) -> None:
    """Two trainings with equal seeds have different noise at the same steps."""
    found = []
    for _ in range(2):
        reseed()
        ranks = Ranks(NOISY, 2, framework)
        found.append(np.stack([ranks.step(g)[0] for g in normals((500,), 2, steps=2)]).ravel())
    assert (found[0] != found[1]).mean() > 0.9
    assert abs(np.corrcoef(found)[0, 1]) < 6 / math.sqrt(1000)


def test_only_the_trusted_rank_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is drawn once for all ranks, and comes from the operating system's source."""
    asked, urandom = [], secret.os.urandom
    monkeypatch.setattr(secret.os, "urandom", lambda n: asked.append(n) or urandom(n))
    simulate(NOISY, 4).step([{"w": np.ones(1000, np.float32)} for _ in range(4)])
    assert sorted(asked) == [8, 8, 8, 8, 3 * 8 * 500]  # a sign for each rank's vote; the noise


def test_signs_are_secret_too() -> None:
    """The signs of two equal votes are drawn independently.

    Known draws would tell which example is missing from a sample.
    """
    gradient = np.full((1, 4000), 0.5)
    gradient[0, 0] = 1.0
    method = teachers(1, k=4000, sigma=1.0, unprotected=False)
    first, second = votes_of(method, gradient), votes_of(method, gradient)
    assert 0.3 < (first != second).mean() < 0.45  # 2 * 3/4 * 1/4
    assert abs(first.mean() - 0.5) < 6 * math.sqrt(0.75 / 4000)


@pytest.mark.parametrize("framework", parameters(FRAMEWORKS))
def test_secret_numbers_of_every_framework(framework: Framework) -> None:
    xp = framework.xp
    drawn = framework.array(xp.secret_uniform(20_000))
    assert drawn.dtype == np.float32 and 0 <= drawn.min() and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 6 / math.sqrt(12 * 20_000)
    noise = framework.array(xp.secret_normal(20_000, 3.0, "int8"))
    assert noise.dtype == np.int8 and abs(noise.std() / math.sqrt(9 + 1 / 12) - 1) < 0.03
    assert not np.array_equal(noise, framework.array(xp.secret_normal(20_000, 3.0, "int8")))


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_a_graph_draws_anew_each_time() -> None:
    """A graph draws new noise in each call, and not only when it is traced."""
    import tensorflow as tf

    ours = Ranks(NOISY, 2, TENSORFLOW)

    @tf.function(autograph=False)
    def step(tensors: Any, number: Any) -> Any:
        return ours.exchange(tensors, [{}, {}], number)[0][0]

    zeros = [tf.zeros(1000)] * 2
    first, second = (step(zeros, tf.constant(0, tf.int64)).numpy() for _ in "ab")
    assert (first != second).mean() > 0.9
    assert step.experimental_get_tracing_count() == 1


def test_seeded_noise_is_loud_and_normal_enough() -> None:
    method = seeded(sigma=30.0, k=1)
    assert "deterministic=True" in repr(method)
    noise = noise_of(method, 2, 20_000)[0]
    assert abs(noise.std() / 30 - 1) < 0.05
    assert same_bits(noise, noise_of(method, 2, 20_000)[0])


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
@pytest.mark.parametrize(("unit", "threshold"), [("teacher", None), ("example", 0.3)])
def test_frameworks_agree_with_known_noise(
    framework: Framework, unit: str, threshold: float | None
) -> None:
    method = seeded(unit=unit, contributors=10, threshold=threshold, clip=0.5)
    ours, oracle = simulate(method, 2), simulate(method, 2)
    rng = np.random.default_rng(7)
    for _ in range(3):
        given = [{"w": rng.standard_normal((5, 11, 9)), "b": rng.standard_normal((5, 4))}] * 2
        given = [{k: x.astype(np.float32) for k, x in mine.items()} for mine in given]
        wanted = oracle.step([{k: x.copy() for k, x in mine.items()} for mine in given])
        means = ours.step([{k: framework.tensor(x) for k, x in mine.items()} for mine in given])
        for name in ("w", "b"):
            assert same_bits(framework.array(means[1][name]), wanted[0][name])
            assert wanted[0][name].shape == given[0][name].shape[1:]


# ------------------------------------------------------------------------------------ what travels
@pytest.mark.parametrize(
    ("sigma", "contributors", "wire", "size"),
    [(5.0, 50, "int8", 1), (200.0, 4000, "int16", 2), (5000.0, 4000, "int32", 4)],
)
def test_votes_travel_as_small_integers(
    sigma: float, contributors: int, wire: str, size: int
) -> None:
    method = teachers(contributors, sigma=sigma, unprotected=False)
    assert method.wire(4) == wire
    world = simulate(method, 4)
    world.step([{"w": np.ones((2, 30, 30), np.float32), "b": np.ones((2, 30), np.float32)}] * 4)
    counted = world.exchanges[0].stats()
    assert counted["payload"] == size * 930
    assert counted["sent"] == counted["received"] == 2 * 3 / 4 * size * 930


@pytest.mark.parametrize("framework", parameters(FRAMEWORKS))
@pytest.mark.parametrize("kind", ["int8", "uint8", "int16"])
def test_small_integers_wrap_around_alike(framework: Framework, kind: str) -> None:
    """Sums of small integers are modulo 2^bits in all frameworks.

    Noise beyond the range of the integers therefore costs no privacy.
    """
    from accordion_hvd import Allreduce
    from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep

    hub, xp = Hub(3), framework.xp
    rng, top = np.random.default_rng(8), np.iinfo(kind)
    parts = [rng.integers(top.min, top.max + 1, (2, 31)).astype(kind) for _ in range(3)]
    small = [np.int16([r]).astype(kind) for r in range(3)]

    def generator(rank: int) -> Any:
        return (yield tuple(Allreduce(framework.tensor(x[rank]), op="sum") for x in (parts, small)))

    links = [SimulatedCommunicator(hub, rank, xp) for rank in range(3)]
    with np.errstate(over="ignore"):
        wanted = parts[0] + parts[1] + parts[2]
    for large, few in lockstep(links, [generator(rank) for rank in range(3)]):
        assert same_bits(framework.array(large), wanted)
        assert framework.array(few).tolist() == [3]


def test_nothing_travels_beside_the_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sends one vector and nothing else, and all elements of the result are noisy.

    The vector includes biases, and no flag tells of a gradient that is not finite.
    """
    from accordion_hvd.comm.communicator import Pending

    asked = []
    plain = Pending.__init__
    monkeypatch.setattr(
        Pending,
        "__init__",
        lambda self, link, name, requests: (
            asked.append(requests) or plain(self, link, name, requests)
        ),
    )
    gradients = [{"w": np.full((40, 40), np.nan, "f"), "b": np.ones(5, "f"), "s": np.ones((), "f")}]
    means = simulate(NOISY, 1).step(gradients)
    assert [len(requests) for requests in asked] == [1]
    assert asked[0][0].tensor.shape == (1606,)
    together = np.concatenate([np.ravel(x) for x in means[0].values()])
    assert np.isfinite(together).all() and abs(together.std() / 40 - 1) < 0.2


# ---------------------------------------------------------------------------------- what is refused
GOOD = {"k": 3, "clip": 1.0, "sigma": 5.0}
REFUSED = [
    *[("k", bad) for bad in (0, -1, 1.5, math.nan, "a", True, None)],
    *[("clip", bad) for bad in (0, -1, math.nan, math.inf, "a", True)],
    *[("sigma", bad) for bad in (0, -1, math.nan, math.inf, 1e9, "a", True, None)],
    *[("threshold", bad) for bad in (-0.1, 1, math.nan, "a", True)],
    *[("unit", bad) for bad in ("image", None, 1)],
    *[("contributors", bad) for bad in (5, 0, 1.5)],
    *[("rate", bad) for bad in (0, 0.5, 1.5, math.nan, "a")],
    *[("budget", bad) for bad in (1.0, "tight", PrivacyBudget)],
    *[("unprotected", bad) for bad in (None, "yes")],
    *[("deterministic", bad) for bad in (None, 3)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"TopAgg: {name} is .*must be") as refusal:
        TopAgg(**GOOD | {name: value})
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("bad", [None, 0, 1.5, True])
def test_how_many_vote_must_be_said(bad: Any) -> None:
    for unit in ("teacher", "example"):
        with pytest.raises(ValueError, match="contributors is "):
            TopAgg(**GOOD, unit=unit, contributors=bad)


def test_what_protects_nothing_has_no_budget() -> None:
    budget = PrivacyBudget(1.0, 1e-5)
    for more in ({"sigma": 0.0, "unprotected": True}, {"deterministic": True}):
        with pytest.raises(ValueError, match="without secret noise"):
            TopAgg(**GOOD | more, budget=budget)


def test_more_votes_than_elements_are_refused_before_anything_is_sent() -> None:
    world = simulate(TopAgg(8, None, 1.0, budget=PrivacyBudget(100.0, 1e-5)), 2)
    with pytest.raises(ValueError, match="k is 8, but must be an integer from 1 to 7"):
        world.step([{"w": np.ones(7, np.float32)} for _ in range(2)])
    with pytest.raises(ValueError, match=r"shape of w is \(0,\)"):
        simulate(TopAgg(1, None, 1.0), 2).step([{"w": np.ones((0, 4), np.float32)} for _ in "ab"])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Accordion(low=x, high=x),
        lambda x: Accordion(low=Dense(), high=x),
        lambda x: Accordion(low=TopK(), high=TopK(), overrides={"*": x}),
        lambda x: AdaQS([x, x]),
        lambda x: StepSchedule({0: x}),
        lambda x: StepSchedule({0: x, 3: Dense()}),
        lambda x: Fixed(x, overrides={"head": Dense()}),
        lambda x: Fixed(Dense(), overrides={"head": x}),
    ],
)
def test_it_is_no_level_among_others(make: Any) -> None:
    with pytest.raises(ValueError, match="private and must be the only level"):
        make(TopAgg(**GOOD))


def test_no_history_has_it() -> None:
    with pytest.raises(ValueError, match="'TopAgg' is not known"):
        Replay([{"step": 0, "name": "w", "compressor": repr(TopAgg(**GOOD))}])


def test_no_gate_turns_it_off() -> None:
    with pytest.raises(ValueError, match="gate is 'auto', but must be None"):
        Fixed(TopAgg(**GOOD), gate="auto")


def test_nothing_may_go_beside_it() -> None:
    with pytest.raises(ValueError, match="skip is .*unprotected"):
        simulate(TopAgg(**GOOD), 1, skip=["b"]).step([{"w": np.ones(9, "f"), "b": np.ones(3, "f")}])
    with pytest.raises(
        ValueError, match="one vector, but the parameters form 2: w .float32., b .float64."
    ):
        simulate(TopAgg(**GOOD), 1).step([{"w": np.ones(9, "f"), "b": np.ones(3)}])
    world = simulate(TopAgg(**GOOD), 1)
    world.step([{"w": np.ones(9, "f")}])
    with pytest.raises(ValueError, match="exist from the first step"):
        world.exchanges[0].extend([replace(world.exchanges[0].tensors[0], name="late")])


def test_words() -> None:
    method = parse("topagg(k=5, clip=None, sigma=20.0, budget=PrivacyBudget(2.0, 1e-6))").budget
    assert repr(method) == "PrivacyBudget(epsilon=2.0, delta=1e-06)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(repr(TopAgg(**GOOD))) == TopAgg(**GOOD)


def test_unprotected_signs_can_be_repeated() -> None:
    """Signs of an unprotected vote are drawn by `ops.random` from a key that includes the step."""
    gradient = np.ones((1, SIZE)) * 0.5
    gradient[0, 0] = 1.0
    method = teachers(1, k=SIZE)
    vote = votes_of(method, gradient, step=3)
    drawn = random.uniform(NUMPY.xp, SIZE, random.key("topagg", "w", 3, 0, 0))
    np.testing.assert_array_equal(vote, np.where(drawn < gradient[0] / 2 + 0.5, 1, -1))
