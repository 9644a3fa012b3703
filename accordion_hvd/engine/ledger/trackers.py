"""Sinks that pass means over some steps to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import Any

from accordion_hvd import check
from accordion_hvd.engine.ledger.series import PARTS
from accordion_hvd.engine.ledger.sinks import Record, Sink


class Tracker(Sink, abc.ABC):
    """Base class of sinks that log means over some steps.

    The values are `accordion/ms` (a step), `accordion/ms <part>` for each part of its time, and
    `accordion/MB sent`.

    Args:
        every: number of steps between two points.
    """

    def __init__(self, every: int = 10) -> None:
        check.integer(self, "every", every, least=1)
        self.every = every
        self._sums: dict[str, float] = {}
        self._steps = 0

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values by name, as of the end of `step`."""

    def write(self, record: Record) -> None:
        """Add a step, and log the means if they are due."""
        for key in ("seconds", *PARTS, "sent"):
            self._sums[key] = self._sums.get(key, 0.0) + record[key]
        self._steps += record["steps"]
        if self._steps >= self.every:
            self.log(self._means(), record["step"])
            self._sums, self._steps = {}, 0

    def _means(self) -> dict[str, float]:
        means = {key: value / self._steps for key, value in self._sums.items()}
        values = {f"accordion/ms {part}": 1e3 * means[part] for part in PARTS if means[part]}
        total = {"accordion/ms": 1e3 * means["seconds"], "accordion/MB sent": 1e-6 * means["sent"]}
        return total | values


class TensorBoard(Tracker):
    """Write event files for TensorBoard; needs the package `tensorboard`.

    Args:
        folder: folder of the event files.
        every: number of steps between two points.

    Raises:
        ImportError: if the package is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 10) -> None:
        super().__init__(every)
        from tensorboard.summary import Writer

        self._writer: Any = Writer(os.fspath(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class WandB(Tracker):
    """Log to a run of Weights & Biases; needs the package `wandb`.

    The values have a step axis of their own, `accordion/step`, so that they do not disturb the
    steps of other values.

    Args:
        run: the run, as `wandb.init()` returns it.
        every: number of steps between two points.
    """

    def __init__(self, run: Any, every: int = 10) -> None:
        super().__init__(every)
        self._run = run
        run.define_metric("accordion/step")
        run.define_metric("accordion/*", step_metric="accordion/step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"accordion/step": step, **values})


class MLflow(Tracker):
    """Log to a run of MLflow; needs the package `mlflow` or `mlflow-skinny`.

    Args:
        run_id: id of the run, such as `mlflow.active_run().info.run_id`.
        client: the `mlflow.MlflowClient`. None: one with MLflow's tracking URI.
        every: number of steps between two points.

    Raises:
        ImportError: if the package is not installed.
    """

    def __init__(self, run_id: str, client: Any = None, every: int = 10) -> None:
        super().__init__(every)
        if client is None:
            from mlflow import MlflowClient

            client = MlflowClient()
        self._run_id, self._client = run_id, client

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)
