"""Horovod as an engine; its modules are imported when needed, because not every job has them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.agreement import has_horovod, started_by_horovod, started_by_mpi
from accordion_hvd.comm.engine import Engine


def _installed() -> bool:
    if not has_horovod() and (started_by_horovod() or started_by_mpi()):
        raise RuntimeError(
            "horovodrun or mpirun has started this process, but Horovod is not installed. Install "
            "it, or start the ranks with torchrun."
        )
    return has_horovod()


def _init(*args: Any, **kwargs: Any) -> Any:
    # Both set variables that Horovod reads when it starts.
    timeouts.limit_horovod()
    _adapter().process_sets.let_add()
    return _adapter().connections.start(lambda: _adapter().hvd.init(*args, **kwargs))


def _adapter() -> ModuleType:
    return importlib.import_module("accordion_hvd.comm.horovod.torch")


HOROVOD = Engine(
    name="horovod",
    launched=lambda: started_by_horovod() and _installed(),
    installed=_installed,
    interface=lambda: _adapter().hvd,
    init=_init,
    connect=lambda process_set: _adapter().HorovodCommunicator(process_set),
    process_set_of=lambda ranks: _adapter().process_sets.of_ranks(ranks),
)
