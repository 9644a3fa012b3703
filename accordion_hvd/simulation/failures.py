"""Failures of a simulated job, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from accordion_hvd import check


@dataclass(frozen=True)
class Failures:
    """When hosts fail, and the cost of a failure.

    A failure ends all ranks' current step. The job detects it, starts again after the restart, and
    repeats the steps since the last commit (a checkpoint, or `state.commit()` of an elastic job).
    A failure during detection or restart begins both anew.

    Args:
        mean: mean seconds between failures of the job, which are exponentially distributed; None
            for no random failures.
        times: seconds at which the job fails, if `mean` is None.
        detection: seconds until the job notices a failure.
        restart: seconds until training continues after that.
        commit_every: steps between commits, at least 1.
        commit: seconds that a commit takes.
        elastic: whether the job continues without the ranks of the host that failed. Otherwise it
            continues with as many ranks as before.
    """

    mean: float | None = None
    times: Sequence[float] = ()
    detection: float = 30.0
    restart: float = 120.0
    commit_every: int = 100
    commit: float = 0.0
    elastic: bool = False

    def __post_init__(self) -> None:
        for name in ("detection", "restart", "commit"):
            check.at_least(self, name, getattr(self, name), least=0)
        check.integer(self, "commit_every", self.commit_every, least=1)
        if self.mean is not None and not (check.is_number(self.mean) and self.mean > 0):
            check.refuse(self, "mean", self.mean, "a number above 0, or None")
        if self.mean is not None and self.times:
            check.refuse(self, "times", self.times, "() if mean is given")
        if list(self.times) != sorted(self.times):
            check.refuse(self, "times", self.times, "in ascending order")

    def draw(self, seed: int) -> Iterator[tuple[float, float]]:
        """Yield (time, place) of each failure; the host is number floor(place * hosts)."""
        rng, now = np.random.default_rng([seed, 1]), 0.0
        if self.mean is None:
            for time in self.times:
                yield float(time), rng.random()
        while self.mean is not None:
            now += rng.exponential(self.mean)
            yield now, rng.random()
        yield math.inf, 0.0


@dataclass(frozen=True)
class Failure:
    """A failure that has happened.

    Attributes:
        time: seconds since the start of the job.
        hosts: numbers of the hosts that failed; several if one failed during the restart.
        lost_steps: complete steps that were lost.
        lost: seconds since the last commit, whose work was lost.
        down: seconds from the failure to the first step after it.
        ranks: number of ranks afterwards.
    """

    time: float
    hosts: tuple[int, ...]
    lost_steps: int
    lost: float
    down: float
    ranks: int
