"""Poisson samples of examples, as the privacy accounting of subsampling requires."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accordion_hvd import check
from accordion_hvd.ops import secret


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
