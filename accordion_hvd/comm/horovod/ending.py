"""The end of a process that has given up waiting for another rank.

Horovod ends together with all ranks. If a rank does not answer, a process would therefore wait
again when it exits, over MPI for ever.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys

_gave_up = False


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


def _leave() -> None:
    if _gave_up:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
