"""TCP connections of this process, as the kernel has measured them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

LEAST = 1 << 18
"""Smallest number of bytes that show the rate of a connection."""

# Offsets in `struct tcp_info` of Linux, in bytes (include/uapi/linux/tcp.h).
_ACKED, _MIN_RTT, _RATE, _BUSY, _SIZE = 120, 148, 160, 168, 184


@dataclass(frozen=True)
class Connection:
    """A connection to another process.

    Attributes:
        port: port of this end.
        peer: IPv4 address of the other end as an integer; 0 for other addresses.
        sent: bytes that the other end has received from this process.
        busy: seconds in which bytes were under way; 0 on very fast connections.
        last: bytes per second of the last bytes.
        rtt: least round-trip time, in seconds.
    """

    port: int
    peer: int
    sent: float
    busy: float
    last: float
    rtt: float

    def since(self, before: Connection | None) -> Connection:
        if before is None:
            return self
        return replace(self, sent=self.sent - before.sent, busy=self.busy - before.busy)

    @property
    def rate(self) -> float:
        """Return bytes per second of the time in which bytes were under way."""
        return self.sent / self.busy if self.busy else self.last


def own_address(own: str, names: Sequence[str]) -> str:
    """Return the address at which the other hosts reach this one: loopback if there are none.

    Args:
        own: name of this host.
        names: names of all hosts.
    """
    for other in sorted(set(names) - {own}):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing, but chooses a route
            return probe.getsockname()[0]
    return "127.0.0.1"


def connections() -> list[Connection]:
    """Return the TCP connections of this process; none if the platform does not measure them."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return []
    found = (_connection(int(name)) for name in names)
    return [x for x in found if x is not None]


def slowest(before: Sequence[Connection], after: Sequence[Connection]) -> Connection | None:
    """Return the connection with the smallest rate between two measurements.

    Only connections that sent `LEAST` bytes or more count; None if there are none.
    """
    earlier = {(x.port, x.peer): x for x in before}
    changes = [x.since(earlier.get((x.port, x.peer))) for x in after]
    return min((x for x in changes if x.sent >= LEAST), key=lambda x: x.rate, default=None)


def address(number: float) -> str:
    """Return the IPv4 address of an integer as text; "" for 0."""
    return str(ipaddress.IPv4Address(int(number))) if number else ""


def _connection(descriptor: int) -> Connection | None:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as sock:  # which closes the duplicate only
            if sock.type != socket.SOCK_STREAM or sock.family not in _FAMILIES:
                return None
            peer, port = sock.getpeername()[0], sock.getsockname()[1]
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:  # closed meanwhile, or not connected
        return None
    return None if len(info) < _SIZE else _read(info, peer, port)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _read(info: bytes, peer: str, port: int) -> Connection:
    (rtt,) = struct.unpack_from("I", info, _MIN_RTT)
    sent, last, busy = (struct.unpack_from("Q", info, x)[0] for x in (_ACKED, _RATE, _BUSY))
    return Connection(port, _number(peer), float(sent), 1e-6 * busy, float(last), 1e-6 * rtt)


def _number(peer: str) -> int:
    address: Any = ipaddress.ip_address(peer.partition("%")[0])
    if address.version == 6:
        address = address.ipv4_mapped
    return 0 if address is None else int(address)
