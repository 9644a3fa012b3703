"""Sinks, which pass the records of a ledger to other programs."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from accordion_hvd import check
from accordion_hvd.engine.ledger.samples import PARTS

Record = Mapping[str, Any]
"""One step: its number `step`, the number of `steps` (several, if a graph executes several at
once), seconds by part, bytes, and its fusion groups with the times of their launch and arrival."""

Sink: TypeAlias = Callable[[Record], object]
"""Takes the record of each step on rank 0, which it must not modify. A method `close`, if there is
one, is called at the end of the process."""

MICRO = 1e6  # microseconds in a second


class _FileSink:
    """Writes the text file `path`, which the first record opens; an existing file is replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None

    def _print(self, text: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w")
        self._file.write(text)
        self._file.flush()  # so that a forked child has nothing left to write

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._file.close()


class JsonLines(_FileSink):
    """Write one line of JSON for each step, with its fusion groups."""

    def __call__(self, record: Record) -> None:
        self._print(json.dumps(record) + "\n")


class CSV(_FileSink):
    """Write a table with one row for each step: seconds by part, and bytes."""

    def __call__(self, record: Record) -> None:
        row = {key: value for key, value in record.items() if key not in ("groups", "at")}
        if self._file is None:
            self._print(",".join(row) + "\n")
        self._print(",".join(map(str, row.values())) + "\n")


class Perfetto(_FileSink):
    """Write a trace for https://ui.perfetto.dev and chrome://tracing.

    The trace has a track for the parts of each step, and one for each fusion group, from its first
    request to its last result. The order of the parts of a step is that in which most of their time
    passes, because the ledger has sums.
    """

    _ORDER = ("compute", "encode", "decide", "wait", "decode", "graph", "measure")

    def __call__(self, record: Record) -> None:
        start = record["at"] - record["seconds"]
        for part in self._ORDER:
            if record[part] > 0:
                self._slice(part, 0, start, record[part], {"step": record["step"]})
                start += record[part]
        for number, group in enumerate(record["groups"], 1):
            if group["rounds"]:
                facts = {"step": record["step"], "bytes": group["sent"], "rounds": group["rounds"]}
                name = f"{group['label']}: {group['compressor']}"
                self._slice(name, number, group["launched"], group["flight"], facts)

    def _slice(
        self, name: str, track: int, start: float, seconds: float, facts: Mapping[str, Any]
    ) -> None:
        event = {
            "name": name, "ph": "X", "pid": 0, "tid": track, "ts": start * MICRO,
            "dur": seconds * MICRO, "args": facts,
        }  # fmt: skip
        self._print(("[\n" if self._file is None else ",\n") + json.dumps(event))

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._print("\n]\n")
        super().close()


# -------------------------------------------------------------------------- trackers of experiments
class Tracker(abc.ABC):
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

    def __call__(self, record: Record) -> None:
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
