"""The training of one rank in a storm."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.optbench.tasks import TASKS, Problem
from benchmarks.storm.journal import Journal


class Training:
    """Model, data and journal of one rank.

    Args:
        folder: folder for the journal.
        settings: fields of `benchmarks.storm.job.Settings`.

    Attributes:
        wrapped: the model, or a wrapper that averages its gradients.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self.journal = Journal(folder / "journal.jsonl")
        self.task = TASKS[settings["task"]]
        self.problem: Problem = self.task.problem()
        torch.manual_seed(settings["seed"])
        self.model = self.problem.make()
        self.wrapped = self.model

    def backward(self, step: int, rank: int) -> None:
        """Add the gradients of a batch, which depends on step and rank."""
        generator = np.random.default_rng([self.settings["seed"], step, rank])
        batch = self.problem.draw(generator, self.task.batch)
        self.problem.loss(self.wrapped, batch).backward()

    def set_lr(self, groups: Iterable[dict[str, Any]], step: int) -> None:
        """Set the learning rate of a step."""
        for group in groups:
            group["lr"] = self.task.lr_at(self.settings["lr"], step, self.settings["steps"])

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Wait at the end of a step until it has lasted for the least duration."""
        began = time.monotonic()
        yield
        time.sleep(max(0.0, self.settings["pace"] - (time.monotonic() - began)))

    def sums(self) -> list[float]:
        """Return the sum of each parameter, to compare ranks."""
        return [float(parameter.detach().double().sum()) for parameter in self.model.parameters()]

    @torch.no_grad()
    def loss(self) -> float:
        """Return the test loss."""
        sizes = [len(batch[0]) for batch in self.problem.judged]
        losses = [float(self.problem.loss(self.model, batch)) for batch in self.problem.judged]
        return float(np.average(losses, weights=sizes))
