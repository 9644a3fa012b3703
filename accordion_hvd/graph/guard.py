"""A guard of the second-moment budget during training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accordion_hvd import check
from accordion_hvd.graph.structure import Array


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
