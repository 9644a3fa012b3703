"""Accordion, our policies, and competitors that send as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import Accordion, Dense, Displacement, Fixed, StepSchedule, parse
from accordion_hvd.core.base import Compressor
from accordion_hvd.policies import Policy
from accordion_hvd.policies.accordion import HIGH, LOW
from accordion_hvd.policies.base import Decision, Seen, Windowed, agree
from benchmarks.regimes.studies import Study

TIGHT = 0.02
"""A bound of `Displacement` that permits less than its default."""


@dataclass(frozen=True)
class Plan:
    """One training, for which a method makes its policy.

    Attributes:
        study: the study.
        epoch: number of steps of an epoch.
        share: fraction of low compression, by bytes, that the `like` method used with this seed.
        seed: seed of random choices.
    """

    study: Study
    epoch: int
    share: float = 0.0
    seed: int = 0

    @property
    def levels(self) -> tuple[Compressor, Compressor]:
        """Return new compressors (low, high)."""
        return parse(self.study.low), parse(self.study.high)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the common arguments of policies that decide by windows."""
        low, high = self.levels
        return {"low": low, "high": high, "window": self.epoch}


@dataclass(frozen=True)
class Method:
    """A method, and its policy.

    Attributes:
        label: name on the page.
        policy: function that returns a new policy.
        like: method whose bytes this method sends; that method is trained first.
        batches: number of small batches in each batch, which also multiplies the learning rate.
    """

    label: str
    policy: Callable[[Plan], Policy]
    like: str = ""
    batches: int = 1


class RandomLayers(Windowed):
    """Chooses in each window, for each layer at random, between low and high compression.

    Args:
        low: the level of low compression.
        high: the level of high compression.
        share: probability of low compression.
        seed: seed of the choices.
        window: optimizer steps in a window.
    """

    def __init__(
        self, low: Compressor, high: Compressor, *, share: float, seed: int, window: int
    ) -> None:
        super().__init__(window)
        agree(self, [low, high])
        self.low, self.high, self.share, self.seed = low, high, share, seed

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return (low, high)."""
        return self.low, self.high

    def start(self, name: str) -> int:
        """Return the level of the first window."""
        return self._drawn(0, name)

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Return a row per layer."""
        return [
            Decision(name, self._drawn(self._epoch + 1, name), self._step, self._epoch, lr=lr[name])
            for name in self.current
        ]

    def _drawn(self, window: int, name: str) -> int:
        draw = np.random.default_rng([self.seed, window, *name.encode()])
        return LOW if draw.random() < self.share else HIGH


def _fixed(level: str) -> Callable[[Plan], Policy]:
    return lambda plan: Fixed(parse(getattr(plan.study, level)))


def _accordion(**more: Any) -> Callable[[Plan], Policy]:
    return lambda plan: Accordion(**plan.arguments, interval=plan.study.interval, **more)


def _displacement(**more: Any) -> Callable[[Plan], Policy]:
    return lambda plan: Displacement(**plan.arguments, **more)


def _until_fall(level: str) -> Callable[[Plan], Policy]:
    """Return a function for a schedule: `level` until the learning rate falls, then high."""

    def policy(plan: Plan) -> Policy:
        first, last = parse(getattr(plan.study, level)), plan.levels[1]
        return StepSchedule({0: first, plan.study.first_fall: last}, window=plan.epoch)

    return policy


def _low_first(plan: Plan) -> Policy:
    """Return the schedule with low compression for the first `share` of the steps."""
    low, high = plan.levels
    switch = round(plan.share * plan.study.epochs * plan.epoch)
    if switch <= 0:
        return Fixed(high)
    return StepSchedule({0: low, switch: high}, window=1)


def _random(plan: Plan) -> Policy:
    return RandomLayers(**plan.arguments, share=plan.share, seed=plan.seed)


METHODS: dict[str, Method] = {
    "none": Method("no compression", lambda plan: Fixed(Dense())),
    "low": Method("low", _fixed("low")),
    "middle": Method("middle", _fixed("middle")),
    "high": Method("high", _fixed("high")),
    "accordion": Method("Accordion", _accordion()),
    "published": Method("Accordion, `lr_drop=None`", _accordion(lr_drop=None)),
    "accordion-first": Method("low first, bytes of Accordion", _low_first, like="accordion"),
    "accordion-random": Method("random layers, bytes of Accordion", _random, like="accordion"),
    "displacement": Method("Displacement", _displacement()),
    "displacement-tight": Method(f"Displacement, `bound={TIGHT}`", _displacement(bound=TIGHT)),
    "displacement-first": Method(
        "low first, bytes of Displacement", _low_first, like="displacement"
    ),
    "rate": Method("low until the rate falls", _until_fall("low")),
    "middle-rate": Method("middle until the rate falls", _until_fall("middle")),
}
"""Methods by name, in an order in which `like` precedes."""


LARGE = 4
"""Number of small batches in a large one."""

BATCHES: dict[str, Method] = {
    "large": Method("large batches", METHODS["none"].policy, batches=LARGE),
    "grows": Method(
        "Accordion, `batch_size=`",
        lambda plan: Accordion(
            batch_size=(1, LARGE), window=plan.epoch, interval=plan.study.interval
        ),
    ),
}
"""Methods that change the batch size, which are compared with "none"."""


def methods_of(study: Study) -> list[str]:
    """Return the names of a study's methods."""
    levels = [name for name in METHODS if study.middle or not name.startswith("middle")]
    return levels + (list(BATCHES) if study.grows else [])
