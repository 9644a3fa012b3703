"""Processes of a launch, which are found by a variable of their environment.

Launchers start processes in sessions and process groups of their own; the environment is inherited.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE = 3.0  # seconds after a signal


def started(variable: str, value: str) -> Iterator[int]:
    """Yield the PIDs of the processes whose environment has `variable=value`."""
    token = f"{variable}={value}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if token in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue  # ended meanwhile, or another user's


def end(process: subprocess.Popen[Any], variable: str, value: str) -> None:
    """End a launcher and all processes of its launch, and nothing else.

    Args:
        process: the launcher.
        variable: environment variable that only processes of this launch have with this value.
        value: its value.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = set(started(variable, value))
        if process.poll() is None:
            left.add(process.pid)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + _PATIENCE
        while process.poll() is None or any(started(variable, value)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
