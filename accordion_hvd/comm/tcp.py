"""TCP connections of this process, as the kernel has measured them."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
from dataclasses import dataclass
from typing import Any

LEAST = 1 << 16
"""Smallest number of sent bytes of a connection that is reported: others carry control messages."""

# Offsets in `struct tcp_info` of Linux, in bytes (include/uapi/linux/tcp.h).
_ACKED, _MIN_RTT, _RATE, _BUSY, _SIZE = 120, 148, 160, 168, 184


@dataclass(frozen=True)
class Connection:
    """A connection to another process.

    Attributes:
        peer: IPv4 address of the other end as an integer; 0 for other addresses.
        sent: bytes that the other end has received from this process.
        rate: these bytes per second of the time in which unreceived bytes were under way; on very
            fast connections, for which the kernel counts no such time, the rate of the last bytes.
        rtt: least round-trip time, in seconds.
    """

    peer: int
    sent: float
    rate: float
    rtt: float


def connections() -> list[Connection]:
    """Return the TCP connections of this process that have sent `LEAST` bytes or more.

    The list is empty if the platform has no such measurements.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return []
    found = (_connection(int(name)) for name in names)
    return [x for x in found if x is not None and x.sent >= LEAST]


def address(number: float) -> str:
    """Return the IPv4 address of an integer as text; "" for 0."""
    return str(ipaddress.IPv4Address(int(number))) if number else ""


def _connection(descriptor: int) -> Connection | None:
    """Return the measurements of a descriptor; None if it is not a TCP connection."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.type != socket.SOCK_STREAM or sock.family not in _FAMILIES:
                return None
            peer = sock.getpeername()[0]
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:  # closed meanwhile, or not connected
        return None
    return None if len(info) < _SIZE else _read(info, peer)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _read(info: bytes, peer: str) -> Connection:
    (rtt,) = struct.unpack_from("I", info, _MIN_RTT)
    sent, last, busy = (struct.unpack_from("Q", info, x)[0] for x in (_ACKED, _RATE, _BUSY))
    rate = 1e6 * sent / busy if busy else float(last)
    return Connection(_number(peer), float(sent), rate, 1e-6 * rtt)


def _number(peer: str) -> int:
    address: Any = ipaddress.ip_address(peer.partition("%")[0])
    if address.version == 6:
        address = address.ipv4_mapped
    return 0 if address is None else int(address)
