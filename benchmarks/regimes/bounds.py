"""The bounds of `Displacement`: small trainings with various schedules, momenta and compressors."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accordion_hvd import Displacement, StepSchedule, parse
from accordion_hvd.policies.displacement import BOUND, RELEASE
from benchmarks.regimes.training import RANKS, Outcome, outcome_of
from examples import config, launcher, simulated_training, start

CONFIG = launcher.ROOT / "configs" / "demo.yaml"
FALL = 1 / 4
"""Fraction of a training after which a rate with steps falls."""


@dataclass(frozen=True)
class BoundStudy:
    """Settings of the demo with some changes.

    Attributes:
        title: text of the first column of the page's tables.
        changed: changed settings.
        levels: spec strings of low, middle and high compression.
        epochs: number of epochs.
    """

    title: str
    changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    levels: tuple[str, str, str] = ("powersgd:4", "powersgd:2", "powersgd:1")
    epochs: int = 48

    @property
    def momentum(self) -> float:
        """Return the momentum of SGD."""
        return float(self.changed.get("momentum", 0.9))

    def settings(self, epochs: int) -> config.Settings:
        """Return the settings of a training, without compression."""
        base = config.parse_settings("", ["--config", str(CONFIG)])
        drops = [] if "schedule" in self.changed else [round(FALL * epochs)]
        return dataclasses.replace(base, epochs=epochs, drops=drops, **self.changed)


STUDIES = {
    "bounds-steps": BoundStudy("rate falls at once"),
    "bounds-cosine": BoundStudy("cosine schedule", {"schedule": "cosine"}),
    "bounds-constant": BoundStudy("constant rate of 0.03", {"schedule": "constant", "lr": 0.03}),
    "bounds-plain": BoundStudy("momentum 0, rate 1", {"momentum": 0.0, "lr": 1.0}),
    "bounds-heavy": BoundStudy("momentum 0.99, rate 0.01", {"momentum": 0.99, "lr": 0.01}),
    "bounds-topk": BoundStudy("TopK", levels=("topk:0.1", "topk:0.01", "topk:0.001")),
}
"""Studies by name."""

BOUNDS = (0.002, 0.006, 0.02, 0.06, 0.2)
RELEASES = (1 / 6, 1.0)
FIXED = ("low", "middle", "high")


def bounded(bound: float) -> str:
    """Return the name of the method with a bound."""
    return f"bound {bound:g}"


def released(release: float) -> str:
    """Return the name of the method with another `release`."""
    return f"release {release:.2g}"


METHODS = (*FIXED, "rate", *map(bounded, BOUNDS), *map(released, RELEASES))


def policy(study: BoundStudy, method: str, settings: config.Settings) -> str:
    """Return the spec string of a method's policy."""
    if method in FIXED:
        return study.levels[FIXED.index(method)]
    low, _, high = map(parse, study.levels)
    if method == "rate":
        half = [e for e in range(settings.epochs) if settings.lr_at(e) < settings.lr_at(0) / 2]
        return repr(StepSchedule({0: low, half[0]: high})) if half else study.levels[0]
    allowed = {bounded(bound): bound for bound in BOUNDS}
    releases = {released(release): release for release in RELEASES}
    bound, release = allowed.get(method, BOUND), releases.get(method, RELEASE)
    return repr(Displacement(low, high, bound=bound, release=release))


def train(name: str, method: str, seed: int, epochs: int) -> Outcome:
    """Run one training."""
    settings = STUDIES[name].settings(epochs)
    compression = policy(STUDIES[name], method, settings)
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(
            settings, compression=compression, seed=seed, output=folder, name="run"
        )
        found = simulated_training.train(settings, start.load_for(settings), RANKS)
    return outcome_of(name, method, seed, epochs, found)
