"""Throughput and consensus of averaging methods on up to a thousand ranks, in virtual time.

In each step, two ranks drawn at random are 0.32 s late, as in the paper of WAGMA-SGD; options set
all other parameters. Models follow noisy SGD on a quadratic, so distances between them are in units
of one step's noise times the learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from accordion_hvd import DPSGD, WAGMA, LocalSGD, check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.simulation.compute_times import Constant, LogNormal, Stragglers, Traced
from accordion_hvd.simulation.links import Link
from benchmarks.averaging.virtual_time import Outcome, train
from examples.command_line import read_options
from examples.pictures import figure
from examples.tables import as_markdown

RANKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_COLOURS = ("#7f7f7f", "#0072B2", "#E69F00", "#56B4E9", "#009E73")


def methods(period: int) -> dict[str, tuple[Averaging, bool]]:
    """Return (method, wait-avoiding) by name; wait-avoiding groups do not wait for late ranks."""
    return {
        "average of all each step": (LocalSGD(1), False),
        f"local SGD({period})": (LocalSGD(period), False),
        "D-PSGD, ring": (DPSGD("ring"), False),
        "WAGMA, synchronous": (WAGMA(period=period), False),
        "WAGMA, wait-avoiding": (WAGMA(period=period), True),
    }


Found = dict[str, dict[int, Outcome]]


def measure(
    ranks: Sequence[int], steps: int, period: int, compute: Any, link: Link, size: float, seed: int
) -> Found:
    """Return the outcome of each method for each number of ranks."""
    found: Found = {name: {} for name in methods(period)}
    for count in ranks:
        for name, (method, avoiding) in methods(period).items():
            found[name][count] = train(
                method, count, steps, compute, link, wait_avoiding=avoiding, size=size, seed=seed
            )
    return found


def table(found: Found) -> str:
    """Return Markdown tables of steps per second, the models' largest distance, and late models."""
    outcomes = pd.DataFrame(found).T.add_suffix(" ranks")
    late = outcomes[outcomes.map(lambda one: one.late).any(axis=1)]
    tables = {
        "steps per second": outcomes.map(lambda one: f"{one.rate:.2f}"),
        "largest distance from the mean model": outcomes.map(
            lambda one: f"{max(one.distance):.3f}"
        ),
        "late models in group averages": late.map(lambda one: f"{100 * one.late:.0f} %"),
    }
    parts = [table.rename_axis(title).reset_index() for title, table in tables.items()]
    return "\n\n".join(as_markdown(part, left=[0]) for part in parts)


def draw(found: Found, path: Path) -> None:
    """Draw steps per second and distance over the number of ranks."""
    panels = {
        "steps a second": lambda one: one.rate,
        "largest distance from the mean": lambda one: max(one.distance),
    }
    with figure(path, (11, 4), columns=len(panels)) as (_, (axes,)):
        for axis, (what, value) in zip(axes, panels.items(), strict=True):
            for (name, row), colour in zip(found.items(), _COLOURS, strict=True):
                values = [value(one) for one in row.values()]
                axis.plot(list(row), values, "o-", color=colour, label=name, ms=4)
            axis.set(xscale="log", xlabel="ranks", ylabel=what, ylim=(0, None))
            axis.set_xticks(list(next(iter(found.values()))))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)


OWNER = "simulate_scale.py"


@dataclass(frozen=True)
class Options:
    """Compute throughput and consensus of averaging methods in virtual time.

    Args:
        ranks: numbers of ranks.
        steps: steps of each rank.
        period: steps between averages of all ranks.
        compute: seconds of computation per step.
        delay: delay in seconds of two ranks per step.
        sigma: draw the seconds from a log-normal distribution with this sigma instead.
        trace: read the seconds from a file instead, one line per step.
        latency: latency of a message in seconds.
        bandwidth: bytes per second of a link.
        size: bytes of a model; those of ResNet-50 by default.
        seed: seed of delays and noise.
        picture: file for a picture.
    """

    ranks: list[int] = field(default_factory=lambda: list(RANKS))
    steps: int = 50
    period: int = 10
    compute: float = 0.4
    delay: float = 0.32
    sigma: float | None = None
    trace: Path | None = None
    latency: float = 2e-6
    bandwidth: float = 1e10
    size: float = 1.02e8
    seed: int = 0
    picture: Path | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        for count in self.ranks:
            check.integer(OWNER, "--ranks", count, least=2)
        check.integer(OWNER, "--steps", self.steps, least=1)
        check.integer(OWNER, "--period", self.period, least=1)


def main(words: Sequence[str] | None = None) -> None:
    """Run all methods on all numbers of ranks, print tables and draw a picture."""
    chosen: Options = read_options(Options, words, owner=OWNER)
    compute: Any = Stragglers(chosen.compute, chosen.delay)
    if chosen.sigma is not None:
        compute = (
            LogNormal(chosen.compute, chosen.sigma) if chosen.sigma else Constant(chosen.compute)
        )
    if chosen.trace is not None:
        compute = Traced(chosen.trace)
    link = Link(chosen.latency, chosen.bandwidth)
    found = measure(
        chosen.ranks, chosen.steps, chosen.period, compute, link, chosen.size, chosen.seed
    )
    print(table(found))
    if chosen.picture:
        draw(found, chosen.picture)
