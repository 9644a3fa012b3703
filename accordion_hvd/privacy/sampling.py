"""Lots of examples, drawn as the accounting of sub-sampling demands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accordion_hvd import check
from accordion_hvd.ops import secret


class PoissonSampler:
    """A rank's part of lots in which each record takes part with probability `rate`, on its own.

    Sub-sampling makes releases cheaper only if nobody knows who took part: draws come from the
    operating system's cryptographic source, never from a seed. The ranks' parts of the data are
    fixed and disjoint: rank r has records r, r + ranks, ... Lots differ in size and may be empty.

    Args:
        size: records in all.
        rate: a number in (0, 1].
        rank: this rank.
        ranks: how many there are.

    Raises:
        ValueError: an argument makes no sense.
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
        """Records that are expected in a lot of all ranks: what `TopAgg.contributors` wants."""
        return max(1, round(self.size * self.rate))

    def draw(self) -> np.ndarray:
        """Return the numbers (int64, ascending) of this rank's records in the next lot."""
        return self.mine[secret.uniform(len(self.mine)) < self.rate]

    def __len__(self) -> int:
        """Lots in which a record is expected once."""
        return max(1, round(1 / self.rate))

    def __iter__(self) -> Iterator[np.ndarray]:
        """Return the number of lots."""
        return (self.draw() for _ in range(len(self)))
