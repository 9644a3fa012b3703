"""Rigs that `netbench.py` builds, and their processes and links, which must not remain."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "netbench.py"
TOKEN = "NETBENCH_TEST"


def outside() -> tuple[list[str], str]:
    """Return the links and the named namespaces of this network namespace."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split(":")[1] for line in links.stdout.splitlines()], names.stdout


def marked(token: str) -> list[int]:
    """Return the ids of a rig's processes, which have its token in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile
    return found


def start(token: str, *words: str) -> subprocess.Popen[str]:
    """Start `netbench.py`, whose processes inherit the token."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, TOKEN: token},
    )  # fmt: skip


def rig(token: str, *words: str, limit: float = 100) -> tuple[int, str, str]:
    """Run `netbench.py`, and check that its folder is gone; return status, stdout and stderr."""
    process = start(token, *words)
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        process.kill()
    assert not list(Path(tempfile.gettempdir()).glob(f"netbench-{process.pid}-*"))
    return process.returncode, out, err
