"""Closed forms of the largest skew towards local nodes within a budget of the second moment.

A sampler draws nodes u with base probabilities p and weights them by 1 / p_u. Let c be the local
share of p. If local nodes are s times as likely, then q_u = s p_u / kappa for local nodes and
q_u = p_u / kappa for remote ones, where kappa = 1 + (s - 1) c. The remote share falls from 1 - c to
(1 - c) / kappa. The second moment of the estimate is M(q) = sum_u a_u^2 / q_u, where a_u is the
size of u's contribution. The budget D demands M(q) <= D M(p).

The budget bounds a second moment, not a variance. The variance of the mean of m i.i.d. draws is
(M(q) - ||A h||^2) / m, so the skew adds at most (D - 1) M(p) / m to it; relative to the variance
of the base sampler, this may be any factor. For example, if all neighbours have the same feature
and p is proportional to a, the base sampler has no variance, and the skewed one has.

Jiang & Rumi, "Communication-Efficient Sampling for Distributed Training of Graph Convolutional
Networks" (arXiv 2101.07706, 2021), proposed to make local nodes likelier, within a limit at which
training still converges. We could read only the abstract of the paper: the closed forms here are
our own derivations, not the paper's theorems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.graph.structure import Array

RULES = ("tight", "worst", "measured")


def normalizer(skew: Any, local: Any) -> Any:
    """Return kappa = 1 + (s - 1) c."""
    return 1.0 + (skew - 1.0) * local


def worst_case_skew(budget: float, local: Any) -> Array:
    """Return s = 1 + (D - 1) / c, for which M(q) <= D M(p) for any features.

    Then kappa = D, and p_u / q_u <= kappa for all u. The remote share shrinks by exactly D.

    Args:
        budget: D, at least 1.
        local: c, the local share of the base probabilities; any shape.

    Returns:
        s, of the same shape; 1 where c is 0 or 1, since all nodes are remote or all are local.
    """
    c = np.asarray(local, np.float64)
    mixed = (c > 0) & (c < 1)
    return np.where(mixed, 1.0 + (budget - 1.0) / np.where(mixed, c, 1.0), 1.0)


def tight_skew(budget: float, local: Any, moment: Any = None) -> Array:
    """Return the s for which M(q) = D M(p), given the local share `moment` of M(p).

    Let x be the local share of M(p) = sum_u a_u^2 / p_u. Then M(q) / M(p) = kappa (x / s + 1 - x).
    If p_u is proportional to a_u, then x = c and

        s = 1 + tau / 2 + sqrt(tau + tau^2 / 4)   with   tau = (D - 1) / (c (1 - c)).

    In general, s is the larger root of

        c (1 - x) s^2 + ((1 - c) (1 - x) + c x - D) s + (1 - c) x = 0.

    Args:
        budget: D, at least 1.
        local: c; any shape.
        moment: x, of the same shape; c if None.

    Returns:
        s, of the same shape, at least 1; 1 where c is 0 or 1. Infinite where x is 1, since remote
        nodes then contribute nothing.
    """
    c = np.asarray(local, np.float64)
    x = c if moment is None else np.asarray(moment, np.float64)
    mixed = (c > 0) & (c < 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        if moment is None:
            tau = np.maximum(budget - 1.0, 0.0) / (c * (1 - c))
            root = 1.0 + tau / 2 + np.sqrt(tau + tau * tau / 4)
        else:
            root = _larger_root(c * (1 - x), (1 - c) * (1 - x) + c * x - budget, (1 - c) * x)
    return np.where(mixed, np.maximum(root, 1.0), 1.0)


def _larger_root(a: Array, b: Array, d: Array) -> Array:
    """Return the larger root of a s^2 + b s + d where b is negative, else 1; infinite if a is 0."""
    inside = np.sqrt(np.maximum(b * b - 4 * a * d, 0.0))
    return np.where(b < 0, (inside - b) / (2 * a), 1.0)


def skew_for(
    rule: str, budget: float, local: Any, moment: Any = None, most: float = np.inf
) -> Array:
    """Return s by one of `RULES`, clamped to [1, `most`].

    Args:
        rule: "worst" (`worst_case_skew`), "tight" (`tight_skew` as if p were proportional to a) or
            "measured" (`tight_skew` with `moment`).
        budget: D. D = 1 always gives s = 1, the base sampler, even if "measured" would allow a
            larger s at the same second moment.
        local: c.
        moment: x, for "measured".
        most: the upper bound; without it, s would be very large if c is close to 0 or 1.
    """
    if budget == 1:
        return np.ones(np.shape(local))
    if rule == "worst":
        skew = worst_case_skew(budget, local)
    else:
        skew = tight_skew(budget, local, moment if rule == "measured" else None)
    return np.clip(skew, 1.0, most)


# ------------------------------------------------------------ the guard of the second-moment budget
@dataclass(frozen=True, eq=False)
class Trace:
    """The probabilities with which a layer was sampled, for `SecondMomentGuard` and for tests.

    A trace has one entry per draw: a pair of target and neighbour (node-wise), or a node
    (layer-wise).

    Attributes:
        columns: position of the drawn node in `Block.sources`.
        size: ||A_Tu||_2, which is proportional to a_u if all features have the same norm.
        p: base probability.
        q: probability with the skew.
        weight: how often the node was drawn, divided by the mean of that number: 1 / pi, or
            draws / (m q). The estimate has this factor, unless `reweight` is False.
    """

    columns: Array
    size: Array
    p: Array
    q: Array
    weight: Array


class SecondMomentGuard:
    """Reduces the skew if the measured ratio of second moments exceeds the budget.

    The closed forms of `accordion_hvd.graph.skew` assume features of equal norm, or the worst case.
    The guard estimates M(q) and M(p) without bias from the drawn nodes and the norms of their
    values; it does not measure variances, which also depend on A h. Every `every` steps, it halves
    s - 1 if M(q) / M(p) is above the budget, and multiplies s - 1 by `growth` (up to its full
    value) if not. If the loss of a batch with exact aggregation differs too much from the sampled
    loss, s is 1 until the end of the next epoch. The guard follows from the budget, not from a
    paper. The guard of a rank measures only this rank's batches and needs no communication.

    Args:
        every: steps between measurements.
        tolerance: relative difference allowed between a sampled loss and the exact one.
        growth: factor of s - 1 after a measurement within the budget, at least 1.
    """

    def __init__(self, every: int = 20, tolerance: float = 0.1, growth: float = 1.1) -> None:
        check.integer(self, "every", every, least=1)
        check.at_least(self, "tolerance", tolerance, least=0)
        check.at_least(self, "growth", growth, least=1)
        self.every, self.tolerance, self.growth = every, tolerance, growth
        self.factors: dict[int, float] = {}
        self.exact_until = -1
        self.ratios: dict[int, float] = {}

    def due(self, step: int) -> bool:
        """Return whether to measure at this step."""
        return step % self.every == 0

    def factor(self, hop: int, epoch: int) -> float:
        """Return the factor of s - 1 for a hop, in [0, 1]."""
        return 0.0 if epoch <= self.exact_until else self.factors.get(hop, 1.0)

    def observe(self, hop: int, trace: Trace, norms: Array, budget: float) -> float:
        """Estimate M(q) / M(p) from the draws of a block, and adapt the factor of s - 1.

        Args:
            hop: number of the hop, counted from the batch outwards.
            trace: the trace of the block.
            norms: (sources,), norms of the values of the block's sources.
            budget: D.

        Returns:
            The estimate; NaN if no node was drawn.
        """
        squares = (trace.size * np.asarray(norms, np.float64)[trace.columns]) ** 2 * trace.weight
        base = float(np.sum(squares / trace.p))
        if not base > 0:
            return math.nan
        ratio = float(np.sum(squares / trace.q)) / base
        now = self.factors.get(hop, 1.0)
        self.factors[hop] = now / 2 if ratio > budget else min(1.0, now * self.growth)
        self.ratios[hop] = ratio
        return ratio

    def probe(self, exact: float, sampled: float, epoch: int) -> bool:
        """Compare two losses of the same batch; if they differ too much, s is 1 for a time.

        Args:
            exact: loss with all neighbours.
            sampled: loss with sampled neighbours.
            epoch: number of the epoch.

        Returns:
            Whether s is 1 now. After a difference above `tolerance`, s is 1 until the end of the
            next epoch.
        """
        if not abs(sampled - exact) <= self.tolerance * abs(exact):
            self.exact_until = epoch + 1
        return epoch <= self.exact_until
