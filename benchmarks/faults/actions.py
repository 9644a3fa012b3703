"""Faults, as functions of the value that passes at the place of the fault."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd.engine import checkpoint_files

LATE = 5.0
"""Seconds that a late rank sleeps."""

BUSY = 600.0
"""Seconds that a busy rank sleeps."""


def _signal(number: int, value: Any) -> Any:
    os.kill(os.getpid(), number)
    return value


def _sleep(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def _exit(status: int, value: Any) -> Any:
    sys.exit(status)


def _raise(error: Exception, value: Any) -> Any:
    raise error


def _clock(seconds: float, value: Any) -> Any:
    """Set the clock that Python reads ahead."""
    right = time.time
    time.time = lambda: right() + seconds
    return value


def _fork(value: Any) -> Any:
    """Start a child that leaves; TimeoutError if it does not end, or writes a receipt."""
    child = os.fork()
    if not child:
        sys.exit(0)
    for _ in range(100):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise TimeoutError("the child did not end")
    if any(Path(os.environ["FAULTS_FOLDER"]).glob("**/receipt*")):
        raise TimeoutError("the child has written the receipt")
    return value


def _worker(value: Any) -> Any:
    """Start a worker of PyTorch's data loader that is killed after a second."""
    import torch

    class Killed(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    global _loader  # it lives while its worker does
    _loader = iter(torch.utils.data.DataLoader(Killed(), num_workers=1))
    return value


_loader: Any = None


def _removed(path: Any) -> Any:
    """Put a file in the place of the folder of the file that is about to be written."""
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.write_text("")
    return path


def _fails(operation: str, number: int, value: Any) -> Any:
    """Make the next call of a function of `os` fail with this error."""
    function = getattr(os, operation)

    def failing(*arguments: Any, **options: Any) -> Any:
        setattr(os, operation, function)
        raise OSError(number, os.strerror(number))

    setattr(os, operation, failing)
    return value


def _linked(path: Any) -> Any:
    """Put a link to a file of somebody else in the place of the file that is about to be made."""
    path.with_name(f"{path.name}.part").symlink_to("/dev/full")
    return path


def _locked(directory: Any) -> Any:
    """Lock a directory of checkpoints, as another job does."""
    directory.mkdir(parents=True, exist_ok=True)
    global _other  # whose lock ends with it
    _other = open(directory / checkpoint_files.LOCK, "wb", buffering=0)
    fcntl.flock(_other, fcntl.LOCK_EX)
    _other.write(b"job 7 (process 12 on another host)")
    return directory


_other: Any = None


def _taken_over(directory: Any) -> Any:
    """Let the newest checkpoint be that of another job, as on a file system without locks."""
    newest = max(directory.glob("state-*"))
    manifest = checkpoint_files.read_manifest(newest)
    checkpoint_files.write_manifest(newest, {**manifest, "owner": "job 7"})
    return directory


def _spoiled(number: float, value: Any) -> Any:
    """Set the first element of a gradient, or the first value of a message, to `number`."""
    value = np.array(value)
    if value.dtype == np.uint8:
        value[:4] = np.frombuffer(np.float32(number).tobytes(), np.uint8)
    else:
        value.reshape(-1)[0] = number
    return value


def _message(content: Callable[[int], Any], value: Any) -> Any:
    """Replace the bytes of a message."""
    return np.frombuffer(content(value.size), np.uint8)[: value.size].copy()


def _random(count: int) -> bytes:
    return np.random.default_rng(0).bytes(count)


def _dense(count: int) -> bytes:
    """Return the message of a rank that sends the first gradients uncompressed."""
    return np.random.default_rng(0).standard_normal(count).astype(np.float32).tobytes()


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "kill": functools.partial(_signal, signal.SIGKILL),
    "stop": functools.partial(_signal, signal.SIGSTOP),
    "interrupt": functools.partial(_signal, signal.SIGINT),
    "launcher": lambda value: value,  # the launcher gets the signal, from outside
    "unwritable": lambda value: value,  # `training.checkpoints` is such a folder
    "pause": functools.partial(_sleep, 1.0),  # the processes are stopped from outside meanwhile
    "collective": lambda value: value,  # the training runs a collective of its own
    "sleep": functools.partial(_sleep, LATE),
    "busy": functools.partial(_sleep, BUSY),
    "fork": _fork,
    "worker": _worker,
    "removed": _removed,
    "exit": functools.partial(_exit, 0),
    "exit 3": functools.partial(_exit, 3),
    "raise": functools.partial(_raise, ValueError("injected")),
    "memory": functools.partial(_raise, MemoryError("injected")),
    "clock": functools.partial(_clock, 3600.0),
    "clock back": functools.partial(_clock, -3600.0),
    "full": functools.partial(_fails, "write", errno.ENOSPC),
    "full rename": functools.partial(_fails, "replace", errno.ENOSPC),
    "io": functools.partial(_fails, "write", errno.EIO),
    "io open": functools.partial(_fails, "open", errno.EIO),
    "io fsync": functools.partial(_fails, "fsync", errno.EIO),
    "io mkdir": functools.partial(_fails, "mkdir", errno.EIO),
    "linked": _linked,
    "locked": _locked,
    "taken over": _taken_over,
    "nan": functools.partial(_spoiled, np.nan),
    "inf": functools.partial(_spoiled, np.inf),
    "spike": functools.partial(_spoiled, 1e20),
    "truncate": lambda value: np.array(value)[:-16],
    "lengthen": lambda value: np.append(value, np.zeros(16, np.uint8)),
    "random": functools.partial(_message, _random),
    "dense": functools.partial(_message, _dense),
}
