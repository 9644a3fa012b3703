"""The engine of this process: Horovod or torch.distributed, for the interface and for tensors.

Two questions have separate answers. Which engine *coordinates* the ranks, that is, knows ranks,
sizes and process sets, follows from the launcher: torchrun means torch.distributed, horovodrun and
mpirun mean Horovod. Which engine *carries* compressed gradients can be chosen with
`init(engine=...)` or the environment variable ACCORDION_HVD_ENGINE: torch.distributed also carries
tensors between ranks that Horovod coordinates.
"""

from __future__ import annotations

import os
from typing import Any

from accordion_hvd.comm import local
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.horovod.engine import HOROVOD
from accordion_hvd.comm.torch_distributed.engine import TORCH_DISTRIBUTED
from accordion_hvd.ops import torch as xp

VARIABLE = "ACCORDION_HVD_ENGINE"
"""Environment variable with the name of the engine for scripts that pass no `engine=`."""

ENGINES = {engine.name: engine for engine in (HOROVOD, TORCH_DISTRIBUTED)}
"""All engines. The first that has launched the ranks coordinates them, else the first installed."""

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
    if name and name not in ENGINES:
        raise ValueError(f"{source} is {name!r}, but must be {' or '.join(map(repr, ENGINES))}.")
    _chosen = name or None
    _coordinates = None
    _coordinates = coordinator()
    if _chosen and _chosen != _coordinates and ENGINES[_chosen].join is None:
        raise ValueError(
            f"{source} is {_chosen!r}, but torchrun (or init_process_group) connects the ranks; "
            "start them with horovodrun or mpirun."
        )


def init(*args: Any, **kwargs: Any) -> Any:
    """Connect the ranks by the engine that coordinates them, and the one that carries tensors."""
    coordinating, carrying = ENGINES[coordinator()], ENGINES[carrier()]
    result = coordinating.init(*args, **kwargs)
    if carrying is not coordinating and carrying.join is not None:
        carrying.join(coordinating.interface())
    return result


def forget() -> None:
    global _chosen, _coordinates
    _chosen = _coordinates = None


def coordinator() -> str:
    """Return the name of the engine that coordinates the ranks.

    Raises:
        RuntimeError: if Horovod is needed and not installed.
    """
    if _coordinates is not None:
        return _coordinates
    launched = [name for name, engine in ENGINES.items() if engine.launched()]
    return launched[0] if launched else next(n for n, x in ENGINES.items() if x.installed())


def carrier() -> str:
    """Return the name of the engine that carries compressed gradients and models."""
    return _chosen or os.environ.get(VARIABLE) or coordinator()


def interface() -> Any:
    """Return the module with Horovod's interface: `horovod.torch`, or ours."""
    return ENGINES[coordinator()].interface()


def connect(process_set: Any) -> Communicator:
    return local.connect(process_set, ENGINES[carrier()].connect, xp)


def process_set_of(ranks: list[int] | None) -> Any:
    return ENGINES[coordinator()].process_set_of(ranks)


def adasum() -> Any:
    """Return Horovod's own `DistributedOptimizer`, which has Adasum.

    Raises:
        ValueError: if Horovod does not coordinate the ranks.
    """
    if coordinator() != "horovod":
        engine = {"torch": "torch.distributed"}.get(coordinator(), coordinator())
        raise ValueError(
            f"op is hvd.Adasum, which {engine} does not have; use hvd.Average, or start the ranks "
            "with horovodrun."
        )
    return interface().DistributedOptimizer


class _Interface:  # each access asks for the engine: `init` and `shutdown` may change it
    def __getattr__(self, name: str) -> Any:
        return getattr(interface(), name)


hvd: Any = _Interface()
