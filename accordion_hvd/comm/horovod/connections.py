"""Horovod's connections between ranks, some of which it leaves open after a failure.

When a rank dies, Gloo raises an error on the ranks that wait for this rank. Horovod then closes its
connections except those of the failed operation, on which other ranks go on waiting: they notice
the failure after HOROVOD_GLOO_TIMEOUT_SECONDS only. Closing all connections lets all ranks notice
it within a fraction of a second.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

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
