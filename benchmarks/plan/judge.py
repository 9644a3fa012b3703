"""Predictions for the cells, and their errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accordion_hvd.comm import fp16_reduction
from accordion_hvd.simulation.prediction import (
    COSTS,
    GOODPUT,
    Cluster,
    EngineCosts,
    Prediction,
    predict,
)
from accordion_hvd.simulation.programs import Program
from accordion_hvd.tools.plan import table
from accordion_hvd.tools.plan.model import Model, companions, measure
from accordion_hvd.tools.text import parse_rate, parse_time
from benchmarks.netbench.contestants import OURS, OVER
from benchmarks.plan.cells import METHODS, Cell

PLACE = "benchmarks/plan/models.py"
Key = tuple[str, int, str, bool]
"""Model, hosts, method, and whether the engine adds fp16."""


@dataclass
class Rehearsed:
    """A model and the steps of a configuration."""

    model: Model
    steps: Sequence[Program]


def split(method: str) -> tuple[str, str]:
    """Return the engine and the configuration of a method."""
    if method.startswith(OVER):
        return "torch", method.removeprefix(OVER)
    return "horovod", method.removeprefix(OURS)


def cluster(cell: Cell) -> Cluster:
    """Return the cluster of a cell, whose hosts share the cores of this machine."""
    bits = parse_rate(cell.rate)
    assert bits is not None
    cores = (os.cpu_count() or 1) / cell.hosts
    return Cluster(cell.hosts, 1, bits / 8 * GOODPUT, parse_time(cell.rtt), cores)


def rehearse(cells: Iterable[Cell], say: Callable[[str], None]) -> dict[Key, Rehearsed]:
    """Measure the models and the configurations, as `accordion-hvd plan` does."""
    found: dict[Key, Rehearsed] = {}
    chosen = list(cells)
    for name in sorted({cell.model for cell in chosen}):
        word = f"{PLACE}:{name}"
        with companions(word, (os.cpu_count() or 1) - 1, 1):
            model = measure(word, None, 1)
            say(f"{name}: {1000 * model.compute:.0f} ms of computation")
            for cell in chosen:
                if cell.model != name:
                    continue
                for method in METHODS:
                    key, (engine, spec) = key_of(cell, method), split(method)
                    if key not in found:
                        steps = table.rehearse(model, spec, cluster(cell), engine)
                        found[key] = Rehearsed(model, steps)
    return found


def key_of(cell: Cell, method: str) -> Key:
    """Return the key of a cell's rehearsal."""
    slow = fp16_reduction.SLOW[split(method)[0]]
    return cell.model, cell.hosts, method, cluster(cell).bandwidth < slow


def predictions(
    cell: Cell,
    rehearsed: Mapping[Key, Rehearsed],
    engines: Mapping[str, EngineCosts] = COSTS,
) -> dict[str, Prediction]:
    """Return the predicted step of each method."""
    found = {}
    for method in METHODS:
        entry, engine = rehearsed[key_of(cell, method)], engines[split(method)[0]]
        model = entry.model
        found[method] = predict(entry.steps, model.compute, cluster(cell), engine, model.backward)
    return found


def fit(
    cells: Sequence[Cell], measured: Mapping[str, Any], rehearsed: Mapping[Key, Rehearsed]
) -> dict[str, EngineCosts]:
    """Return engines whose predictions fit the cells, by a search along each number."""
    engines = dict(COSTS)

    def loss(trial: Mapping[str, EngineCosts]) -> float:
        return float(np.mean([abs(np.log(r)) for r in ratios(cells, measured, rehearsed, trial)]))

    best = loss(engines)
    for width in (2.0, 1.5, 1.2, 1.1, 1.05):
        for name, field in ((n, f) for n in engines for f in FITTED[n]):
            for factor in (1 / width, width):
                value = getattr(engines[name], field) * factor
                trial = engines | {name: replace(engines[name], **{field: value})}
                if (found := loss(trial)) < best:
                    best, engines = found, trial
    return engines


FITTED = {
    "horovod": ("overhead", "hop", "byte", "cycle", "window"),
    "torch": ("overhead", "hop", "byte", "window"),
}
"""Numbers of the engines that are fitted."""


def ratios(
    cells: Sequence[Cell],
    measured: Mapping[str, Any],
    rehearsed: Mapping[Key, Rehearsed],
    engines: Mapping[str, EngineCosts] = COSTS,
) -> list[float]:
    """Return predicted over measured time of each method in each cell."""
    found = []
    for cell in cells:
        predicted = predictions(cell, rehearsed, engines)
        found += [
            1000 * predicted[row["method"]].seconds / row["ms"] for row in measured[cell.name]
        ]
    return found
