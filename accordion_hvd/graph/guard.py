"""Looks after the variance budget while training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accordion_hvd import check
from accordion_hvd.graph.structure import Array


@dataclass(frozen=True, eq=False)
class Trace:
    """The probabilities by which a layer was sampled, for `VarianceGuard` and for tests.

    One entry for each draw: node-wise a pair of target and neighbour, layer-wise a node.

    Attributes:
        columns: position of the drawn node in `Block.sources`.
        size: ||A_Tu||_2, its share in a unless the features differ in norm.
        p: base probability.
        q: probability with the skew.
        weight: by which what is drawn is multiplied to stand for all: 1 / pi, or draws / (m q).
    """

    columns: Array
    size: Array
    p: Array
    q: Array
    weight: Array


class VarianceGuard:
    """Takes the skew back where the variance that is measured exceeds the budget.

    The closed forms of `accordion_hvd.graph.skew` assume features of equal norm or worse. From the
    nodes that were drawn, and the norms of their values, M(q) and M(p) can be estimated without
    bias; every `every` steps s - 1 is halved if their ratio is above the budget, and grows by
    `growth` if it is not. If the loss on a batch with exact aggregation is far from the sampled
    one, s is 1 for an epoch. Derived from the budget, not from a paper. A rank's guard looks at
    this rank's batches only and needs no communication.

    Args:
        every: steps between looks.
        tolerance: share by which a sampled loss may differ from the exact one.
        growth: factor by which s - 1 recovers after a look that found no excess.
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
        """Return whether to check the variance at this step."""
        return step % self.every == 0

    def factor(self, hop: int, epoch: int) -> float:
        """Return the remaining part of s - 1, in [0, 1]."""
        return 0.0 if epoch <= self.exact_until else self.factors.get(hop, 1.0)

    def observe(self, hop: int, trace: Trace, norms: Array, budget: float) -> float:
        """Estimate M(q) / M(p) from what was drawn, and shrink or grow.

        Args:
            hop: from the batch outwards.
            trace: of its block.
            norms: (sources,): of the block's sources' values.
            budget: D.

        Returns:
            The estimate; NaN if nothing was drawn.
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
        """Compare losses of the same batch; whether s is 1 until the end of the next epoch.

        Args:
            exact: with all neighbours.
            sampled: with those that were drawn.
            epoch: in which.
        """
        if not abs(sampled - exact) <= self.tolerance * abs(exact):
            self.exact_until = epoch + 1
        return epoch <= self.exact_until
