"""The table of policies: a row for each, which laws check and which trains on digits."""

from __future__ import annotations

from accordion_hvd import (
    FP16,
    Accordion,
    AdaQS,
    Dense,
    Displacement,
    Fixed,
    Goodput,
    Policy,
    PowerSGD,
    ScaleComRecipe,
    StepSchedule,
    TopK,
)
from accordion_hvd.optimizers import OnebitAdam
from accordion_hvd.policies import Gate, WarmUp

STRONG, MILD = PowerSGD(1), PowerSGD(4)
POLICIES: list[tuple[Policy, float]] = [
    (Accordion(MILD, STRONG), 0.2),
    (AdaQS([MILD, STRONG]), 0.2),
    (Displacement(MILD, STRONG), 0.2),
    (Fixed(TopK()), 0.2),
    (Fixed(TopK(), gate=Gate()), 0.2),
    (Goodput([Dense(), FP16(), MILD, STRONG]), 0.2),
    (ScaleComRecipe(["in"]), 0.2),
    (StepSchedule({0: Dense(), 5: TopK()}), 0.2),
    (WarmUp(OnebitAdam().dense(), OnebitAdam()), 0.002),
]
"""Policies at default arguments, for tensors "in", "out" and "b", and a learning rate for digits.

Whoever trains with them ends the windows."""
