"""The facts about a job that its ledger keeps after the exchange is gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import accordion_hvd

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


class Job:
    """Facts about a job.

    Attributes:
        number: number of the job's ledger among those of this process in one folder.
        rank, ranks: number of this rank, and of all ranks.
        buckets: facts about each bucket, by name.
        until: time at which the last step ended, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.begun = False
        self.number, self.rank, self.ranks = 0, 0, 1
        self.engine = ""
        self.buckets: dict[str, dict[str, Any]] = {}
        self.policy: Any = None
        self._began = self.until = time.time()

    def join(self, exchange: Exchange) -> None:
        communicator = exchange.communicator
        self.begun, self.policy = True, exchange.policy
        self.rank, self.ranks = communicator.rank, communicator.size
        module = type(communicator).__module__.removeprefix("accordion_hvd.")
        names = (name for prefix, name in ENGINES.items() if module.startswith(prefix))
        self.engine = next(names, module)

    def add_buckets(self, entries: Sequence[Any]) -> None:
        """Store the facts about the buckets (`BucketState`) that are not known yet."""
        for entry in entries:
            bucket, compressor = entry.bucket, repr(entry.compressor)
            facts = {
                "shape": list(bucket.shape),
                "tensors": len(bucket.members),
                "dense": bucket.dense_bytes,
                "compress": bucket.compress,
                "first": compressor,
                "compressor": compressor,
            }
            self.buckets.setdefault(bucket.name, facts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": accordion_hvd.__version__,
            "host": socket.gethostname(),
            "began": self._began,
            "until": self.until,
            "ranks": self.ranks,
            "engine": self.engine,
            "cores": len(os.sched_getaffinity(0)),
            "policy": repr(self.policy),
            "buckets": self.buckets,
        }

    def verdict(self) -> str:
        """Return the verdict of the policy's gate; "" if there is none."""
        gate = self.policy.gate
        return "" if gate is None else gate.verdict


ENGINES = {
    "comm.horovod": "Horovod",
    "comm.torch_distributed": "torch.distributed",
    "comm.local": "one rank",
    "simulation": "simulated ranks",
}
"""Name of the engine by the beginning of the communicator's module."""
