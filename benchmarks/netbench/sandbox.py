"""Namespaces that contain a rig, so that nothing of it is left behind.

The rig runs as the first process of a PID namespace with network, mount and UTS namespaces of its
own. When that process ends, for any reason, the kernel ends all its descendants and removes hosts,
bridge and links. Rigs do not interfere with each other or with processes outside.
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
"""Seconds in which the rig may end by itself."""

ROOT = Path(__file__).resolve().parent.parent.parent
"""Folder of the package, which processes on the hosts must find, too."""


class Refusal(Exception):
    """Raised with one sentence when a requirement is missing."""


def obstacle() -> str | None:
    """Return a sentence that says why this machine cannot run a rig; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces and limited links need root; run this as root."
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; Debian has them in iproute2 and util-linux."
    trial = subprocess.run(
        [*NAMESPACES, "--mount-proc", "sh", "-c", TRIAL],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if trial.returncode:
        error = " ".join(trial.stderr.split())
        return f"root cannot create network namespaces here (a restricted container?): {error}"
    return None


# ----------------------------------------------------------------------------------------- outside
def enter(arguments: Sequence[str], module: str = __package__ or "") -> int:
    """Run a module with `arguments` in new namespaces; return its exit status.

    SIGINT and SIGTERM end the rig with all its processes; the status is then 128 + signal number.

    Raises:
        Refusal: if there is an `obstacle`.
    """
    if (why := obstacle()) is not None:
        raise Refusal(why)
    remove_leftovers()
    received: list[int] = []
    read_end, write_end = os.pipe()
    with _folder() as folder, _signals(received):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
            ),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            LIFELINE: str(read_end),
            FOLDER: folder,
            TAG: str(os.getpid()),
        }
        process = subprocess.Popen(
            [*NAMESPACES, "--mount-proc", sys.executable, "-m", module, *arguments],
            env=environment, pass_fds=[read_end],
        )  # fmt: skip
        os.close(read_end)
        status = _wait(process, write_end, received)
    return status


def _wait(process: subprocess.Popen[Any], lifeline: int, received: list[int]) -> int:
    """Wait for the rig; after a signal close the lifeline, and kill the rig if it stays."""
    deadline = None
    while True:
        try:
            status = process.wait(0.1 if deadline is None else PATIENCE + 1)
        except subprocess.TimeoutExpired:
            if deadline is not None:
                process.kill()  # --kill-child ends its children, too
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
    """Record SIGINT and SIGTERM instead of obeying them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Create a temporary folder for sockets and logs, named after the owner's PID."""
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove folders of killed rigs, which are all that such rigs leave behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = re.fullmatch(rf"{PREFIX}(\d+)-\w+", path.name)
        if owner and path.stat().st_uid == 0 and not Path("/proc", owner[1]).exists():
            shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------ inside
def inside() -> bool:
    """Return whether this process is the first process of a rig."""
    return LIFELINE in os.environ and os.getpid() == 1


def run(work: Callable[[Path, str], int]) -> int:
    """Run `work` with the rig's folder and tag; end when the starting process ends.

    Raises:
        SystemExit: if the lifeline breaks.
    """
    lifeline = int(os.environ.pop(LIFELINE))
    os.set_inheritable(lifeline, False)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal signals all processes; only the outer one reacts
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    # The hosts' shared memory is freed with the namespace.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    return work(Path(os.environ.pop(FOLDER)), os.environ.pop(TAG))


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the other end is closed; nothing is ever written
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(128 + signal.SIGTERM)


def _leave(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)
