"""Tests of the learning rates of tasks: each rises, then falls nearly to 0."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.compressors.training import TASKS as BY_EPOCHS
from benchmarks.netbench.accuracy_tasks import TASKS as TO_A_TARGET
from benchmarks.optbench.tasks import TASKS as OF_STEPS
from benchmarks.task import Task

STEPS = 200


@pytest.mark.parametrize(
    "task", [*BY_EPOCHS.values(), *TO_A_TARGET.values(), *OF_STEPS.values()], ids=lambda t: t.title
)
def test_the_learning_rate_rises_and_falls(task: Task) -> None:
    rates = [task.lr_at(0.5, step, STEPS) for step in range(STEPS)]
    top = int(task.warmup * STEPS) - 1
    assert 0 < top < STEPS / 4 and rates[0] < rates[top] / 5
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:])[::-1]
    assert 0.4 < max(rates) <= 0.5 and 0 < rates[-1] < 0.01 * 0.5


def test_a_cosine_reaches_the_peak_and_stays_longer_above() -> None:
    line, wave = (Task(title="", batch=1, decay=decay) for decay in ("linear", "cosine"))  # type: ignore[arg-type]
    assert wave.lr_at(1.0, 19, STEPS) == 1 > line.lr_at(1.0, 19, STEPS)
    assert wave.lr_at(1.0, 60, STEPS) > line.lr_at(1.0, 60, STEPS)
    assert line.lr_at(1.0, 0, 5) == 1, "too few steps for a warm-up"
