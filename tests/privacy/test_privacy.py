"""Tests of privacy budgets, Poisson samples, ballots, and gradients of single examples."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, TENSORFLOW, TORCH, installed
from scipy import optimize, special, stats
from threads import Threaded

from accordion_hvd import BudgetSpent, PrivacyBudget, TopAgg, simulate
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.engine import checkpoint
from accordion_hvd.ops import secret
from accordion_hvd.privacy import PoissonSampler, Release, multiplier_for
from accordion_hvd.privacy.ballot import Ballot
from accordion_hvd.privacy.budget import epsilon_of
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator

DELTA = 1e-5


# -------------------------------------------------------------------------------------- the figures
def best_epsilon(renyi: Any, orders: np.ndarray, delta: float = DELTA) -> float:
    """Return epsilon, minimal over the accountant's `orders`.

    The formula is proposition 12 of Canonne, Kamath & Steinke (2020).
    """
    a = orders
    found = renyi(a) + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return float(found.min())


def default_orders() -> np.ndarray:
    from dp_accounting import rdp

    return np.array(rdp.RdpAccountant().orders)


@pytest.mark.parametrize(("k", "sigma"), [(200, 5000), (700, 9000), (300, 800), (1, 10)])
@pytest.mark.parametrize("releases", [1, 40, 1300])
def test_the_accountant_has_the_closed_form(k: int, sigma: float, releases: int) -> None:
    """T releases have the Renyi divergence 2 k alpha T / sigma^2 at each order alpha."""
    method = TopAgg(k, None, sigma, unit="teacher", contributors=4000)
    wanted = best_epsilon(lambda a: 2 * k * a * releases / sigma**2, default_orders())
    assert epsilon_of({method.mechanism: releases}, DELTA) == pytest.approx(
        max(wanted, 0), rel=1e-9
    )


@pytest.mark.parametrize("releases", [1, 10, 1000])
def test_it_lies_between_the_exact_figure_and_the_simple_bound(releases: int) -> None:
    """Epsilon is at least the exact figure, and at most the simple bound.

    T releases are exactly one Gaussian with mu = sqrt(T) / z (Balle & Wang 2018).
    """
    release = Release(50.0)
    found, mu = epsilon_of({release: releases}, DELTA), math.sqrt(releases) / 50
    exact = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(
        -mu / 2 - found / mu
    )
    assert exact <= DELTA
    rho = mu**2 / 2
    assert found <= rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


@pytest.mark.parametrize(("rate", "noise", "steps"), [(256 / 60000, 1.1, 14062), (0.05, 2.0, 400)])
def test_examples_are_cheaper_for_being_sampled(rate: float, noise: float, steps: int) -> None:
    """Epsilon matches the sum over integer orders that defines the sampled mechanism's divergence.

    It is less than a fifth of the epsilon without sampling.
    """
    orders = np.arange(2, 65).astype(float)

    def renyi(a: np.ndarray) -> np.ndarray:
        return np.array([steps * sampled(int(order), rate, noise) for order in a])

    found = epsilon_of({Release(noise, rate, "add or remove"): steps}, DELTA)
    assert found == pytest.approx(best_epsilon(renyi, orders), rel=1e-6)
    assert found < epsilon_of({Release(noise, 1.0, "add or remove"): steps}, DELTA) / 5


def sampled(order: int, q: float, z: float) -> float:
    j = np.arange(order + 1)
    binomial = special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
    terms = binomial + (order - j) * np.log1p(-q) + j * np.log(q) + (j**2 - j) / (2 * z**2)
    return special.logsumexp(terms) / (order - 1)


def test_a_known_figure() -> None:
    """A figure of the literature on DP-SGD is reproduced: epsilon 3.01 by the old conversion.

    The setting is q = 256 / 60000, z = 1.1 and 60 epochs. The accountant's conversion gives less.
    """
    orders = np.arange(2, 64).astype(float)
    steps = 60 * 60000 // 256
    old = min(
        steps * sampled(int(a), 256 / 60000, 1.1) + math.log(1 / DELTA) / (a - 1) for a in orders
    )
    assert old == pytest.approx(3.01, abs=0.01)
    new = epsilon_of({Release(1.1, 256 / 60000, "add or remove"): steps}, DELTA)
    assert 2.5 < new < old


@pytest.mark.parametrize(
    ("k", "sigma", "epsilon", "published"),
    [(200, 5000, 1, 1300), (700, 9000, 1, 1204), (300, 800, 10, 1643), (500, 700, 10, 754)],
)
def test_published_settings(k: int, sigma: float, epsilon: float, published: int) -> None:
    """The authors' conversion gives the published numbers of releases.

    `PrivacyBudget` allows as many or more, but fewer than 1.6 times as many.
    """
    orders = np.array([1.1, *range(2, 200)])

    def theirs(releases: int) -> float:
        return float((releases * 2 * k * orders / sigma**2 + 11.512925 / (orders - 1)).min())

    assert theirs(published) <= epsilon < theirs(published + 1)
    method = TopAgg(k, None, sigma, unit="teacher", contributors=4000)
    assert published <= PrivacyBudget(epsilon, DELTA).left(method.mechanism) < 1.6 * published


# ------------------------------------------------------------------- privacy loss distributions
SAMPLED = Release(0.7, 0.001, "add or remove")


def test_reference_figures_of_both_accountings() -> None:
    assert epsilon_of({SAMPLED: 2000}, DELTA) == pytest.approx(1.816, abs=5e-4)
    assert epsilon_of({SAMPLED: 2000}, DELTA, "pld") == pytest.approx(0.743, abs=5e-4)


def loss_bounds(z: float, q: float, count: int, step: float = 1e-5) -> list[float]:
    """Return a lower and an upper bound of epsilon for removal.

    Losses are rounded down and up to a grid, and then convolved. The loss at x is
    log((1 - q) + q exp((2x - 1) / (2 z^2))), with x distributed as N(0, z^2), or as N(1, z^2) with
    probability q. It increases with x, so cells of the grid are intervals of x.
    """
    cells = 1 << 21
    low = math.floor(math.log1p(-q) / step)  # the infimum of the loss
    losses = (low + np.arange(1, cells)) * step
    with np.errstate(divide="ignore", invalid="ignore"):
        x = 0.5 + z**2 * np.log((np.exp(losses) - (1 - q)) / q)
    x = np.concatenate([[-np.inf], np.where(np.isnan(x), -np.inf, x), [np.inf]])
    below = (1 - q) * stats.norm.cdf(x / z) + q * stats.norm.cdf((x - 1) / z)
    composed = np.fft.irfft(np.fft.rfft(np.diff(below)) ** count, cells)
    found = []
    for offset in (0, 1):
        # the mean of the sum is far above its start: the distribution wraps around the grid
        total = (low + offset) * count + np.arange(cells)
        total = np.where(total * step < -cells * step / 4, total + cells, total) * step
        gains = lambda e, total=total: (composed * np.maximum(-np.expm1(e - total), 0)).sum()  # noqa: E731
        found.append(optimize.brentq(lambda e, gains=gains: gains(e) - DELTA, 0, 4))
    return found


@pytest.mark.parametrize(
    ("z", "q", "count"), [(0.7, 0.001, 1), (0.7, 0.001, 300), (2.0, 0.05, 100)]
)
def test_sampled_losses_are_never_understated(z: float, q: float, count: int) -> None:
    low, high = loss_bounds(z, q, count)
    assert high - low < 0.01
    found = epsilon_of({Release(z, q, "add or remove"): count}, DELTA, "pld")
    assert low <= found <= high + 1e-3


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 3e-10, 1e-11, 1e-14])
@pytest.mark.parametrize("rate", [1.0, 1 - 1e-12])
def test_rounding_errors_are_never_in_favour(delta: float, rate: float) -> None:
    """Epsilon is never below the exact figure, even for tiny deltas.

    The exact figure is that of one Gaussian with mu = sqrt(T) / z (Balle & Wang 2018), for rates
    that differ by 1e-12.
    """
    release = Release(5000 / 2 / math.sqrt(200), rate, "add or remove")
    mu = math.sqrt(1300) / release.noise_multiplier

    def delta_of(e: float) -> float:
        tails = stats.norm.cdf([mu / 2 - e / mu, -mu / 2 - e / mu])
        return float(tails[0] - math.exp(e) * tails[1])

    exact = optimize.brentq(lambda e: delta_of(e) / delta - 1, 0, 5)
    found = epsilon_of({release: 1300}, delta, "pld")
    assert exact * (1 - 1e-9) <= found <= epsilon_of({release: 1300}, delta)
    assert found < 1.001 * exact or delta < 1e-9


@pytest.mark.parametrize(
    "counts",
    [
        {SAMPLED: 3},
        {Release(20.0, 0.01, "add or remove"): 2_000_000},
        {SAMPLED: 50, Release(9.0, 1.0, "add or remove"): 5},
    ],
)
def test_losses_never_exceed_renyi(counts: dict[Release, int]) -> None:
    assert 0 < epsilon_of(counts, DELTA, "pld") <= epsilon_of(counts, DELTA)


def test_kinds_of_releases_add_up_as_losses() -> None:
    """Releases of two nearly equal kinds cost as much as releases of one kind."""
    other = Release(0.7 * (1 + 1e-12), 0.001, "add or remove")
    one, two = ({SAMPLED: 400}, {SAMPLED: 150, other: 250})
    assert epsilon_of(two, DELTA, "pld") == pytest.approx(epsilon_of(one, DELTA, "pld"), rel=1e-5)


def test_a_budget_of_losses() -> None:
    """A budget with accounting "pld" ends at its epsilon, after more releases than with "rdp".

    The state and errors of the budget name the accounting.
    """
    budget, release = PrivacyBudget(0.6, DELTA, "pld"), Release(2.0, 0.01, "add or remove")
    room = budget.left(release)
    assert room > 1.1 * PrivacyBudget(0.6, DELTA).left(release)
    budget.spend(release, room)
    assert budget.spent() <= 0.6 < epsilon_of({release: room + 1}, DELTA, "pld")
    with pytest.raises(BudgetSpent, match="accounting='pld'"):
        budget.spend(release)
    saved = json.loads(json.dumps(budget.state_dict()))
    assert saved["privacy"]["accounting"] == "pld"
    fresh = PrivacyBudget(0.6, DELTA, accounting="pld")
    fresh.load_state_dict(saved)
    assert fresh.left(release) == 0 and fresh.spent() == budget.spent()
    plain = PrivacyBudget(0.6, DELTA)
    assert "accounting" not in repr(plain)
    with pytest.raises(ValueError, match="accounting is 'gdp', but must be"):
        PrivacyBudget(1.0, DELTA, "gdp")


def test_losses_need_less_noise() -> None:
    arguments = (1.0, DELTA, 10, 0.1, "add or remove")
    noise = multiplier_for(*arguments, accounting="pld")
    assert noise < multiplier_for(*arguments)
    release = Release(noise, 0.1, "add or remove")
    assert epsilon_of({release: 10}, DELTA, "pld") <= 1.0


def test_a_checkpoint_of_the_other_accounting_is_refused() -> None:
    worlds = [
        simulate(TopAgg(5, None, 120.0, budget=PrivacyBudget(1.0, DELTA, name)), 1)
        for name in ("rdp", "pld")
    ]
    for world in worlds:
        world.step(gradients(1))
    saved = checkpoint.snapshot(worlds[0].exchanges[0])
    with pytest.raises(ValueError, match="accounting='pld'.*but was .* when saved"):
        checkpoint.adopt(worlds[1].exchanges[0], saved)


# --------------------------------------------------------------------------------------- the ledger
def test_it_stops_before_the_budget_is_exceeded() -> None:
    budget, release = PrivacyBudget(1.0, DELTA), Release(30.0)
    room = budget.left(release)
    found = []
    for _ in range(room):
        budget.spend(release)
        found.append(budget.spent())
    assert all(a < b for a, b in zip(found, found[1:], strict=False)) and found[-1] <= 1.0
    assert epsilon_of({release: room + 1}, DELTA) > 1.0
    with pytest.raises(BudgetSpent, match=f"after {room} and would be 1.0"):
        budget.spend(release)
    assert budget.spent() == found[-1] and budget.left(release) == 0


def test_all_or_nothing() -> None:
    budget, release = PrivacyBudget(1.0, DELTA), Release(30.0)
    room = budget.left(release)
    with pytest.raises(BudgetSpent):
        budget.spend(release, room + 1)
    assert budget.spent() == 0
    budget.spend(release, room)


def test_different_releases_add_up() -> None:
    budget = PrivacyBudget(2.0, DELTA)
    budget.spend(Release(20.0), 10)
    before = budget.left(Release(40.0))
    budget.spend(Release(20.0), 5)
    assert budget.left(Release(40.0)) < before
    budget.spend(Release(40.0), 7)
    together = epsilon_of({Release(20.0): 15, Release(40.0): 7}, DELTA)
    assert budget.stats() == {"epsilon": together, "budget": 2.0, "delta": DELTA, "releases": 22}
    with pytest.raises(ValueError, match="neighbours that replace a record"):
        budget.spend(Release(20.0, 0.1, "add or remove"))


def test_counting_only() -> None:
    budget = PrivacyBudget(math.inf, DELTA)
    budget.spend(Release(0.5), 1000)
    assert 1 < budget.spent() < math.inf
    budget.spend(Release(0.0))
    assert budget.spent() == math.inf
    assert PrivacyBudget(1e6, DELTA).left(Release(0.0)) == 0


@pytest.mark.parametrize(("epsilon", "releases", "rate"), [(1.0, 1000, 1.0), (10.0, 50, 0.1)])
def test_the_noise_that_a_budget_wants(epsilon: float, releases: int, rate: float) -> None:
    relation = "replace" if rate == 1 else "add or remove"
    noise = multiplier_for(epsilon, DELTA, releases, rate, relation)
    assert PrivacyBudget(epsilon, DELTA).left(Release(noise, rate, relation)) >= releases
    less = Release(0.99 * noise, rate, relation)
    assert PrivacyBudget(epsilon, DELTA).left(less) < releases
    with pytest.raises(ValueError, match="epsilon is inf"):
        multiplier_for(math.inf, DELTA, 1)


def test_a_ledger_survives_and_never_goes_back() -> None:
    budget, release = PrivacyBudget(1.0, DELTA), Release(30.0)
    budget.spend(release, 5)
    saved = json.loads(json.dumps(budget.state_dict()))
    fresh = PrivacyBudget(1.0, DELTA)
    fresh.load_state_dict(saved)
    assert fresh.releases == budget.releases and fresh.left(release) == budget.left(release)
    budget.spend(release, 3)
    budget.load_state_dict(saved)  # weights may go back: what was released stays released
    assert budget.releases == {release: 8}
    assert copy.deepcopy(budget).spent() == budget.spent()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("epsilon", bad) for bad in (0, -1, math.nan, -math.inf, "a", True, None)],
        *[("delta", bad) for bad in (0, 1, -1e-5, math.nan, math.inf, "a", True, None)],
    ],
)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"PrivacyBudget: {name} is .*must be") as refusal:
        PrivacyBudget(**{"epsilon": 1.0, "delta": DELTA} | {name: value})
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((math.nan,), "noise_multiplier is nan"),
        ((-1.0,), "noise_multiplier is -1.0"),
        ((math.inf,), "noise_multiplier is inf"),
        ((1.0, 0.0, "add or remove"), "rate is 0.0"),
        ((1.0, 0.5, "replace"), "rate is 0.5"),
        ((1.0, 1.0, "forget"), "relation is 'forget'"),
    ],
)
def test_releases_that_make_no_sense(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Release(*arguments)


def test_without_the_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="PrivacyBudget needs dp-accounting"):
        PrivacyBudget(1.0, DELTA)


# -------------------------------------------------------------------------------------- in training
def gradients(ranks: int) -> list[dict[str, np.ndarray]]:
    return [{"w": np.ones((8, 9), np.float32)} for _ in range(ranks)]


def test_training_stops() -> None:
    method = TopAgg(5, None, 120.0, budget=PrivacyBudget(1.0, DELTA))
    room = method.budget.left(method.mechanism)
    world = simulate(method, 2)
    for done in range(room):
        world.step(gradients(2))
        assert world.exchanges[0].policy.affords() == (done + 1 < room)
        assert world.exchanges[0].stats()["privacy"]["releases"] == done + 1
    with pytest.raises(BudgetSpent):
        world.step(gradients(2))
    for exchange in world.exchanges:
        found = exchange.stats()
        assert found["steps"] == room == found["privacy"]["releases"]
        assert 0.9 < found["privacy"]["epsilon"] <= 1.0
    assert method.budget.spent() == 0  # simulated ranks have ledgers of their own


def test_a_checkpoint_has_what_was_spent() -> None:
    method = TopAgg(5, None, 120.0, budget=PrivacyBudget(1.0, DELTA))
    one = simulate(method, 1)
    for _ in range(4):
        one.step(gradients(1))
    saved = json.loads(json.dumps(checkpoint.describe(one.exchanges[0])))
    two = simulate(method, 1)
    two.step(gradients(1))
    checkpoint.restoring(two.exchanges[0], checkpoint.saved_of(one.exchanges[0]), saved)()
    two.step(gradients(1))
    assert two.exchanges[0].stats()["privacy"]["releases"] == 5
    assert not checkpoint.named(checkpoint.saved_of(two.exchanges[0])), (
        "nothing but noisy results may be kept"
    )


# --------------------------------------------------------------------------------------------- lots
def test_lots_are_drawn_record_by_record() -> None:
    samplers = [PoissonSampler(1000, 0.1, rank, 3) for rank in range(3)]
    assert sorted(np.concatenate([s.mine for s in samplers])) == list(range(1000))
    sizes = [sum(len(s.draw()) for s in samplers) for _ in range(200)]
    assert abs(np.mean(sizes) - 100) < 6 * math.sqrt(90 / 200)
    assert 0.5 < np.var(sizes) / 90 < 1.7  # a fixed size would have none
    assert samplers[0].expected == 100 and len(list(samplers[0])) == 10


@pytest.mark.parametrize("rate", [1e-19, 1e-8, 1e-7, 0.1, 0.3, 1 - 2**-53, 1.0])
def test_the_true_rate_never_exceeds_the_rate(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is drawn exactly if its 64-bit word is below floor(2^64 rate)."""
    most = math.floor(Fraction(rate) * 2**64)
    words = sorted({0, most // 2, max(most - 1, 0), min(most, 2**64 - 1), 2**63, 2**64 - 1})
    monkeypatch.setattr(secret.os, "urandom", lambda n: np.array(words, np.uint64).tobytes())
    drawn = PoissonSampler(len(words), rate).draw()
    assert [words[i] for i in drawn] == [word for word in words if word < most]


def test_lots_do_not_repeat() -> None:
    found = []
    for _ in range(2):
        np.random.seed(0)
        found.append(PoissonSampler(10_000, 0.5).draw())
    assert not np.array_equal(*found)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 0.1), "size is 0"),
        ((10, 0.0), "rate is 0.0"),
        ((10, 1.5), "rate is 1.5"),
        ((10, 0.1, 2, 2), "rank is 2"),
        ((10, 0.1, 0, 0), "ranks is 0"),
    ],
)
def test_lots_that_make_no_sense(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PoissonSampler(*arguments)


# ------------------------------------------------------------------------------------------ ballots
def ballot(method: TopAgg) -> Ballot:
    return Ballot(method, SimulatedCommunicator(Hub(1), 0, NUMPY.xp))


def test_every_image_is_a_release() -> None:
    budget = PrivacyBudget(1.0, DELTA)
    method = TopAgg(4, None, 100.0, 0.2, unit="teacher", contributors=20, budget=budget)
    votes = ballot(method)
    room = budget.left(method.mechanism)
    wanted = np.random.default_rng(0).standard_normal((20, 3, 64)).astype(np.float32)
    while votes.affords(3):
        found = votes.vote(wanted)
        assert found.shape == (3, 64) and set(np.unique(found)) <= {-1, 0, 1}
    with pytest.raises(BudgetSpent):
        votes.vote(wanted)
    counted = votes.exchange.stats()
    assert counted["privacy"]["releases"] == room // 3 * 3
    assert counted["steps"] == room // 3 and counted["payload"] == 2 * 192 * (room // 3)


def test_images_are_voted_on_apart() -> None:
    """A ballot on several images gives the same results as one ballot on each image."""
    signs = np.sign(np.random.default_rng(1).standard_normal((6, 5, 30))).astype(np.float32)
    method = TopAgg(4, 1e-9, 0.0, unit="teacher", contributors=6, unprotected=True)
    together = ballot(method).vote(signs)
    for image in range(5):
        alone = ballot(method).vote(signs[:, image : image + 1])
        np.testing.assert_array_equal(together[image], alone[0])


def test_ranks_of_a_ballot_agree_on_the_accounting() -> None:
    """Ranks with different accountings raise RanksDisagree, and release nothing.

    Otherwise one rank would stop while the others wait for its vote.
    """
    hub = Hub(2)

    def vote(rank: int) -> str:
        budget = PrivacyBudget(1.0, DELTA, ("rdp", "pld")[rank])
        method = TopAgg(4, None, 100.0, unit="teacher", contributors=20, budget=budget)
        with pytest.raises(RanksDisagree) as refusal:
            Ballot(method, Threaded(hub, rank, NUMPY.xp)).vote(np.ones((10, 1, 64), np.float32))
        assert not budget.releases
        return str(refusal.value)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(vote, range(2)):
            assert "accounting='pld'" in message and "rank 1" in message


def test_ballots_refuse() -> None:
    method = TopAgg(4, None, 100.0, unit="teacher", contributors=20)
    with pytest.raises(ValueError, match="the gradients' shape is .20, 64., but must be"):
        ballot(method).vote(np.zeros((20, 64), np.float32))
    with pytest.raises(ValueError, match="method is 'topagg', but must be a TopAgg"):
        Ballot("topagg", SimulatedCommunicator(Hub(1), 0, NUMPY.xp))


# --------------------------------------------------------------------- gradients of single examples
@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
def test_gradients_of_examples_in_torch() -> None:
    import torch

    from accordion_hvd.privacy import torch as single

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.GroupNorm(1, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(3 * 36, 5),
    )  # fmt: skip
    model[4].bias.requires_grad_(False)
    x, y = torch.randn(6, 1, 8, 8), torch.randint(0, 5, (6,))
    loss = torch.nn.functional.cross_entropy
    for chunk in (None, 2):
        found = single.gradients(model, loss, x, y, chunk)
        assert "4.bias" not in found
        for i in range(6):
            model.zero_grad()
            loss(model(x[i : i + 1]), y[i : i + 1]).backward()
            for name, parameter in model.named_parameters():
                if name in found:
                    torch.testing.assert_close(found[name][i], parameter.grad, atol=1e-5, rtol=1e-4)
    single.backward(model, loss, x[:0], y[:0])
    assert model[0].weight.grad_sample.shape == (0, 3, 1, 3, 3)
    with pytest.raises(ValueError, match="'0' is a BatchNorm2d, which mixes"):
        single.backward(torch.nn.Sequential(torch.nn.BatchNorm2d(1)), loss, x, y)


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="opacus not installed")
def test_gradients_are_those_of_opacus() -> None:
    import torch
    from opacus import GradSampleModule

    from accordion_hvd.privacy import torch as single

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    found = single.gradients(model, torch.nn.functional.cross_entropy, x, y)
    theirs = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    torch.nn.functional.cross_entropy(theirs(x), y, reduction="sum").backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name.removeprefix("_module.")], parameter.grad_sample)


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_gradients_of_examples_in_tensorflow() -> None:
    import keras
    import tensorflow as tf

    from accordion_hvd.privacy import tensorflow as single

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(3, 3), layers.LayerNormalization(), layers.Flatten(),
        layers.Dense(5),
    ])  # fmt: skip
    x, y = np.random.randn(6, 8, 8, 1).astype(np.float32), np.arange(6) % 5
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    found = single.gradients(model, loss, x, y)
    for i in range(6):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(y[i : i + 1], model(x[i : i + 1])))
        for mine, each in zip(tape.gradient(value, model.trainable_variables), found, strict=True):
            np.testing.assert_allclose(each[i], mine, atol=1e-5)
    assert [g.shape[0] for g in single.gradients(model, loss, x[:0], y[:0])] == [0] * 6
    with pytest.raises(ValueError, match="reduction=None"):
        mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        single.gradients(model, mean, x, y)
    mixing = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(1)])
    with pytest.raises(ValueError, match="is a BatchNormalization, which mixes"):
        single.gradients(mixing, loss, x[:, 0, :4, 0], y)
