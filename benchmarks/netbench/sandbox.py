"""Namespaces in which a rig lives, so that nothing of it can be left behind.

The rig runs as the first process of a PID namespace with a network, a mount and a UTS namespace of
its own. When that process ends, however it ends, the kernel ends all that it has started and takes
down hosts, bridge and links. Several rigs never meet, and processes outside cannot be hit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
TRIAL = "ip link add br0 type bridge && tc qdisc add dev br0 root tbf rate 1mbit burst 9kb lat 1ms"
NAMESPACES = ("unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child")
LIFELINE, FOLDER, TAG = "NETBENCH_LIFELINE", "NETBENCH_FOLDER", "NETBENCH_TAG"
PREFIX = "netbench-"
PATIENCE = 5.0
"""Seconds that the rig has to end itself."""

ROOT = Path(__file__).resolve().parent.parent.parent
"""Where the package lies; what is started on the hosts must find it too."""


class Refusal(Exception):
    """Something is missing or wrong; one sentence says what."""


def stop(sentence: str) -> NoReturn:
    """End with status 2 and a sentence."""
    sys.stderr.write(f"netbench: {sentence}\n")
    raise SystemExit(2)


def obstacle() -> str | None:
    """Why this machine can have no rig, in one sentence; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces and limited links need root; run this as root."
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; Debian has them in iproute2 and util-linux."
    tried = subprocess.run(
        [*NAMESPACES, "--mount-proc", "sh", "-c", TRIAL],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if tried.returncode:
        said = " ".join(tried.stderr.split())
        return f"this root may not make network namespaces (a container without the right?): {said}"
    return None


# ----------------------------------------------------------------------------------------- outside
def enter(arguments: Sequence[str]) -> int:
    """Run this program again with `arguments` within new namespaces; returns its exit status.

    SIGINT and SIGTERM end the rig and everything in it; the status is then 128 + their number.

    Raises:
        Refusal: see `obstacle`.
    """
    if (why := obstacle()) is not None:
        raise Refusal(why)
    remove_leftovers()
    received: list[int] = []
    ours, theirs = os.pipe()
    with _folder() as folder, _signals(received):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
            ),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            LIFELINE: str(ours),
            FOLDER: folder,
            TAG: str(os.getpid()),
        }
        process = subprocess.Popen(
            [*NAMESPACES, "--mount-proc", sys.executable, "-m", __package__, *arguments],
            env=environment, pass_fds=[ours],
        )  # fmt: skip
        os.close(ours)
        status = _wait(process, theirs, received)
    return status


def _wait(process: subprocess.Popen[Any], lifeline: int, received: list[int]) -> int:
    """Wait for the rig; after a signal let go of the lifeline, and then insist."""
    deadline = None
    while True:
        try:
            status = process.wait(0.1 if deadline is None else PATIENCE + 1)
        except subprocess.TimeoutExpired:
            if deadline is not None:
                process.kill()  # --kill-child takes the rest along
            elif received:
                os.close(lifeline)
                deadline = PATIENCE
            continue
        if deadline is None:
            os.close(lifeline)
        if received:
            return 128 + received[0]
        return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM are noted, not obeyed."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder for sockets, logs and the like that names its owner."""
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove folders of rigs that were killed; of all they had, only these outlive them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = re.fullmatch(rf"{PREFIX}(\d+)-\w+", path.name)
        if owner and path.stat().st_uid == 0 and not Path("/proc", owner[1]).exists():
            shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------ inside
def inside() -> bool:
    """Whether this process is the first one of a rig."""
    return LIFELINE in os.environ and os.getpid() == 1


def run(work: Callable[[Path, str], int]) -> int:
    """Do the rig's work, given its folder and tag; ends when whoever started the rig ends.

    Raises:
        SystemExit: the lifeline broke.
    """
    lifeline = int(os.environ.pop(LIFELINE))
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the outside decides
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    # Whatever shared memory the hosts leave behind goes when the namespace goes.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    return work(Path(os.environ.pop(FOLDER)), os.environ.pop(TAG))


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: this returns when the other end is closed
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(128 + signal.SIGTERM)


def _leave(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)
