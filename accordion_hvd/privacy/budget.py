"""Privacy budgets: the total privacy cost of releases, computed by Google's dp-accounting."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accordion_hvd import check

RELATIONS = ("replace", "add or remove")
"""Relations of neighbouring data sets: they differ in one record's value, or in its presence."""

_ORDERS = [*range(2, 65), *range(72, 257, 8), 512, 1024]
"""Orders of the Renyi divergences of Poisson samples; at other orders series may not converge."""

_MOST = 1 << 40  # largest number of releases


class BudgetSpent(RuntimeError):
    """Raised before a release that would exceed the privacy budget."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


@dataclass(frozen=True)
class Release:
    """A release by the Gaussian mechanism, optionally on a Poisson sample.

    Attributes:
        noise_multiplier: standard deviation of the noise, divided by the sensitivity.
        rate: probability that a record is in the sample, in (0, 1].
        relation: relation of neighbouring data sets, one of `RELATIONS`.
    """

    noise_multiplier: float
    rate: float = 1.0
    relation: str = "replace"

    def __post_init__(self) -> None:
        """Raises: ValueError if an argument is out of range."""
        value = self.noise_multiplier
        if not check.is_number(value) or not 0 <= value <= 1e12:
            check.refuse(self, "noise_multiplier", value, "a number from 0 to 1e12")
        check.ratio(self, "rate", self.rate)
        check.one_of(self, "relation", self.relation, RELATIONS)
        if self.relation == "replace" and self.rate != 1:
            check.refuse(self, "rate", self.rate, "1 where records are replaced")


class PrivacyBudget:
    """The (epsilon, delta)-differential privacy that all releases together may spend.

    The budget is a ledger: `spend` records a release, and raises `BudgetSpent` before a release
    that would exceed the budget. Costs are Renyi divergences (Mironov 2017; for Poisson samples,
    Mironov, Talwar & Zhang 2019). dp-accounting's `RdpAccountant` adds them up and converts the sum
    to epsilon; its conversion is somewhat tighter than that of DataLens. All ranks have the same
    ledger.

    Loading a checkpoint never reduces the ledger: for each kind of release the larger count is
    used. The ledger does not include releases of a crashed job since its last checkpoint, and a
    copy of a budget counts separately. Trials with other settings cost privacy, too: pass the same
    budget to all of them.

    Args:
        epsilon: privacy bound, above 0; with infinity, releases are counted and never refused.
        delta: probability in (0, 1), well below 1 / (number of records).

    Raises:
        ValueError: if an argument is out of range.
        ImportError: if dp-accounting is not installed.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        if not (check.is_number(epsilon) or epsilon == math.inf) or not epsilon > 0:
            check.refuse(self, "epsilon", epsilon, "a number above 0, or infinity")
        if not check.is_number(delta) or not 0 < delta < 1:
            check.refuse(self, "delta", delta, "a number in (0, 1)")
        self.epsilon, self.delta = float(epsilon), float(delta)
        self.releases: dict[Release, int] = {}
        self._left: dict[Release, int] = {}  # cache, valid until another kind is spent
        _accounting()

    def __repr__(self) -> str:
        """Return the constructor call, which does not depend on the releases so far."""
        return f"PrivacyBudget(epsilon={self.epsilon!r}, delta={self.delta!r})"

    def spent(self, more: Mapping[Release, int] | None = None) -> float:
        """Return epsilon of all releases so far, plus those in `more`; 0 if there are none."""
        counts = dict(self.releases)
        for release, count in (more or {}).items():
            counts[release] = counts.get(release, 0) + count
        return epsilon_of(counts, self.delta)

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
        """Return the ledger as a JSON-serializable dict."""
        rows = [{**asdict(release), "count": n} for release, n in self.releases.items()]
        return {"privacy": {"epsilon": self.epsilon, "delta": self.delta, "releases": rows}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Merge a saved ledger: for each kind of release the larger count is used."""
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
        spent = lambda count: self.spent({release: count})  # noqa: E731
        return bisect.bisect(range(1, _MOST + 1), self.epsilon, key=spent)


def epsilon_of(counts: Mapping[Release, int], delta: float) -> float:
    """Return epsilon of these numbers of releases; infinity if one of them has no noise."""
    if not any(counts.values()):
        return 0.0
    if any(count and release.noise_multiplier < 1e-6 for release, count in counts.items()):
        return math.inf  # the accountant would divide by 0
    sampled = any(release.rate < 1 for release in counts)
    orders: Any = None
    total: Any = 0.0
    for release, count in counts.items():
        orders, divergences = _divergences(release, sampled)
        total = total + count * divergences
    epsilon = float(_accounting()[1].compute_epsilon(orders, total, delta)[0])
    return math.inf if math.isnan(epsilon) else epsilon


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
    epsilon: float, delta: float, releases: int, rate: float = 1.0, relation: str = "replace"
) -> float:
    """Return the least noise multiplier (to 0.1 %) for this number of releases in a budget.

    Args:
        epsilon: privacy bound, above 0.
        delta: probability in (0, 1).
        releases: number of releases.
        rate: probability that a record is in a sample, in (0, 1].
        relation: relation of neighbouring data sets, one of `RELATIONS`.

    Raises:
        ValueError: if an argument is out of range.
    """
    check.integer("multiplier_for", "releases", releases, least=1)
    if not check.is_number(epsilon) or not epsilon > 0:
        check.refuse("multiplier_for", "epsilon", epsilon, "a number above 0")
    low, high = 0.0, 1.0
    while epsilon_of({Release(high, rate, relation): releases}, delta) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        fits = epsilon_of({Release(middle, rate, relation): releases}, delta) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high


def _accounting() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise ImportError(
            "PrivacyBudget needs dp-accounting, which is not installed; "
            "install the extra: pip install 'accordion_hvd[privacy]'."
        ) from None
    return dp_accounting, rdp
