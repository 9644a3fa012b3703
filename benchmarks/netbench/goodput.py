"""What a link carries: `receive ADDRESS` prints bytes a second, `send ADDRESS SECONDS` fills it."""

from __future__ import annotations

import socket
import sys
import time

PORT = 5001
CHUNK = 1 << 18
SETTLE = 0.3
"""Seconds at the beginning that do not count: the link starts with a full bucket of tokens."""


def receive(address: str) -> float:
    """Bytes a second of one connection, once it has settled."""
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
        buffer, began, counted, last = bytearray(CHUNK), time.perf_counter(), 0, 0.0
        while size := connection.recv_into(buffer):
            now = time.perf_counter()
            if not last and now - began > SETTLE:
                last = began = now
            elif last:
                counted, last = counted + size, now
    return counted / max(last - began, 1e-9)


def send(address: str, seconds: float) -> None:
    """Send as much as goes for some time."""
    chunk, end = bytes(CHUNK), time.perf_counter() + SETTLE + seconds
    with _connect(address) as connection:
        while time.perf_counter() < end:
            connection.sendall(chunk)


def _connect(address: str) -> socket.socket:
    """The receiver may still be starting."""
    for _ in range(200):
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody receives on {address}.")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2]))
    else:
        send(sys.argv[2], float(sys.argv[3]))
