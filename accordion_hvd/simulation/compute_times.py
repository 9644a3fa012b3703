"""Compute times of simulated ranks.

Any object with a method `draw`, as the classes here have, can serve as the compute times of a
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.base import Compressor
from accordion_hvd.ops.numpy import Array


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


@dataclass(frozen=True)
class Throughput:
    """Encoding and decoding at constant rates.

    A compressor reads the gradient once before its first requests and once after each answer. It
    also reads each answer once: after an allgather, the tensors of all ranks.

    Args:
        rate: bytes per second that a compressor reads.
        rates: rates of single compressors, by class name. `Dense` takes no time by default.
    """

    rate: float = math.inf
    rates: Mapping[str, float] = field(default_factory=lambda: {"Dense": math.inf})

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), *self.rates.items()):
            check.at_least(self, name, value, least=0)
            if value == 0:
                check.refuse(self, name, value, "above 0")

    def seconds(self, compressor: Compressor, gradient: float, answers: float) -> float:
        """Return the seconds of one call, given the bytes of the gradient and of decoded answers.

        The first call encodes, and has no answers.
        """
        return (gradient + answers) / self.rates.get(type(compressor).__name__, self.rate)
