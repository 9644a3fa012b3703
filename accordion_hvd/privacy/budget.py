"""Privacy budgets: the total cost of releases, by Google's dp-accounting."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accordion_hvd import check

RELATIONS = ("replace", "add or remove")
"""What one of two neighbouring data sets has in place of a record: another one, or none."""

_ORDERS = [*range(2, 65), *range(72, 257, 8), 512, 1024]
"""Of Renyi divergences of Poisson samples: between integers, series may not converge."""

_MOST = 1 << 40  # releases that anyone will count


class BudgetSpent(RuntimeError):
    """Another release would exceed the privacy budget; it was not made."""

    __init__ = Exception.__init__  # else AutoGraph raises another class in its place


@dataclass(frozen=True)
class Release:
    """A Gaussian mechanism, maybe on a Poisson sample.

    Attributes:
        noise_multiplier: standard deviation of the noise divided by the sensitivity.
        rate: with which probability a record takes part.
        relation: of neighbouring data sets, one of `RELATIONS`.
    """

    noise_multiplier: float
    rate: float = 1.0
    relation: str = "replace"

    def __post_init__(self) -> None:
        """Raises: ValueError for an argument that makes no sense."""
        value = self.noise_multiplier
        if not check.is_number(value) or not 0 <= value <= 1e12:
            check.refuse(self, "noise_multiplier", value, "a number from 0 to 1e12")
        check.ratio(self, "rate", self.rate)
        check.one_of(self, "relation", self.relation, RELATIONS)
        if self.relation == "replace" and self.rate != 1:
            check.refuse(self, "rate", self.rate, "1 where records are replaced")


class PrivacyBudget:
    """The (epsilon, delta)-differential privacy that all releases together may spend.

    A ledger: `spend` enters a release, and refuses before anything is entered what would exceed
    the budget. Costs are Renyi divergences (Mironov 2017; of Poisson samples, Mironov, Talwar &
    Zhang 2019), added up and converted by dp-accounting's `RdpAccountant`, which is somewhat
    tighter than the conversion in DataLens. Every rank keeps the same ledger.

    A ledger never goes back: when a checkpoint is loaded, of each kind of release the larger count
    holds. What a crashed job has released since its last checkpoint is not in it; a copy of a
    budget counts for itself. Trials with other settings cost privacy too, and nobody counts them
    who does not hand them the same budget.

    Args:
        epsilon: a number above 0; infinity only counts.
        delta: a number in (0, 1), well below one in the number of records.

    Raises:
        ValueError: one is not.
        ImportError: dp-accounting is not installed.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        if not (check.is_number(epsilon) or epsilon == math.inf) or not epsilon > 0:
            check.refuse(self, "epsilon", epsilon, "a number above 0, or infinity")
        if not check.is_number(delta) or not 0 < delta < 1:
            check.refuse(self, "delta", delta, "a number in (0, 1)")
        self.epsilon, self.delta = float(epsilon), float(delta)
        self.releases: dict[Release, int] = {}
        self._left: dict[Release, int] = {}  # as long as nothing else is spent
        _accounting()

    def __repr__(self) -> str:
        """Return the constructor call; equal on all ranks, whatever has been spent."""
        return f"PrivacyBudget(epsilon={self.epsilon!r}, delta={self.delta!r})"

    def spent(self, more: Mapping[Release, int] | None = None) -> float:
        """Epsilon of all releases so far, or with `more`; 0 without any."""
        counts = dict(self.releases)
        for release, count in (more or {}).items():
            counts[release] = counts.get(release, 0) + count
        return epsilon_of(counts, self.delta)

    def left(self, release: Release) -> int:
        """Return how many more releases of a kind fit into the budget.

        Raises:
            ValueError: the budget counts under another relation of neighbours.
        """
        self._check_relation(release)
        if release not in self._left:
            self._left[release] = self._search(release)
        return self._left[release]

    def spend(self, release: Release, count: int = 1) -> None:
        """Enter `count` releases that are about to be made.

        Raises:
            BudgetSpent: there is no room for all of them; none is entered.
            ValueError: see `left`.
        """
        check.integer(self, "count", count, least=1)
        room = self.left(release)
        if count > room:
            raise BudgetSpent(
                f"{self!r}: {count} more release(s) would exceed it: epsilon is {self.spent():.6g} "
                f"after {sum(self.releases.values())} and would be "
                f"{self.spent({release: count}):.6g}. Training ends here; the model is that of the "
                "last release."
            )
        self.releases[release] = self.releases.get(release, 0) + count
        self._left = {release: room - count}

    def stats(self) -> dict[str, float]:
        """Epsilon spent, the budget's epsilon and delta, and the number of releases."""
        number = sum(self.releases.values())
        known = {"epsilon": self.spent(), "budget": self.epsilon, "delta": self.delta}
        return known | {"releases": number}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger, in JSON's types."""
        rows = [{**asdict(release), "count": n} for release, n in self.releases.items()]
        return {"privacy": {"epsilon": self.epsilon, "delta": self.delta, "releases": rows}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what has been spent; see the class."""
        for row in state["privacy"]["releases"]:
            fields = {key: value for key, value in row.items() if key != "count"}
            release, count = Release(**fields), row["count"]
            self._check_relation(release)
            self.releases[release] = max(self.releases.get(release, 0), count)
        self._left.clear()

    def _check_relation(self, release: Release) -> None:
        known = next(iter(self.releases), release).relation
        if known != release.relation:
            raise ValueError(
                f"{self!r} counts neighbours that {known} a record, but this release counts those "
                f"that {release.relation} one; use a budget for each."
            )

    def _search(self, release: Release) -> int:
        if self.epsilon == math.inf:
            return _MOST
        spent = lambda count: self.spent({release: count})  # noqa: E731
        return bisect.bisect(range(1, _MOST + 1), self.epsilon, key=spent)


def epsilon_of(counts: Mapping[Release, int], delta: float) -> float:
    """Return the epsilon of these releases of each kind; infinite where nothing is protected."""
    if not any(counts.values()):
        return 0.0
    if any(count and release.noise_multiplier < 1e-6 for release, count in counts.items()):
        return math.inf  # the accountant would divide by it
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
    """Orders, and the Renyi divergence of one release at each of them."""
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
    """Return the least noise multiplier (to a thousandth) at which `count` releases fit.

    Raises:
        ValueError: an argument makes no sense.
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
