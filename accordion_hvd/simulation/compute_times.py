"""Compute times of simulated ranks.

Any object with a method `draw`, as the classes here have, can serve as the compute times of a
simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accordion_hvd import check

Array = np.ndarray


@dataclass(frozen=True)
class Constant:
    """The same compute time for every step of every rank.

    Args:
        seconds: compute time per step.
    """

    seconds: float = 0.1

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Return the compute times in seconds, (steps, ranks)."""
        return np.full((steps, ranks), self.seconds)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal compute times.

    Args:
        seconds: median compute time per step.
        sigma: standard deviation of the logarithm of the compute time.
    """

    seconds: float = 0.1
    sigma: float = 0.3

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        normal = np.random.default_rng(seed).standard_normal((steps, ranks))
        return self.seconds * np.exp(self.sigma * normal)


@dataclass(frozen=True)
class Stragglers:
    """Constant compute times, plus a delay on a few random ranks in each step.

    The defaults are those of WAGMA's paper.

    Args:
        seconds: compute time per step.
        delay: additional seconds of a delayed rank.
        count: number of random draws of a delayed rank per step; draws may coincide.
    """

    seconds: float = 0.1
    delay: float = 0.32
    count: int = 2

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        times = np.full((steps, ranks), self.seconds)
        delayed = np.random.default_rng(seed).integers(0, ranks, (steps, self.count))
        for step, late in enumerate(delayed):
            times[step, np.unique(late)] += self.delay
        return times


@dataclass(frozen=True)
class Traced:
    """Compute times from a text file with a line per step and a column per measured rank.

    If there are more ranks or steps than in the file, they reuse the times of others, drawn at
    random.

    Args:
        path: path of the file.
    """

    path: str | Path

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Return the times; ValueError if the file is no table of finite numbers of at least 0."""
        table = np.loadtxt(self.path, ndmin=2)
        if not table.size or not np.isfinite(table).all() or table.min() < 0:
            check.refuse(self, "path", str(self.path), "a table of seconds, at least 0")
        rng = np.random.default_rng(seed)
        columns = rng.permutation(np.arange(ranks) % table.shape[1])
        rows = (np.arange(steps)[:, None] + rng.integers(0, len(table), ranks)) % len(table)
        return table[rows, columns]
