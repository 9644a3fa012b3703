"""A process that ends a rank in which Python does not run; `timeouts.guard_lock` starts it.

It is a module of its own because it runs as a script, which imports nothing but Python's library.
"""

import os
import select
import signal
import sys
import time

SIGNAL = signal.SIGRTMAX - 1
"""Signal at which the rank prints where its threads are."""

_STEP = 1.0  # seconds between two looks


def main(rank: str, limit: float) -> None:
    """Wait for beats of the rank; end it after `limit` seconds without one.

    Time in which this process or the rank is stopped does not count, as in `timeouts.Wait`.
    """
    parent, silent = os.getppid(), 0.0
    while silent < limit:
        ready = select.select([sys.stdin], [], [], _STEP)[0]
        if (ready and not os.read(sys.stdin.fileno(), 4096)) or os.getppid() != parent:
            return  # the rank has ended
        if ready:
            silent = 0.0
        elif not _is_stopped(parent):
            silent += _STEP
    os.kill(parent, SIGNAL)
    time.sleep(_STEP)  # in which the rank prints where its threads are
    if os.getppid() != parent:
        return
    why = "Horovod does not return from an operation because a rank does not answer"
    text = f"rank {rank} has waited for {silent:.0f} s: {why}"
    sys.stderr.write(f"accordion_hvd: {text}, and this process ends.\n")
    os.kill(parent, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    except OSError:  # it has ended, or there is no /proc
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    main(sys.argv[1], float(sys.argv[2]))
