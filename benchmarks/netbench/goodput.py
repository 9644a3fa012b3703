"""Goodput of a link.

`receive ADDRESS WARM_UP` prints bytes per second, `send ADDRESS WARM_UP SECONDS` fills the link.
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 5001
CHUNK = 1 << 18
WARM_UP = 0.3
"""Initial seconds that do not count, because the link starts with a full token bucket."""


def receive(address: str, warm_up: float = WARM_UP) -> float:
    """Return the bytes per second of one connection, after the first `warm_up` seconds."""
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
        buffer, began, counted, last = bytearray(CHUNK), time.perf_counter(), 0, 0.0
        while size := connection.recv_into(buffer):
            now = time.perf_counter()
            if not last and now - began > warm_up:
                last = began = now
            elif last:
                counted, last = counted + size, now
    return counted / max(last - began, 1e-9)


def send(address: str, seconds: float, warm_up: float = WARM_UP) -> None:
    """Send as much as possible for `seconds` seconds after the first `warm_up` seconds."""
    chunk = bytes(CHUNK)
    with _connect(address) as connection:
        end = time.perf_counter() + warm_up + seconds
        while time.perf_counter() < end:
            connection.sendall(chunk)


def _connect(address: str) -> socket.socket:
    """Connect, with retries because the receiver may still be starting."""
    for _ in range(200):
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"no receiver listens on {address}.")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2], float(sys.argv[3])))
    else:
        send(sys.argv[2], float(sys.argv[4]), float(sys.argv[3]))
