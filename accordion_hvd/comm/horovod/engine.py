"""Horovod as an engine; its modules are imported when needed, because not every job has them."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from types import ModuleType
from typing import Any

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.agreement import has_horovod, started_by_horovod, started_by_mpi
from accordion_hvd.comm.communicator import Engine


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
    return start(lambda: _adapter().hvd.init(*args, **kwargs))


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


# -------------------------------------------------------------------------------------- connections
# When a rank dies, Gloo raises an error on the ranks that wait for this rank. Horovod then closes
# its connections except those of the failed operation, on which other ranks go on waiting: they
# notice the failure after HOROVOD_GLOO_TIMEOUT_SECONDS only. Closing all connections lets all ranks
# notice it within a fraction of a second.
Address = tuple[Any, Any]

_horovods: set[Address] = set()  # connections that Horovod has opened


def start(init: Callable[[], Any]) -> Any:
    """Call a function that starts Horovod, and note which connections it opens."""
    before = _connected()
    result = init()
    _horovods.clear()
    _horovods.update(_connected().keys() - before.keys())
    return result


def decorated(elastic: Any, hvd: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `elastic.run(function)`, which closes Horovod's connections when ranks change."""

    def reset() -> None:
        hvd.shutdown()
        for address, descriptor in _connected().items():
            if address in _horovods:
                _close(address, descriptor)
        start(hvd.init)

    original = elastic._reset  # `elastic.run` takes the function of this name
    elastic._reset = reset
    try:
        return elastic.run(function)
    finally:
        elastic._reset = original


def _connected() -> dict[Address, int]:
    import psutil  # comes with Horovod

    rows = psutil.Process().net_connections("tcp")
    return {(tuple(row.laddr), tuple(row.raddr)): row.fd for row in rows if row.raddr}


def _close(address: Address, descriptor: int) -> None:
    try:
        # A duplicate is closed: the descriptor stays open, because Gloo may still use it.
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            # The number may be that of another connection by now.
            if (connection.getsockname()[:2], connection.getpeername()[:2]) == address:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # Gloo or the other rank has ended it meanwhile
        pass
