"""The end of a process: exit handlers, and a process that has given up waiting for another rank.

Horovod ends together with all ranks. If a rank does not answer, a process would therefore wait
again when it exits, over MPI for ever.

In two cases, Python does not get to count the seconds of a wait: TensorFlow waits within a graph,
and Horovod over MPI keeps PyTorch's call waiting, and with it Python's lock, while it agrees on
process sets with the other ranks. A thread, or in the second case a process, ends the rank there.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from accordion_hvd.comm import guard, timeouts

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
    at_exit(_leave)


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


@functools.cache
def _start(run: Callable[[int], None], rank: int) -> None:
    name = f"accordion.ending.{run.__name__}"
    threading.Thread(target=run, args=(rank,), name=name, daemon=True).start()


def _look(rank: int) -> None:
    """End this process if one of its waits takes too long."""
    limit, pause = timeouts.seconds(), min(timeouts.interval() / 5, _LONGEST)
    known: dict[Any, tuple[float, timeouts.Wait]] = {}
    while True:
        time.sleep(pause)
        present = {wait: wait() for wait in _waits} | dict(_calls)
        known = {
            key: known[key]
            if key in known and known[key][0] == began
            else (began, timeouts.Wait(2 * pause))
            for key, began in present.items()
            if began
        }
        waited = max((wait.seconds() for _, wait in known.values()), default=0.0)
        if waited > limit:
            text = f"rank {rank} has waited for {waited:.0f} s: a rank does not answer, and this"
            logger.error("accordion_hvd: %s process ends.", text)
            leave()


def _beat(rank: int) -> None:
    """Start the guard of this process, and tell it that Python runs."""
    interval = timeouts.interval()
    faulthandler.register(guard.SIGNAL, file=2, all_threads=True)
    words = [guard.__file__, str(rank), str(timeouts.seconds() + interval)]
    with subprocess.Popen([sys.executable, "-I", "-S", *words], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        while process.poll() is None:
            os.write(process.stdin.fileno(), b".")
            time.sleep(interval)


def _leave() -> None:
    if _gave_up:
        leave()


def leave() -> NoReturn:
    """End this process now, with status 1, and without what else is to be done at its end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
