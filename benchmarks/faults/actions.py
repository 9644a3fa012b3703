"""Faults, as functions of the value that passes at the place of the fault."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LATE = 5.0
"""Seconds that a late rank sleeps."""


def _signal(number: int, value: Any) -> Any:
    os.kill(os.getpid(), number)
    return value


def _sleep(value: Any) -> Any:
    time.sleep(LATE)
    return value


def _exit(status: int, value: Any) -> Any:
    sys.exit(status)


def _raise(error: Exception, value: Any) -> Any:
    raise error


def _clock(value: Any) -> Any:
    """Set the clock that Python reads an hour ahead."""
    right = time.time
    time.time = lambda: right() + 3600
    return value


def _full(path: Any) -> Any:
    """Make the file that is about to be written a device without space."""
    path.with_name(f"{path.name}.part").symlink_to("/dev/full")
    return path


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
    "sleep": _sleep,
    "exit": functools.partial(_exit, 0),
    "exit 3": functools.partial(_exit, 3),
    "raise": functools.partial(_raise, ValueError("injected")),
    "memory": functools.partial(_raise, MemoryError("injected")),
    "clock": _clock,
    "full": _full,
    "nan": functools.partial(_spoiled, np.nan),
    "inf": functools.partial(_spoiled, np.inf),
    "truncate": lambda value: np.array(value)[:-16],
    "lengthen": lambda value: np.append(value, np.zeros(16, np.uint8)),
    "random": functools.partial(_message, _random),
    "dense": functools.partial(_message, _dense),
}
