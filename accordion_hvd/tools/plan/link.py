"""The link between the ranks of a launch, measured with the engine's own operations."""

from __future__ import annotations

import os
import time
from types import ModuleType
from typing import Any

from accordion_hvd.comm import tcp
from accordion_hvd.comm.launcher import started_by_horovod, started_by_mpi
from accordion_hvd.core.base import Allreduce
from accordion_hvd.simulation.prediction import SEGMENT, Cluster, wire_seconds

MOST, TRIES = 8, 4
"""Largest size of the reduced vector in segments, and number of reductions."""


def launched() -> bool:
    """Return whether horovodrun, mpirun or torchrun has started this process with others."""
    return started_by_horovod() or started_by_mpi() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def prints() -> bool:
    """Return whether this process prints: rank 0, or a process without ranks."""
    if not launched():
        return True
    import accordion_hvd.torch as hvd

    return hvd.rank() == 0


def measured(engine: str | None) -> tuple[Cluster, str]:
    """Return the cluster of this launch, and its engine, by default the launcher's; collective.

    Raises:
        ValueError: if this process is no rank of a launch.
    """
    if not launched():
        raise ValueError(
            "pass --hosts and --link, or start this command with horovodrun or torchrun on the "
            "hosts, so that it measures their link."
        )
    import accordion_hvd.torch as hvd
    from accordion_hvd.ops import torch as xp
    from accordion_hvd.torch import engines

    hvd.init(engine=engine)
    ranks, local, name = hvd.size(), hvd.local_size(), engines.carrier()
    communicator, before = engines.connect(engines.process_set_of(None)), tcp.connections()
    size = min(ranks, MOST) * SEGMENT
    small, large = (xp.zeros((elements,), "float32") for elements in (1, size // 4))
    latency = communicator.run("plan.latency", _seconds(small, xp))
    whole = communicator.run("plan.bandwidth", _seconds(large, xp))
    seconds = max(whole - latency, whole / 5)  # on a fast link, latency may seem to be all
    connection = tcp.slowest(before, tcp.connections())
    rtt = connection.rtt if connection else latency / max(1, ranks - 1)
    bandwidth = 2 * (ranks - 1) / ranks * size / wire_seconds(seconds, ranks, rtt)
    hosts, cores = max(1, ranks // local), float(os.cpu_count() or 1)
    if hosts == 1:
        return Cluster(1, local, cores=cores, inside=bandwidth), name
    return Cluster(hosts, local, bandwidth, rtt, cores), name


def _seconds(vector: Any, xp: ModuleType) -> Any:
    """Return the least seconds of an allreduce of a vector; a generator of collectives."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        yield Allreduce(xp.copy(vector))
        times.append(time.perf_counter() - began)
    return min(times)
