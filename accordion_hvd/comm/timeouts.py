"""How long ranks wait for each other, and the end of a process that waits no longer."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from accordion_hvd import check
from accordion_hvd.comm import guard

VARIABLE = "ACCORDION_HVD_TIMEOUT"
"""Environment variable with the seconds after which a rank that does not answer counts as lost."""

DEFAULT = 900.0
"""Seconds; longer than an evaluation on one rank should last."""

_GLOO = 30.0  # seconds that Horovod's own threads wait for those of other ranks over Gloo


def seconds() -> float:
    """Return the timeout of this process in seconds.

    Raises:
        ValueError: if ACCORDION_HVD_TIMEOUT is not a number of at least 1.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return DEFAULT
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < 1e6:
        check.refuse("environment", VARIABLE, text, "a number of seconds from 1 to 1e6")
    return value


def interval() -> float:
    """Return the seconds between messages of a rank that waits: a minute, or less to be in time."""
    return min(60.0, seconds() / 5)


class Wait:
    """The seconds of a wait, without those in which this process did not run.

    Schedulers stop jobs for hours (`scontrol suspend`, `docker pause`). A stopped process sees a
    long time between two calls of `seconds`, of which `longest` seconds count.
    """

    def __init__(self, longest: float = 1.0) -> None:
        self._last, self._seconds, self._longest = time.monotonic(), 0.0, longest

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, self._longest)
        self._last = now
        return self._seconds


def limit_horovod() -> None:
    """Shorten Horovod's limit for its own threads over Gloo if the timeout is shorter.

    Call this function before Horovod starts. A setting of the job has precedence.
    """
    if seconds() < _GLOO:
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(seconds())))


# ----------------------------------------------------------------------------- the end of a process
# Horovod ends together with all ranks. If a rank does not answer, a process would therefore wait
# again when it exits, over MPI for ever.
#
# In two cases, Python does not get to count the seconds of a wait: TensorFlow waits within a graph,
# and Horovod over MPI keeps PyTorch's call waiting, and with it Python's lock, while it agrees on
# process sets with the other ranks. A thread, or in the second case a process, ends the rank there.

logger = logging.getLogger(__name__)

_LONGEST = 5.0  # seconds between two looks at the waits

_gave_up = False
_waits: list[Callable[[], float]] = []
_calls: dict[object, float] = {}  # the waits of `waiting`: when each began


def at_exit(function: Callable[[], object]) -> Callable[[], object]:
    """Let Python call a function when this process ends, but not when a forked child does.

    Returns:
        The function that `atexit.unregister` takes.
    """
    owner = os.getpid()
    return atexit.register(lambda: function() if os.getpid() == owner else None)


def give_up() -> None:
    """Make this process end without Horovod's end, because a rank does not answer."""
    global _gave_up
    _gave_up = True


@functools.cache
def register() -> None:
    """Let the process end without Horovod's end after `give_up`; call it after Horovod's start.

    Python calls functions that were registered later first: those of the script, then this one,
    then Horovod's.
    """
    at_exit(lambda: leave() if _gave_up else None)


def watch(rank: int, began: Callable[[], float] | None = None) -> None:
    """Let a thread end this process if a wait takes longer than ACCORDION_HVD_TIMEOUT.

    Args:
        rank: rank of this process, for the message.
        began: a function that returns a number for the present wait, such as the time at which it
            began, and 0 between waits. None: only the waits of `waiting` are observed.
    """
    if began is not None:
        _waits.append(began)
    _start(_look, rank)


@contextmanager
def waiting() -> Iterator[None]:
    """Let the thread of `watch` observe the calls within this context as one wait."""
    key = object()
    _calls[key] = time.monotonic()
    try:
        yield
    finally:
        del _calls[key]


def guard_lock(rank: int) -> None:
    """Let a process end this one if Python's lock is not released for ACCORDION_HVD_TIMEOUT.

    The process gets a beat from a thread of this one. It takes the last but one of the real-time
    signals, at which `faulthandler` prints where the threads are.
    """
    _start(_beat, rank)


# One thread for each of the functions, however many communicators there are.
@functools.cache
def _start(run: Callable[[int], None], rank: int) -> None:
    name = f"accordion.ending.{run.__name__}"
    threading.Thread(target=run, args=(rank,), name=name, daemon=True).start()


def _look(rank: int) -> None:
    limit, pause = seconds(), min(interval() / 5, _LONGEST)
    known: dict[Any, tuple[float, Wait]] = {}
    while True:
        time.sleep(pause)
        present = {wait: wait() for wait in _waits} | dict(_calls)  # a copy: other threads go on
        # A wait that began at another time is another one. A look may be late, but not by hours.
        known = {
            key: known[key] if key in known and known[key][0] == began else (began, Wait(2 * pause))
            for key, began in present.items()
            if began
        }
        waited = max((wait.seconds() for _, wait in known.values()), default=0.0)
        if waited > limit:
            text = f"rank {rank} has waited for {waited:.0f} s: a rank does not answer, and this"
            logger.error("accordion_hvd: %s process ends.", text)
            leave()


def _beat(rank: int) -> None:
    pause = interval()
    faulthandler.register(guard.SIGNAL, file=2, all_threads=True)
    # The last beat may be a pause old. The guard needs Python's library only.
    words = [guard.__file__, str(rank), str(seconds() + pause)]
    with subprocess.Popen([sys.executable, "-I", "-S", *words], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        while process.poll() is None:
            os.write(process.stdin.fileno(), b".")
            time.sleep(pause)


def leave() -> NoReturn:
    """End this process now, with status 1, and without what else is to be done at its end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
