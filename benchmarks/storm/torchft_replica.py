"""A replica of a torchft training without compression: torchft's own DistributedDataParallel.

`benchmarks.storm.torchft_launcher` starts it; SIGTERM ends it after the present step.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft

from benchmarks.storm.training import Training

LIMIT = datetime.timedelta(seconds=60)  # torchft's default


class Replica:
    """One replica of the training.

    Args:
        training: its model and data.
        name: name of its host.
        lighthouse: address of the lighthouse.
    """

    def __init__(self, training: Training, name: str, lighthouse: str) -> None:
        self.training, self.name = training, name
        inner = torch.optim.Adam(training.model.parameters(), training.settings["lr"])
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            torchft.ProcessGroupGloo(timeout=LIMIT), self._heal, self._state,
            min_replica_size=1, timeout=LIMIT, replica_id=name, lighthouse_addr=lighthouse,
            store_addr="localhost", store_port=store.port, rank=0, world_size=1,
            hostname="localhost",
        )  # fmt: skip
        self.inner, self.optimizer = inner, torchft.Optimizer(self.manager, inner)
        self.model = torchft.DistributedDataParallel(self.manager, training.model)
        self.quorum: int | None = None
        self.leaves = False

    def _heal(self, state: dict[str, Any]) -> None:
        self.training.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.training.model.state_dict(), self.inner.state_dict()
        return {"model": model, "optimizer": optimizer}

    def train(self) -> None:
        """Train to the last step, or until this replica leaves."""
        while not self.leaves and self.manager.current_step() < self.training.settings["steps"]:
            with self.training.paced():
                self._step(self.manager.current_step())

    def _step(self, step: int) -> None:
        self.optimizer.zero_grad()  # starts the quorum
        rank = self.manager.participating_rank()  # None for a replica that heals
        ranks, quorum = self.manager.num_participants(), self.manager._quorum_id
        if rank == 0 and quorum != self.quorum:
            self.training.journal.write("enter", step=step, ranks=ranks, drift=None)
        self.quorum = quorum
        self.training.set_lr(self.inner.param_groups, step)
        self.training.backward(step, rank or 0)
        self.optimizer.step()
        if rank == 0 and self.manager.current_step() > step:
            self.training.journal.write("step", step=step + 1)
            self.training.journal.write("commit", step=step + 1)

    def finish(self) -> None:
        """Write the test loss and the sums of the weights."""
        found = {"loss": self.training.loss(), "sums": self.training.sums()}
        temporary = self.training.folder / f"new-{self.name}"  # the launcher must never read a part
        temporary.write_text(json.dumps(found))
        temporary.rename(self.training.folder / f"end-{self.name}")


def main() -> None:
    """Run one replica."""
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    name, lighthouse = sys.argv[3:]
    torch.set_num_threads(1)
    replica = Replica(Training(folder, settings), name, lighthouse)

    def leave(*_: Any) -> None:
        replica.leaves = True

    signal.signal(signal.SIGTERM, leave)
    (folder / f"pid-{name}").write_text(str(os.getpid()))
    replica.train()
    if not replica.leaves:
        replica.finish()
    replica.manager.shutdown(wait=False)
    os._exit(0)  # without waiting for the manager's threads


if __name__ == "__main__":
    main()
