"""Privacy budgets: the total privacy cost of releases, computed by Google's dp-accounting."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.observer import Observer
from accordion_hvd.ops import secret

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import Bucket

Relation: TypeAlias = Literal["replace", "add or remove"]
"""Relations of neighbouring data sets: they differ in one record's value, or in its presence."""

Accounting: TypeAlias = Literal["rdp", "pld"]
"""Methods that compute epsilon: Renyi divergences, or privacy loss distributions."""

_ORDERS = [*range(2, 65), *range(72, 257, 8), 512, 1024]
"""Orders of the Renyi divergences of Poisson samples; at other orders series may not converge."""

_MOST = 1 << 40  # largest number of releases
_INTERVAL = 1e-4  # of discrete privacy losses
_ROUNDING = 1e-10  # part of delta reserved for rounding errors of the PLD's Fourier transforms
_LARGE = 100.0  # largest epsilon for which PLDs are computed
_MANY = 10**6  # largest number of sampled releases for which PLDs are fast


class BudgetSpent(RuntimeError):
    """Raised before a release that would exceed the privacy budget."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


@dataclass(frozen=True)
class Release:
    """A release by the Gaussian mechanism, optionally on a Poisson sample.

    Attributes:
        noise_multiplier: standard deviation of the noise, divided by the sensitivity.
        rate: probability that a record is in the sample, in (0, 1]. A rate below 1 requires a
            secret Poisson sample (`PoissonSampler`). For batches of a shuffling loader it would
            understate epsilon: use 1 for these.
        relation: relation of neighbouring data sets, "replace" or "add or remove".
    """

    noise_multiplier: float
    rate: float = 1.0
    relation: Relation = "replace"

    def __post_init__(self) -> None:
        value = self.noise_multiplier
        if not check.is_number(value) or not 0 <= value <= 1e12:
            check.refuse(self, "noise_multiplier", value, "a number from 0 to 1e12")
        check.ratio(self, "rate", self.rate)
        check.one_of(self, "relation", self.relation, get_args(Relation))
        if self.relation == "replace" and self.rate != 1:
            check.refuse(self, "rate", self.rate, "1 where records are replaced")


class PrivacyBudget:
    """The (epsilon, delta)-differential privacy that all releases together may spend.

    The budget is a ledger: `spend` records a release, and raises `BudgetSpent` before a release
    that would exceed the budget. dp-accounting adds up the costs of the releases and converts the
    sum to epsilon, by one of two methods:

    - "rdp": Renyi divergences (Mironov 2017; for Poisson samples, Mironov, Talwar & Zhang 2019).
      The conversion is somewhat tighter than that of DataLens.
    - "pld": privacy loss distributions (Koskela, Jalko & Honkela 2020), discretized pessimistically
      by "connect the dots" (Doroshenko et al. 2022). Epsilon is smaller, most of all for low rates
      and few releases, and takes seconds to compute instead of milliseconds. Unsampled releases
      are together one Gaussian mechanism. 1e-10 of delta is reserved for rounding errors. The
      Renyi epsilon is used instead if it is smaller or above 100, and for more than a million
      sampled releases.

    Both are upper bounds of epsilon. All ranks must have the same arguments, and have the same
    ledger.

    Loading a checkpoint never reduces the ledger: for each kind of release the larger count is
    used. The ledger does not include releases of a crashed job since its last checkpoint, and a
    copy of a budget counts separately. Trials with other settings cost privacy, too: pass the same
    budget to all of them.

    Args:
        epsilon: privacy bound, above 0; with infinity, releases are counted and never refused.
        delta: probability in (0, 1), well below 1 / (number of records).
        accounting: method that computes epsilon, "rdp" or "pld".

    Raises:
        ValueError: if an argument is out of range.
        ImportError: if dp-accounting is not installed.
    """

    def __init__(self, epsilon: float, delta: float, accounting: Accounting = "rdp") -> None:
        if not (check.is_number(epsilon) or epsilon == math.inf) or not epsilon > 0:
            check.refuse(self, "epsilon", epsilon, "a number above 0, or infinity")
        if not check.is_number(delta) or not 0 < delta < 1:
            check.refuse(self, "delta", delta, "a number in (0, 1)")
        check.one_of(self, "accounting", accounting, get_args(Accounting))
        self.epsilon, self.delta, self.accounting = float(epsilon), float(delta), accounting
        self.releases: dict[Release, int] = {}
        self._left: dict[Release, int] = {}  # cache, valid until another kind is spent
        _accounting()

    def __repr__(self) -> str:
        """Return the constructor call, which does not depend on the releases so far."""
        more = f", accounting={self.accounting!r}" if self.accounting != "rdp" else ""
        return f"PrivacyBudget(epsilon={self.epsilon!r}, delta={self.delta!r}{more})"

    def spent(self, more: Mapping[Release, int] | None = None) -> float:
        """Return epsilon of all releases so far, plus those in `more`; 0 if there are none."""
        counts = dict(self.releases)
        for release, count in (more or {}).items():
            counts[release] = counts.get(release, 0) + count
        return epsilon_of(counts, self.delta, self.accounting)

    def left(self, release: Release) -> int:
        """Return the number of further releases of this kind that the budget allows.

        Raises:
            ValueError: if the ledger has releases with another relation of neighbours.
        """
        self._check_relation(release)
        if release not in self._left:
            self._left[release] = self._search(release)
        return self._left[release]

    def spend(self, release: Release, count: int = 1) -> None:
        """Record `count` releases; call it before they are made.

        Raises:
            BudgetSpent: if the budget does not allow all of them; none is then recorded.
            ValueError: see `left`.
        """
        check.integer(self, "count", count, least=1)
        left = self.left(release)
        if count > left:
            raise BudgetSpent(
                f"{self!r}: {count} more release(s) would exceed it: epsilon is {self.spent():.6g} "
                f"after {sum(self.releases.values())} and would be "
                f"{self.spent({release: count}):.6g}. Training must end here, with the model of "
                "the last release."
            )
        self.releases[release] = self.releases.get(release, 0) + count
        self._left = {release: left - count}

    def stats(self) -> dict[str, float]:
        """Return the spent epsilon, the budget's epsilon and delta, and the number of releases."""
        stats = {"epsilon": self.spent(), "budget": self.epsilon, "delta": self.delta}
        return stats | {"releases": sum(self.releases.values())}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger and the arguments of the budget as a JSON-serializable dict."""
        rows = [{**asdict(release), "count": n} for release, n in self.releases.items()]
        arguments = {"epsilon": self.epsilon, "delta": self.delta, "accounting": self.accounting}
        return {"privacy": arguments | {"releases": rows}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Merge a saved ledger: for each kind of release the larger count is used.

        The arguments of this budget stay as they are. Checkpoints of a job with other arguments are
        refused before this method is called.
        """
        for row in state["privacy"]["releases"]:
            fields = {key: value for key, value in row.items() if key != "count"}
            release, count = Release(**fields), row["count"]
            self._check_relation(release)
            self.releases[release] = max(self.releases.get(release, 0), count)
        self._left.clear()

    def _check_relation(self, release: Release) -> None:
        recorded = next(iter(self.releases), release).relation
        if recorded != release.relation:
            raise ValueError(
                f"{self!r} has releases for neighbours that {recorded} a record, but this release "
                f"is for neighbours that {release.relation} a record; use one budget for each."
            )

    def _search(self, release: Release) -> int:
        if self.epsilon == math.inf:
            return _MOST
        low = bisect.bisect(range(1, _MOST + 1), self.epsilon, key=self._spent_with(release, "rdp"))
        if self.accounting == "rdp":
            return low
        spent, high = self._spent_with(release, "pld"), 2 * low + 1  # "pld" allows at least `low`
        while high < _MOST and spent(high) <= self.epsilon:
            low, high = high, 2 * high
        return low + bisect.bisect(range(low + 1, min(high, _MOST) + 1), self.epsilon, key=spent)

    def _spent_with(self, release: Release, accounting: Accounting) -> Callable[[int], float]:
        """Return the function from a number of further releases to epsilon."""
        before = self.releases.get(release, 0)
        return lambda count: epsilon_of(
            {**self.releases, release: before + count}, self.delta, accounting
        )


def epsilon_of(
    counts: Mapping[Release, int], delta: float, accounting: Accounting = "rdp"
) -> float:
    """Return an upper bound of epsilon of these numbers of releases; infinity without noise."""
    counts = {release: count for release, count in counts.items() if count}
    if not counts:
        return 0.0
    if any(release.noise_multiplier < 1e-6 for release in counts):
        return math.inf  # the accountant would divide by 0
    epsilon = _renyi_epsilon(counts, delta)
    sampled = sum(count for release, count in counts.items() if release.rate < 1)
    feasible = epsilon <= _LARGE and sampled <= _MANY and delta > _ROUNDING
    if accounting == "pld" and feasible:
        epsilon = min(epsilon, _loss_epsilon(tuple(counts.items()), delta - _ROUNDING))
    return epsilon


def _renyi_epsilon(counts: Mapping[Release, int], delta: float) -> float:
    sampled = any(release.rate < 1 for release in counts)
    orders: Any = None
    total: Any = 0.0
    for release, count in counts.items():
        orders, divergences = _divergences(release, sampled)
        total = total + count * divergences
    epsilon = float(_accounting()[1].compute_epsilon(orders, total, delta)[0])
    return math.inf if math.isnan(epsilon) else epsilon


@functools.lru_cache(maxsize=64)
def _loss_epsilon(counts: tuple[tuple[Release, int], ...], delta: float) -> float:
    """Return epsilon by privacy loss distributions.

    The relation of neighbours does not matter for unsampled releases, because their noise
    multipliers refer to the sensitivity under that relation. Sampled ones are "add or remove".
    """
    parts = [_loss(r.noise_multiplier, r.rate).self_compose(n) for r, n in counts if r.rate < 1]
    precision = sum(n / r.noise_multiplier**2 for r, n in counts if r.rate == 1)
    if precision:
        parts.append(_loss(precision**-0.5, 1.0))
    total = functools.reduce(lambda one, other: one.compose(other), parts)
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=8)
def _loss(noise_multiplier: float, rate: float) -> Any:
    """Return the privacy loss distribution of one release, discretized pessimistically."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        pessimistic_estimate=True,
        value_discretization_interval=_INTERVAL,
        sampling_prob=rate,
    )


@functools.lru_cache(maxsize=256)
def _divergences(release: Release, sampled: bool) -> tuple[Any, Any]:
    """Return orders, and the Renyi divergence of one release at each order."""
    accounting, rdp = _accounting()
    accountant = rdp.RdpAccountant(_ORDERS) if sampled else rdp.RdpAccountant()
    event = accounting.GaussianDpEvent(release.noise_multiplier)
    if release.rate < 1:
        event = accounting.PoissonSampledDpEvent(release.rate, event)
    accountant.compose(event)
    return accountant.orders, accountant.rdp


def multiplier_for(
    epsilon: float,
    delta: float,
    releases: int,
    rate: float = 1.0,
    relation: Relation = "replace",
    accounting: Accounting = "rdp",
) -> float:
    """Return the least noise multiplier (to 0.1 %) for this number of releases in a budget.

    Args:
        epsilon: privacy bound, above 0.
        delta: probability in (0, 1).
        releases: number of releases.
        rate: probability that a record is in a secret Poisson sample, in (0, 1]; see `Release`.
        relation: relation of neighbouring data sets, "replace" or "add or remove".
        accounting: method that computes epsilon, that of the `PrivacyBudget`.

    Raises:
        ValueError: if an argument is out of range.
    """
    check.integer("multiplier_for", "releases", releases, least=1)
    if not check.is_number(epsilon) or not epsilon > 0:
        check.refuse("multiplier_for", "epsilon", epsilon, "a number above 0")
    check.one_of("multiplier_for", "accounting", accounting, get_args(Accounting))
    spent = lambda noise: epsilon_of({Release(noise, rate, relation): releases}, delta, accounting)  # noqa: E731
    low, high = 0.0, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


def _accounting() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise ImportError(
            "PrivacyBudget needs dp-accounting, which is not installed; "
            "install it: pip install dp-accounting."
        ) from None
    return dp_accounting, rdp


# --------------------------------------------------------------------------- accounting of a policy
class PrivacyAccountant(Observer):
    """Charges each exchange, before it, to the budget; protects every gradient.

    Args:
        policy: the policy of the exchanges.
        budget: their budget; None: releases are not counted.
        release: the release of one exchange.
    """

    every_step = True
    needed_alone = True
    private = True

    def __init__(self, policy: Any, budget: PrivacyBudget | None, release: Release) -> None:
        self.policy, self.budget, self.release = policy, budget, release

    def extending(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        """Raise ValueError if a tensor would be sent outside the protected vector."""
        if exchange.skip:
            raise ValueError(
                f"skip is {exchange.skip!r}, but must be () with {self.policy!r}: the tensors that "
                "skip names would be sent unprotected."
            )
        if len(buckets) > 1:
            kinds = ", ".join(f"{bucket.name} ({bucket.dtype})" for bucket in buckets)
            raise ValueError(
                f"{self.policy!r} takes the entire model as one vector, but the parameters form "
                f"{len(buckets)}: {kinds}. All parameters must have one dtype, be on one device, "
                "and exist from the first step."
            )

    def opening(self, exchange: Exchange, lr: Mapping[str, float]) -> None:
        if self.budget is not None:
            self.budget.spend(self.release)

    def affords(self) -> bool:
        return self.budget is None or self.budget.left(self.release) >= 1

    def stats(self) -> dict[str, Any]:
        return {"privacy": {} if self.budget is None else self.budget.stats()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.budget is None else self.budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.budget is not None:
            self.budget.load_state_dict(state)


# ---------------------------------------------------------------------------------- Poisson samples
class PoissonSampler:
    """This rank's part of lots that contain each record independently with probability `rate`.

    Subsampling reduces the privacy cost of a release only if the sample is secret. Samples are
    therefore drawn from the operating system's cryptographic source, never from a seed. A record is
    in a lot if 64 random bits, read as an integer, are below floor(2^64 rate), so the true
    probability never exceeds the rate that the budget accounts for. The ranks' parts of the data
    are fixed and disjoint: rank r has records r, r + ranks, ... Lots differ in size and may be
    empty.

    Args:
        size: number of records on all ranks.
        rate: probability that a record is in a lot, in (0, 1]; pass the same rate to `TopAgg`.
        rank: this rank.
        ranks: number of ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, size: int, rate: float, rank: int = 0, ranks: int = 1) -> None:
        check.integer(self, "size", size, least=1)
        check.ratio(self, "rate", rate)
        check.integer(self, "ranks", ranks, least=1)
        check.integer(self, "rank", rank, least=0, most=ranks - 1)
        self.size, self.rate = size, float(rate)
        self.mine = np.arange(rank, size, ranks)

    @property
    def expected(self) -> int:
        """Expected number of records in a lot of all ranks, for `TopAgg.contributors`."""
        return max(1, round(self.size * self.rate))

    def draw(self) -> np.ndarray:
        """Return the numbers (int64, ascending) of this rank's records in the next lot."""
        return self.mine[secret.bernoulli(len(self.mine), self.rate)]

    def __len__(self) -> int:
        """Return the number of lots in which each record is expected once."""
        return max(1, round(1 / self.rate))

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.draw() for _ in range(len(self)))
