"""An elastic training on Horovod, whose ranks may come and go at any time.

`benchmarks.storm.job` starts it: `python -m benchmarks.storm.worker FOLDER SETTINGS`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import accordion_hvd.torch as hvd
from benchmarks.storm.conserved import averages_models, conserved
from benchmarks.storm.training import Training


class Worker:
    """One rank of the training.

    Args:
        training: its model and data.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.settings = training, training.settings
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(training.model.parameters(), self.settings["lr"]),
            training.model.named_parameters(),
            compression=self.settings["compression"],
        )

    def conserved(self) -> np.ndarray:
        """Return what an orderly change conserves; collective."""

        def add(x: np.ndarray) -> np.ndarray:
            return hvd.allreduce(torch.tensor(x), op=hvd.Sum, name="storm.sum").numpy()

        weights = [parameter.detach().numpy() for parameter in self.training.model.parameters()]
        return conserved(self.optimizer, weights, hvd.size(), add)

    def train(self, state: Any) -> None:
        """Train from the last commit to the last step."""
        self._enter(state)
        steps, every = self.settings["steps"], self.settings["every"]
        while state.step < steps:
            with self.training.paced():
                self.training.set_lr(self.optimizer.param_groups, state.step)
                self.optimizer.zero_grad()
                self.training.backward(state.step, hvd.rank())
                self.optimizer.step()
                state.step += 1
                self._note("step", step=state.step)
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

    def _note(self, event: str, **values: Any) -> None:
        if hvd.rank() == 0:
            self.training.journal.write(event, **values)

    def finish(self) -> None:
        """Write the test loss, and whether all ranks have equal weights."""
        if averages_models(self.optimizer):
            self.optimizer.average_now(self.training.model)
        sums = self.training.sums()
        everyone = hvd.allgather_object(sums)
        if hvd.rank() == 0:
            equal = all(other == sums for other in everyone)
            found = {"loss": self.training.loss(), "equal": equal}
            (self.training.folder / "result.json").write_text(json.dumps(found))


def main() -> None:
    """Run one rank."""
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    (folder / f"pid-{os.environ['HOROVOD_HOSTNAME']}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    hvd.init()
    worker = Worker(Training(folder, settings))
    state = hvd.elastic.TorchState(
        model=worker.training.model, optimizer=worker.optimizer, step=0, total=None
    )
    hvd.elastic.run(worker.train)(state)
    worker.finish()


if __name__ == "__main__":
    main()
