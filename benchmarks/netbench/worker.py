"""One process of a launch: holds contestants and serves the rig's requests.

Requests arrive through a Unix socket, which is visible in all network namespaces and is not subject
to the links' limits.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

SOCKET = "NETBENCH_SOCKET"
"""Environment variable with the path of the rig's socket."""


def main(settings: dict[str, Any]) -> None:
    """Serve requests `(action, method, steps)` until the rig closes the socket.

    All workers synchronize before the first measured step, so that no worker is measured while
    others are still preparing.

    Args:
        settings: framework, methods, model and batch.
    """
    methods = importlib.import_module(f"benchmarks.netbench.{settings['framework']}_methods")
    kind = getattr(methods, settings["framework"].capitalize())
    with Client(os.environ[SOCKET], "AF_UNIX") as rig:
        contestants = kind(settings["methods"], settings["model"], settings["batch"])
        rig.send({"rank": contestants.rank, "pid": os.getpid(), **contestants.facts})
        while True:
            try:
                action, method, count = rig.recv()
            except EOFError:
                return
            try:
                rig.send({"value": _answer(contestants, action, method, count, rig)})
            except Exception:
                rig.send({"error": traceback.format_exc()})


def _answer(contestants: Any, action: str, method: str, count: int, rig: Any) -> Any:
    def together() -> None:
        rig.send({"ready": True})
        rig.recv()

    if action == "steps":
        return contestants.steps(method, count, together)
    if action == "digest":
        return contestants.digest(method)
    return getattr(contestants, action)(method, count)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
