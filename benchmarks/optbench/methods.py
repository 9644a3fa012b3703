"""Optimizers to compare, with their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accordion_hvd import optimizers
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.policies import StepSchedule


@dataclass(frozen=True)
class Method:
    """An optimizer with its settings in the benchmark.

    Attributes:
        optimizer: name in `accordion_hvd.optimizers` and in its frameworks' modules.
        beside: uncompressed method to compare with; empty for uncompressed methods.
        lr: highest learning rate by task, unless tuning has found one; a method is only trained on
            these tasks.
        grid: learning rates to try.
        settings: arguments that differ from the defaults.
        tasks: further arguments by task.
        warm: fraction of all steps that are exact at the start; 0 leaves it to the optimizer.
    """

    optimizer: str
    beside: str
    lr: dict[str, float]
    grid: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    warm: float = 0.0

    def arguments(self, task: str, steps: int) -> dict[str, Any]:
        """Return all arguments but learning rate and policy for a training of `steps` steps."""
        has_warmup = hasattr(getattr(optimizers, self.optimizer), "warmup_steps")
        warm = {"warmup_steps": round(self.warm * steps)} if self.warm and has_warmup else {}
        return {**self.settings, **warm, **self.tasks.get(task, {})}

    def policy(self, task: str, steps: int) -> StepSchedule | None:
        """Return a policy of exact first steps for an optimizer without a warm-up of its own."""
        rule = self.rule(task, steps)
        if not self.warm or hasattr(rule, "warmup_steps"):
            return None
        return StepSchedule({0: rule.dense(), round(self.warm * steps): rule}, window=1)

    def describe(self, task: str, steps: int) -> str:
        """Describe all settings that are not defaults, without the learning rate."""
        parts = [f"{key}={value!r}" for key, value in self.arguments(task, steps).items()]
        if self.policy(task, steps):
            parts.append(f"exact stage for {round(self.warm * steps)} steps")
        return ", ".join(parts)

    def rule(self, task: str, steps: int) -> UpdateRule:
        """Return the update rule."""
        return getattr(optimizers, self.optimizer)(**self.arguments(task, steps))


GRID = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
LOWER = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
LOWEST = (2.5e-4, 5e-4, *LOWER)
WIDE = (*LOWEST, 32e-3, 64e-3)

OURS = ", ours"
"""End of the name of a method with our settings; without it, a method is as published."""

METHODS = {
    "Adam": Method("Adam", "", {"convex": 8e-3, "digits": 32e-3, "characters": 16e-3}, GRID),
    "AMSGrad": Method("AMSGrad", "", {"convex": 16e-3, "digits": 32e-3, "characters": 16e-3}, GRID),
    "Lamb": Method("Lamb", "", {"convex": 16e-3, "digits": 16e-3}, GRID),
    "OnebitAdam": Method(
        "OnebitAdam", "Adam", {"convex": 2.5e-4, "digits": 1e-3, "characters": 16e-3}, WIDE,
        warm=0.2,
    ),
    "OnebitAdam, ours": Method(
        "OnebitAdam", "Adam", {"convex": 16e-3, "digits": 32e-3, "characters": 16e-3}, GRID,
        {"floor": 0.01}, warm=0.2,
    ),
    "Birder": Method(
        "Birder", "Adam", {"convex": 1e-3, "digits": 4e-3, "characters": 8e-3}, LOWEST
    ),
    "Birder, ours": Method(
        "Birder", "Adam", {"convex": 2e-3, "digits": 4e-3, "characters": 16e-3}, LOWER,
        {"feedback": True}, {"characters": {"beta": 0.9, "beta_b": 0.99, "bits": 1.9}},
    ),
    "Birder, within hosts": Method(
        "Birder", "Adam", {"convex": 1e-3, "digits": 4e-3}, LOWEST, {"within": "half"}
    ),
    "SketchedAMSGrad": Method(
        "SketchedAMSGrad", "AMSGrad", {"convex": 1e-3, "digits": 1e-3, "characters": 1e-3}, LOWEST
    ),
    "SketchedAMSGrad, ours": Method(
        "SketchedAMSGrad", "AMSGrad", {"convex": 2.5e-3, "digits": 8e-3, "characters": 8e-3},
        (*LOWER, 2.5e-3),
        {"betas": (0.9, 0.999), "ratio": 0.011, "rows": 3, "columns": 1.0, "candidates": 1,
         "bounded": True}, {"convex": {"eps": 1e-6, "ratio": 0.0202, "rows": 1}}, warm=0.2,
    ),
    "CDAdam": Method(
        "CDAdam", "AMSGrad", {"convex": 2e-3, "digits": 2e-3, "characters": 2e-3}, LOWER
    ),
    "CDAdam, ours": Method(
        "CDAdam", "AMSGrad", {"convex": 2e-3, "digits": 2e-3, "characters": 16e-3}, LOWER,
        {"preconditioned": True}, {"characters": {"bits": 1.9, "replica_lr": 0.1}}, warm=0.2,
    ),
    "OnebitLamb": Method("OnebitLamb", "Lamb", {"convex": 1e-3, "digits": 1e-3}, WIDE, warm=0.2),
    "OnebitLamb, ours": Method(
        "OnebitLamb", "Lamb", {"convex": 16e-3, "digits": 16e-3}, GRID, {"eps": 1e-3}, warm=0.2
    ),
    "ZeroOneAdam": Method("ZeroOneAdam", "Adam", {"convex": 8e-3, "digits": 1e-3}, WIDE),
    "ZeroOneAdam, ours": Method(
        "ZeroOneAdam", "Adam", {"convex": 16e-3, "digits": 32e-3}, GRID,
        {"eps": 1e-3, "var_freeze_step": 240, "local_step_scaler": 240, "local_step_clipper": 4},
    ),
}  # fmt: skip
"""Methods by their name on the page."""

ON_ONE_HOST = [name for name, method in METHODS.items() if "within" not in method.settings]
"""Methods that make sense on one host."""

SEEDS = (1, 2, 3)
"""Seeds of reported trainings."""

TUNING = (11,)
"""Seeds for the choice of learning rates, which are never reported."""
