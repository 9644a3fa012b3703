"""The launcher of this process."""

from __future__ import annotations

import os

_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK")
"""Environment variables that MPI launchers set."""


def started_by_mpi() -> bool:
    return any(name in os.environ for name in _OF_MPI)


def started_by_horovod() -> bool:
    return "HOROVOD_RANK" in os.environ or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
