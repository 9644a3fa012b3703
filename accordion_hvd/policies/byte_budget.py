"""A cap on the bytes that a policy's levels may send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accordion_hvd import check
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.cost_model import averaging_share, bytes_sent
from accordion_hvd.policies.critical_regimes import HIGH, LOW
from accordion_hvd.policies.decision import Decision

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import Bucket

MEGABYTE = 1e6
OVER = "over the budget"


class ByteBudget(Observer):
    """Caps the bytes of an exchange, on average over its small batches.

    Args:
        policy: an `Accordion`. The cap also sets the policy's `first`, `growth` and `alternation`.
        megabytes: MB (10^6 bytes) that a rank may send per small batch.
    """

    def __init__(self, policy: Any, megabytes: float) -> None:
        if not (check.is_number(megabytes) and megabytes > 0):
            check.refuse(policy, "budget", megabytes, "a number above 0 (MB a step), or None")
        self.policy, self.megabytes = policy, megabytes
        self._prices: Mapping[str, Sequence[float]] = {}
        self._exempt = 0.0  # bytes per exchange of the buckets exempt from the policy
        self._models = 0.0  # bytes per step while models are averaged

    def extending(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        """Compute the bytes of each level; refuse tensors that exceed the budget at all levels."""
        ranks = exchange.communicator.size

        def price(level: Any, bucket: Any) -> float:
            return bytes_sent(level, bucket.shape, bucket.dtype, ranks)

        prices = {
            bucket.name: [price(level, bucket) for level in exchange.policy.choices(bucket)]
            for bucket in buckets
            if bucket.compress
        }
        exempt = [price(exchange.policy.choices(b)[0], b) for b in buckets if not b.compress]
        models, alternation = 0.0, self.policy.alternation
        if alternation is not None:
            dense = sum(bucket.dense_bytes for bucket in buckets)
            models = averaging_share(alternation.method, ranks) * dense
        self.price(prices, sum(exempt), models)

    def price(
        self, levels: Mapping[str, Sequence[float]], rest: float, models: float = 0.0
    ) -> None:
        """Set the bytes that an exchange sends; equal on all ranks.

        Args:
            levels: bucket -> bytes that a rank sends for it at each level.
            rest: bytes of the buckets exempt from the policy.
            models: mean bytes per step while models are averaged instead.

        Raises:
            ValueError: if even the cheapest levels exceed the budget.
        """
        self._prices, self._exempt, self._models = levels, rest, models
        growth, alternation = self.policy.growth, self.policy.alternation
        least, most = self._least(), 1 if growth is None else growth.ratio
        least = least if alternation is None else min(least, models)
        if least > self._room(most):
            megabytes = f"{math.ceil(least / most) / MEGABYTE:g}"
            allowed = f"at least {megabytes}, the MB that the cheapest levels send, or None"
            check.refuse(self.policy, "budget", self.megabytes, allowed)
        if growth is not None and least > self._room(1):
            growth.grow(True)
        now = self.policy.observers.weight
        self.policy.first = self._affordable(dict.fromkeys(levels, LOW), {}, now)
        if alternation is not None and not self.policy.steps:
            alternation.averaging_models = self.allowed(LOW, now) == HIGH

    def cap(self, rows: Sequence[Decision], current: Mapping[str, int], batches: int) -> None:
        """Replace the levels of `rows` that exceed the budget by cheaper ones.

        Buckets without a row keep their `current` level. `batches` is the number of small batches
        in each of the next exchanges.
        """
        if not rows:
            return
        wanted = dict(current) | {row.name: row.level for row in rows}
        urgency = {row.name: 1e300 if math.isnan(row.change) else row.change for row in rows}
        chosen = self._affordable(wanted, urgency, batches)
        for row in rows:
            if row.level != chosen[row.name]:
                row.level, row.reason = chosen[row.name], f"{row.reason}, but {OVER}"

    def allowed(self, wanted: int, batches: int) -> int:
        """Return `wanted` (LOW: gradients, HIGH: models) if affordable, else the cheaper mode."""
        costs = self._least(), self._models
        cheaper = LOW if costs[LOW] <= costs[HIGH] else HIGH
        return wanted if costs[wanted] <= self._room(batches) else cheaper

    def _affordable(
        self, wanted: Mapping[str, int], urgency: Mapping[str, float], batches: int
    ) -> dict[str, int]:
        return affordable(wanted, self._prices, urgency, self._room(batches) - self._exempt)

    def _least(self) -> float:
        return self._exempt + sum(map(min, self._prices.values()))

    def _room(self, batches: int) -> float:
        return self.megabytes * MEGABYTE * batches


def affordable(
    wanted: Mapping[str, int],
    prices: Mapping[str, Sequence[float]],
    urgency: Mapping[str, float],
    room: float,
) -> dict[str, int]:
    """Return the wanted levels as far as the budget allows, otherwise the cheapest ones.

    Every bucket starts at its cheapest level. Then buckets get their wanted level, the most urgent
    first (a missing urgency is the largest), as long as there is `room` for the bytes of all
    buckets.
    """
    chosen = {}
    for name, level in wanted.items():  # the wanted level if none is cheaper
        chosen[name] = min((level, *range(len(prices[name]))), key=prices[name].__getitem__)
    room -= sum(prices[name][level] for name, level in chosen.items())
    for name in sorted(wanted, key=lambda name: -urgency.get(name, math.inf)):
        more = prices[name][wanted[name]] - prices[name][chosen[name]]
        if more <= room:
            chosen[name] = wanted[name]
            room -= more
    return chosen
