"""The end of a process that has given up waiting for another rank.

Horovod ends together with all ranks. If a rank does not answer, a process would therefore wait
again when it exits, over MPI for ever.

In two cases, Python does not get to count the seconds over MPI, whose operations have no timeout:
TensorFlow waits within a graph, and Horovod keeps PyTorch's call waiting, and with it Python's
lock, while it agrees on process sets with the other ranks. A thread ends the process there.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from accordion_hvd.comm import timeouts

logger = logging.getLogger(__name__)

_gave_up = False
_waits: list[Callable[[], float]] = []


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
    atexit.register(_leave)


def watch(rank: int, began: Callable[[], float] | None = None) -> None:
    """Let a thread end this process if it waits for longer than ACCORDION_HVD_TIMEOUT over MPI.

    The thread takes over the timer of Python's module `faulthandler`.

    Args:
        rank: rank of this process, for the message.
        began: a function that returns the time at which the present wait began, 0 between waits;
            None: the thread notices only that Python's lock is not released.
    """
    if began is not None:
        _waits.append(began)
    _start_watch(rank)


@functools.cache
def _start_watch(rank: int) -> None:
    threading.Thread(target=_run, args=(rank,), name="accordion.ending", daemon=True).start()


def _run(rank: int) -> None:
    limit, interval = timeouts.seconds(), timeouts.interval()
    while True:
        # The timer's own thread does not need Python's lock.
        faulthandler.dump_traceback_later(limit + interval, exit=True, file=2)
        time.sleep(interval)
        now = time.time()
        waited = max((now - since for since in (wait() for wait in _waits) if since), default=0.0)
        if waited > limit:
            text = f"rank {rank} has waited for {waited:.0f} s: a rank does not answer, and this"
            logger.error("accordion_hvd: %s process ends.", text)
            give_up()
            _leave()


def _leave() -> None:
    if _gave_up:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
