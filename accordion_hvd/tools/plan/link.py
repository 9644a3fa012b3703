"""The link between the ranks of a launch, measured with the engine's own operations."""

from __future__ import annotations

import os

from accordion_hvd.comm.launcher import started_by_horovod, started_by_mpi
from accordion_hvd.policies.gate import probe
from accordion_hvd.policies.gating import PROBE
from accordion_hvd.simulation.prediction import ENGINES, Cluster


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
    """Return the cluster of this launch, and its engine; collective.

    Args:
        engine: engine that carries gradients; None for that of the launcher.

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
    communicator = engines.connect(engines.process_set_of(None))
    found = communicator.run("plan.link", probe(xp.zeros((PROBE,), "float32"), xp, ranks))
    costs, messages = ENGINES[name], 2 * (ranks - 1)
    rounds = messages * (2 if costs.negotiates else 1)
    rtt = max(0.0, (found.latency - costs.overhead) / max(rounds, 1) - costs.hop)
    hosts, cores = max(1, ranks // local), float(os.cpu_count() or 1)
    if hosts == 1:
        return Cluster(1, local, cores=cores, inside=found.bandwidth), name
    return Cluster(hosts, local, found.bandwidth, rtt, cores), name
