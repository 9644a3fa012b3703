"""An elastic training on characters, whose ranks may come and go at any time.

`benchmarks.storm.job` starts it: `python -m benchmarks.storm.worker FOLDER SETTINGS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import accordion_hvd.torch as hvd
from benchmarks.optbench.tasks import TASKS, Problem
from benchmarks.storm.conserved import averages_models, conserved
from benchmarks.storm.journal import Journal

TASK = TASKS["characters"]


class Worker:
    """One rank of the training.

    Args:
        folder: folder for the PIDs of ranks, the journal and the result.
        settings: compression, steps, pace, every, lr, seed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self.journal = Journal(folder / "journal.jsonl")
        self.problem: Problem = TASK.problem()
        torch.manual_seed(settings["seed"])
        self.model = self.problem.make()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), settings["lr"]),
            self.model.named_parameters(),
            compression=settings["compression"],
        )

    def conserved(self) -> np.ndarray:
        """Return what an orderly change conserves; collective."""

        def add(x: np.ndarray) -> np.ndarray:
            return hvd.allreduce(torch.tensor(x), op=hvd.Sum, name="storm.sum").numpy()

        weights = [parameter.detach().numpy() for parameter in self.model.parameters()]
        return conserved(self.optimizer, weights, hvd.size(), add)

    def train(self, state: Any) -> None:
        """Train from the last commit to the last step."""
        self._enter(state)
        steps, every = self.settings["steps"], self.settings["every"]
        while state.step < steps:
            began = time.monotonic()
            self._step(state.step)
            state.step += 1
            self._note("step", step=state.step)
            time.sleep(max(0.0, self.settings["pace"] - (time.monotonic() - began)))
            if state.step % every == 0 or state.step == steps:
                state.total = self.conserved()
                self._note("commit", step=state.step)
                state.commit()

    def _enter(self, state: Any) -> None:
        """Note the number of ranks, and how much the conserved vector has changed."""
        total = self.conserved()
        drift = None
        if state.total is not None:
            norm = float(np.linalg.norm(state.total))
            drift = float(np.linalg.norm(total - state.total)) / (norm or 1.0)
        self._note("enter", step=state.step, ranks=hvd.size(), drift=drift)

    def _step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = TASK.lr_at(self.settings["lr"], step, self.settings["steps"])
        generator = np.random.default_rng([self.settings["seed"], step, hvd.rank()])
        batch = self.problem.draw(generator, TASK.batch)
        self.optimizer.zero_grad()
        self.problem.loss(self.model, batch).backward()
        self.optimizer.step()

    def _note(self, event: str, **values: Any) -> None:
        if hvd.rank() == 0:
            self.journal.write(event, **values)

    def finish(self) -> None:
        """Write the test loss, and whether all ranks have equal weights."""
        if averages_models(self.optimizer):
            self.optimizer.average_now(self.model)
        sums = [float(parameter.double().sum()) for parameter in self.model.parameters()]
        everyone = hvd.allgather_object(sums)
        with torch.no_grad():
            sizes = [len(batch[0]) for batch in self.problem.judged]
            losses = [float(self.problem.loss(self.model, b)) for b in self.problem.judged]
        if hvd.rank() == 0:
            equal = all(other == sums for other in everyone)
            found = {"loss": float(np.average(losses, weights=sizes)), "equal": equal}
            (self.folder / "result.json").write_text(json.dumps(found))


def main() -> None:
    """Run one rank."""
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    (folder / f"pid-{os.environ['HOROVOD_HOSTNAME']}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    hvd.init()
    worker = Worker(folder, settings)
    state = hvd.elastic.TorchState(
        model=worker.model, optimizer=worker.optimizer, step=0, total=None
    )
    hvd.elastic.run(worker.train)(state)
    worker.finish()


if __name__ == "__main__":
    main()
