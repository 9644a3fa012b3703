"""A replica of a torchft job, dense or compressed, which may come and go at any time.

`benchmarks.storm.torchft_launcher` starts it, with FOLDER, SETTINGS, HOST and LIGHTHOUSE.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft

from accordion_hvd.torch import torchft as compressed
from benchmarks.storm.job import TORCHFT
from benchmarks.storm.torchft_launcher import FEWEST
from benchmarks.storm.training import Training

TIMEOUT = datetime.timedelta(seconds=20)
"""Timeout of operations: a replica may wait so long for one that has died."""


class DenseAverager(torchft.DistributedDataParallel):  # type: ignore[misc]
    """torchft's `DistributedDataParallel`, whose hook returns even after a failed exchange.

    In torchft 0.2.0 an assertion of the hook then ends the replica, before its manager can refuse
    the step.
    """

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP evaluates none
        averaged = bucket.buffer()
        state.allreduce(averaged).wait()  # notes an error; then the step is not committed
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(averaged)
        return future


class Replica:
    """One replica of the training.

    Args:
        training: its model and data.
        host: name of its host.
        lighthouse: address of the lighthouse.
    """

    def __init__(self, training: Training, host: str, lighthouse: str) -> None:
        self.training, self.host = training, host
        self.optimizer = torch.optim.Adam(training.model.parameters(), training.settings["lr"])
        # The manager does not keep the store alive.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT), timeout=TIMEOUT,
            load_state_dict=self._load, state_dict=self._state, min_replica_size=FEWEST,
            replica_id=host, rank=0, world_size=1, hostname="localhost",
            store_addr="localhost", store_port=self._store.port, lighthouse_addr=lighthouse,
        )  # fmt: skip
        self._quorum = -1
        self.averager = self.manager
        if spec := training.settings["compression"].removeprefix(TORCHFT).strip():
            self.averager = compressed.average(
                self.manager, training.model, spec, optimizer=self.optimizer
            )
        else:
            training.wrapped = DenseAverager(self.manager, training.model)

    def _load(self, state: dict[str, Any]) -> None:
        self.training.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.training.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer}

    def train(self) -> bool:
        """Train to the last step; return whether this replica took part in that step."""
        took_part = False
        while self.manager.current_step() < self.training.settings["steps"]:
            with self.training.paced():
                took_part = self._step()
        return took_part

    def _step(self) -> bool:
        """Take a step if the replicas commit it; return whether this replica took part."""
        self.averager.start_quorum()
        rank = self.manager.participating_rank()  # waits for the quorum; None: this replica heals
        step = self.manager.current_step()
        self.optimizer.zero_grad()
        self.training.backward(step, rank or 0)
        if not self.averager.should_commit():
            return False
        self.training.set_lr(self.optimizer.param_groups, step)
        self.optimizer.step()
        self._note(rank, step)
        return True

    def _note(self, rank: int | None, step: int) -> None:
        """Note a committed step, and before it a quorum that has changed."""
        quorum = self.manager._quorum_id
        if rank == 0:
            if quorum != self._quorum:
                ranks = self.manager.num_participants()
                self.training.journal.write("enter", step=step, ranks=ranks, drift=None)
            for event in ("step", "commit"):
                self.training.journal.write(event, step=step + 1)
        self._quorum = quorum

    def finish(self) -> None:
        """Write the test loss and the sums of the weights."""
        found = {"loss": self.training.loss(), "sums": self.training.sums()}
        (self.training.folder / f"end-{self.host}").write_text(json.dumps(found))


def main() -> None:
    """Run one replica."""
    folder, settings, host = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    replica = Replica(Training(folder, settings), host, sys.argv[4])
    (folder / f"pid-{host}").write_text(str(os.getpid()))
    while len(list(folder.glob("pid-*"))) < settings["ranks"]:  # the first ones begin together
        time.sleep(0.1)
    if replica.train():
        replica.finish()
    os._exit(0)  # without waiting for the manager's threads


if __name__ == "__main__":
    main()
