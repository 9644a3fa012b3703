"""One process of a launch of the benchmark: holds contestants and does as the rig tells it.

Requests come through a Unix socket, which no network namespace hides and no link slows down.
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
"""The environment variable with the path of the rig's socket."""


def main(settings: dict[str, Any]) -> None:
    """Serve requests `(action, method, steps)`, such as to warm up, until the rig hangs up.

    Before the first of some steps all workers wait for each other, so that none is measured while
    others still prepare.

    Args:
        settings: framework, methods, model and batch.
    """
    methods = importlib.import_module(f"benchmarks.netbench.{settings['framework']}_methods")
    kind = getattr(methods, settings["framework"].capitalize())
    with Client(os.environ[SOCKET], "AF_UNIX") as rig:
        held = kind(settings["methods"], settings["model"], settings["batch"])
        rig.send({"rank": held.rank, "pid": os.getpid(), **held.facts})
        while True:
            try:
                action, method, count = rig.recv()
            except EOFError:
                return
            try:
                rig.send({"value": _answer(held, action, method, count, rig)})
            except Exception:
                rig.send({"error": traceback.format_exc()})


def _answer(held: Any, action: str, method: str, count: int, rig: Any) -> Any:
    def together() -> None:
        rig.send({"ready": True})
        rig.recv()

    if action == "steps":
        return held.steps(method, count, together)
    if action == "digest":
        return held.digest(method)
    return getattr(held, action)(method, count)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
