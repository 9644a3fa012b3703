"""Throughput and consensus of averaging methods on up to a thousand ranks, in virtual time.

In each step, two ranks drawn at random are 0.32 s late, as in the paper of WAGMA-SGD; options set
all other parameters. Models follow noisy SGD on a quadratic, so distances between them are in units
of one step's noise times the learning rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from accordion_hvd import DPSGD, WAGMA, LocalSGD
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.simulation.compute_times import Constant, LogNormal, Stragglers, Traced
from accordion_hvd.simulation.links import Link
from accordion_hvd.simulation.virtual_time import Outcome, train
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


def main(words: Sequence[str] | None = None) -> None:
    """Run all methods on all numbers of ranks, print tables and draw a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks")
    add("--steps", type=int, default=50, help="steps of each rank (50)")
    add("--period", type=int, default=10, help="steps between averages of all ranks (10)")
    add("--compute", type=float, default=0.4, help="seconds of computation per step (0.4)")
    add("--delay", type=float, default=0.32, help="delay in seconds of two ranks per step (0.32)")
    add("--sigma", type=float, help="draw the seconds from a log-normal distribution instead")
    add("--trace", type=Path, help="read the seconds from a file instead, one line per step")
    add("--latency", type=float, default=2e-6, help="latency of a message in seconds (2e-6)")
    add(
        "--bandwidth",
        type=float,
        default=1e10,
        help="bytes per second of a link (1e10)",
    )
    add("--size", type=float, default=1.02e8, help="bytes of a model (1.02e8, as ResNet-50)")
    add("--seed", type=int, default=0, help="seed of delays and noise (0)")
    add("--picture", type=Path, help="file for a picture")
    chosen = parser.parse_args(words)
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
