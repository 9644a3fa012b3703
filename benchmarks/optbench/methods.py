"""Which optimizers are compared, in which settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accordion_hvd import optimizers
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.policies import StepSchedule


@dataclass(frozen=True)
class Method:
    """An optimizer in the settings of the benchmark.

    Attributes:
        optimizer: its name in `accordion_hvd.optimizers` and its frameworks' modules.
        beside: the uncompressed method that it is compared with; none for those themselves.
        lr: the highest learning rate, by task, where tuning has told none.
        grid: learning rates to try.
        settings: other arguments than defaults.
        tasks: others of a task.
        warm: exact steps in the beginning, as a part of all.
    """

    optimizer: str
    beside: str
    lr: dict[str, float]
    grid: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    warm: float = 0.0

    def arguments(self, task: str, steps: int) -> dict[str, Any]:
        """All arguments but learning rate and policy for a training of some steps."""
        known = hasattr(getattr(optimizers, self.optimizer), "warmup_steps")
        warm = {"warmup_steps": round(self.warm * steps)} if self.warm and known else {}
        return {**self.settings, **warm, **self.tasks.get(task, {})}

    def policy(self, task: str, steps: int) -> StepSchedule | None:
        """What begins with exact steps an optimizer that has no warm-up of its own."""
        rule = self.rule(task, steps)
        if not self.warm or hasattr(rule, "warmup_steps"):
            return None
        return StepSchedule({0: rule.dense(), round(self.warm * steps): rule}, window=1)

    def exact(self, task: str, steps: int) -> int:
        """How many steps travel uncompressed in the beginning."""
        first = self.arguments(task, steps).get("exact_first", False)
        return round(self.warm * steps) + int(first)

    def told(self, task: str, steps: int) -> str:
        """All that is not a default, but the learning rate."""
        given = [f"{key}={value!r}" for key, value in self.arguments(task, steps).items()]
        if self.policy(task, steps):
            given.append(f"exact stage for {round(self.warm * steps)} steps")
        return ", ".join(given)

    def rule(self, task: str, steps: int) -> UpdateRule:
        """The algorithm itself."""
        return getattr(optimizers, self.optimizer)(**self.arguments(task, steps))


GRID = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
LOWER = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)

METHODS = {
    "Adam": Method("Adam", "", {"convex": 8e-3, "digits": 32e-3, "characters": 16e-3}, GRID),
    "AMSGrad": Method("AMSGrad", "", {"convex": 16e-3, "digits": 32e-3, "characters": 16e-3}, GRID),
    "OnebitAdam": Method(
        "OnebitAdam", "Adam", {"convex": 16e-3, "digits": 32e-3, "characters": 16e-3}, GRID,
        {"floor": 0.01}, warm=0.2,
    ),
    "Birder": Method(
        "Birder", "Adam", {"convex": 2e-3, "digits": 4e-3, "characters": 16e-3}, LOWER,
        {"feedback": True}, {"characters": {"beta": 0.9, "beta_b": 0.99, "bits": 1.9}},
    ),
    "SketchedAMSGrad": Method(
        "SketchedAMSGrad", "AMSGrad", {"convex": 2.5e-3, "digits": 8e-3, "characters": 8e-3},
        (*LOWER, 2.5e-3),
        {"betas": (0.9, 0.999), "ratio": 0.011, "rows": 3, "columns": 1.0, "candidates": 1,
         "bounded": True}, {"convex": {"eps": 1e-6, "ratio": 0.0202, "rows": 1}}, warm=0.2,
    ),
    "CDAdam": Method(
        "CDAdam", "AMSGrad", {"convex": 2e-3, "digits": 2e-3, "characters": 16e-3}, LOWER,
        {"exact_first": True, "whitened": True},
        {"characters": {"exact_first": False, "bits": 1.9, "pace": 0.1}}, warm=0.2,
    ),
}  # fmt: skip
"""By name on the page."""

SEEDS = (1, 2, 3)
"""Reported."""

TUNING = (11,)
"""For the choice of learning rates, and never reported."""
