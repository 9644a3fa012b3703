"""Queue in the kernel (NFQUEUE) that holds each packet that a host receives until a verdict on it.

Payloads stay in the kernel: a process receives the numbers of the packets, and one verdict releases
all packets up to a number. The messages are those of Linux's nf_tables and nfnetlink_queue; the
command `nft` cannot send them, since it needs CONFIG_NFT_QUEUE, which not all kernels have.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

NETLINK_NETFILTER, SOL_NETLINK, NETLINK_NO_ENOBUFS, SO_RCVBUFFORCE = 12, 270, 5, 33
CLONE_NEWNET = 0x40000000
REQUEST, ACK, CREATE = 0x1, 0x4, 0x400
"""Flags of messages."""

TABLES, QUEUES = 10, 3
"""Subsystems of netfilter."""

ERROR, BATCH_BEGIN, BATCH_END = 2, 16, 17
NEW_TABLE, NEW_CHAIN, NEW_RULE = (TABLES << 8) + 0, (TABLES << 8) + 3, (TABLES << 8) + 6
VERDICT, CONFIG, VERDICTS = (QUEUES << 8) + 1, (QUEUES << 8) + 2, (QUEUES << 8) + 3
"""Types of messages."""

DROP, ACCEPT = 0, 1
IPV4, LOCAL_IN, LOOPBACK, INTERFACE, REGISTER, DIFFERS = 2, 1, 1, 4, 8, 1
LARGE_PACKETS = 4
MOST_PACKETS = 1 << 20
"""Largest number of packets in a queue. The kernel drops packets beyond it."""

BUFFER = 64 << 20
"""Bytes of the socket's buffer. The kernel drops packets whose numbers do not fit."""

WORD = struct.Struct(">I")
NUMBER = 24
"""Position of a packet's number in a message of the queue."""


class PacketQueue:
    """Queue of the packets that a network namespace receives, without those of loopback.

    Args:
        process: a process in the namespace.
        segments: whether to queue TCP's large packets as the segments that a network card would
            send, which takes more time.

    Attributes:
        socket: readable when packets have arrived.

    Raises:
        OSError: if the kernel has no such queues.
    """

    def __init__(self, process: int, segments: bool) -> None:
        self.socket = _open_socket(process)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
        self.socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        self._buffer = bytearray(4096)
        self._create(segments)
        self._add_rule()
        self.socket.setblocking(False)

    def arrived(self) -> list[int]:
        """Return the numbers of the packets that have arrived since the last call, in order."""
        numbers, buffer, receive, unpack = [], self._buffer, self.socket.recv_into, WORD.unpack_from
        try:
            while True:
                receive(buffer)
                if buffer[5] == QUEUES:  # otherwise an error, such as a verdict on no packet
                    numbers.append(unpack(buffer, NUMBER)[0])
        except BlockingIOError:
            return numbers

    def release(self, last: int) -> None:
        """Let all packets pass up to number `last`."""
        self._decide(VERDICTS, ACCEPT, last)

    def drop(self, number: int) -> None:
        """Drop one packet."""
        self._decide(VERDICT, DROP, number)

    def _decide(self, kind: int, verdict: int, number: int) -> None:
        self.socket.send(message(kind, attribute(2, struct.pack(">II", verdict, number))))

    def _create(self, segments: bool) -> None:
        """Create queue 0, which sends packets' numbers and lengths here, but no payload."""
        flags = 0 if segments else LARGE_PACKETS
        for attributes in (
            attribute(1, struct.pack(">BxH", 1, IPV4)),  # command: bind
            attribute(2, struct.pack(">IB", 0, 1)),  # copy mode: metadata
            attribute(3, WORD.pack(MOST_PACKETS)),
            attribute(4, WORD.pack(LARGE_PACKETS)) + attribute(5, WORD.pack(flags)),
        ):
            self._request(message(CONFIG, attributes, REQUEST | ACK))

    def _add_rule(self) -> None:
        """Send all packets for this host to queue 0, except those of loopback."""
        table, chain = attribute(1, b"netbench\0"), b"input\0"
        hook = nested(4, attribute(1, WORD.pack(LOCAL_IN)), attribute(2, WORD.pack(0)))
        load = attribute(1, WORD.pack(REGISTER)), attribute(2, WORD.pack(INTERFACE))
        compare = (
            attribute(1, WORD.pack(REGISTER)), attribute(2, WORD.pack(DIFFERS)),
            nested(3, attribute(1, struct.pack("=I", LOOPBACK))),
        )  # fmt: skip
        target = attribute(1, b"NFQUEUE\0"), attribute(2, WORD.pack(0)), attribute(3, bytes(8))
        rule = nested(
            4, expression("meta", *load), expression("cmp", *compare), expression("target", *target)
        )
        new = REQUEST | CREATE
        requests = (
            message(BATCH_BEGIN, b"", REQUEST, TABLES),
            message(NEW_TABLE, table, new),
            message(NEW_CHAIN, table + attribute(3, chain) + hook + attribute(7, b"filter\0"), new),
            message(NEW_RULE, table + attribute(2, chain) + rule, new | ACK),
            message(BATCH_END, b"", REQUEST, TABLES),
        )
        self._request(b"".join(requests))

    def _request(self, request: bytes) -> None:
        """Send a request and wait for its acknowledgement."""
        self.socket.send(request)
        answer = self.socket.recv(1 << 16)
        kind, code = struct.unpack_from("=4xH10xi", answer)
        if kind != ERROR or code:
            raise OSError(-code, os.strerror(-code))


def message(kind: int, attributes: bytes, flags: int = REQUEST, resource: int = 0) -> bytes:
    """Return a message to netfilter."""
    head = struct.pack("=IHHII", 20 + len(attributes), kind, flags, 0, 0)
    return head + struct.pack(">BBH", IPV4, 0, resource) + attributes


def attribute(key: int, value: bytes) -> bytes:
    """Return an attribute of a message, padded to four bytes."""
    return struct.pack("=HH", 4 + len(value), key) + value + bytes(-len(value) % 4)


def nested(key: int, *attributes: bytes) -> bytes:
    """Return an attribute that contains attributes."""
    return attribute(key | 0x8000, b"".join(attributes))


def expression(name: str, *attributes: bytes) -> bytes:
    """Return an expression of a rule."""
    return nested(1, attribute(1, name.encode() + b"\0"), nested(2, *attributes))


def _open_socket(process: int) -> socket.socket:
    """Open a socket to netfilter in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12
    with Path("/proc/self/ns/net").open() as own, Path(f"/proc/{process}/ns/net").open() as its:
        try:
            if libc.setns(its.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)
