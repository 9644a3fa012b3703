"""The engine of this process: Horovod or torch.distributed, for the interface and for tensors.

Two questions have separate answers. Which engine *coordinates* the ranks, that is, knows ranks,
sizes and process sets, follows from the launcher: torchrun means torch.distributed, horovodrun and
mpirun mean Horovod. Which engine *carries* compressed gradients can be chosen with
`init(engine=...)` or the environment variable ACCORDION_HVD_ENGINE: torch.distributed also carries
tensors between ranks that Horovod coordinates.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from accordion_hvd.comm.agreement import started_by_horovod, started_by_mpi
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.comm.torch_distributed import interface as _torch
from accordion_hvd.comm.torch_distributed import process_sets as _torch_sets
from accordion_hvd.comm.torch_distributed import start
from accordion_hvd.comm.torch_distributed.communicator import TorchCommunicator
from accordion_hvd.ops import torch as xp

VARIABLE = "ACCORDION_HVD_ENGINE"
"""Environment variable with the name of the engine for scripts that pass no `engine=`."""

NAMES = ("horovod", "torch")

_chosen: str | None = None  # the argument of `init`
_coordinates: str | None = None  # the engine that coordinates, from `init` to `shutdown`


def choose(engine: str | None) -> None:
    """Choose the engine of this process, before the ranks are connected.

    Args:
        engine: "horovod" or "torch"; None: ACCORDION_HVD_ENGINE if set, else the launcher's engine.

    Raises:
        ValueError: if the name is unknown, or the launcher does not suit the engine.
        RuntimeError: if Horovod is needed and not installed.
    """
    global _chosen, _coordinates
    source, name = ("engine", engine) if engine else (VARIABLE, os.environ.get(VARIABLE))
    if name and name not in NAMES:
        raise ValueError(f"{source} is {name!r}, but must be 'horovod' or 'torch'.")
    _chosen = name or None
    _coordinates = None
    _coordinates = coordinator()
    if _chosen == "horovod" and _coordinates == "torch":
        raise ValueError(
            f"{source} is 'horovod', but torchrun (or init_process_group) connects the ranks; "
            "start them with horovodrun or mpirun."
        )


def forget() -> None:
    """Forget the choice, after the ranks have been disconnected."""
    global _chosen, _coordinates
    _chosen = _coordinates = None


def coordinator() -> str:
    """Return the name of the engine that coordinates the ranks.

    Raises:
        RuntimeError: if Horovod is needed and not installed.
    """
    if _coordinates is not None:
        return _coordinates
    if not started_by_horovod() and _torch_connects():
        return "torch"
    launched = started_by_horovod() or started_by_mpi()
    if launched and not _has_horovod():
        raise RuntimeError(
            "horovodrun or mpirun has started this process, but Horovod is not installed. Install "
            "it, or start the ranks with torchrun."
        )
    return "horovod" if _has_horovod() else "torch"


def carrier() -> str:
    """Return the name of the engine that carries compressed gradients and models."""
    return _chosen or os.environ.get(VARIABLE) or coordinator()


def interface() -> ModuleType:
    """Return the module with Horovod's interface: `horovod.torch`, or ours."""
    return _horovod().hvd if coordinator() == "horovod" else _torch


def connect(process_set: Any) -> Communicator:
    """Return a communicator of a process set, a local one outside of it and for a single rank."""
    if not process_set.included() or process_set.size() == 1:
        return LocalCommunicator(xp)
    if carrier() == "horovod":
        return _horovod().HorovodCommunicator(process_set)
    return TorchCommunicator(process_set)


def process_set_of(ranks: list[int] | None) -> Any:
    """Return the process set of `ranks`; the global one for None or if there is none."""
    sets = _horovod().process_sets if coordinator() == "horovod" else _torch_sets
    return sets.of_ranks(ranks)


def adasum() -> Any:
    """Return Horovod's own `DistributedOptimizer`, which has Adasum.

    Raises:
        ValueError: if Horovod does not coordinate the ranks.
    """
    if coordinator() == "torch":
        raise ValueError(
            "op is hvd.Adasum, which torch.distributed does not have; use hvd.Average, or start "
            "the ranks with horovodrun."
        )
    return interface().DistributedOptimizer


def start_horovod(init: Callable[[], Any]) -> Any:
    """Start Horovod by a function; process sets can be added later if that costs nothing."""
    adapter = _horovod()
    adapter.process_sets.let_add()
    return adapter.connections.start(init)


def _torch_connects() -> bool:
    """Return whether torch.distributed connects the ranks, or can do so.

    Jobs of MPI may set torchrun's variables for other libraries, and torchrun's ranks may inherit
    those of MPI.
    """
    if dist.is_initialized() or dist.is_torchelastic_launched():
        return True
    return start.launched() and not (started_by_mpi() and _has_horovod())


@functools.cache
def _has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def _horovod() -> ModuleType:
    """Import and return the communicator over Horovod, which not every job needs."""
    return importlib.import_module("accordion_hvd.comm.horovod.torch")


class _Interface:
    """Horovod's interface, whose names are looked up in the engine at each access."""

    def __getattr__(self, name: str) -> Any:
        return getattr(interface(), name)


hvd: Any = _Interface()
