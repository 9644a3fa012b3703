"""Training under wait-avoiding averaging in which rank 1 comes to grief: `averaging_ends.py HOW`.

killed: its process is gone; stopped: it lives, but does nothing; moving: so it does when all were
ready and data is to travel; asleep: it trains for too long;
uncaught: an exception, and no `with` block; interrupt: Ctrl-C on all ranks; exit: sys.exit() with a
status; threads: MPI was started without MPI_THREAD_MULTIPLE; horovod: rank 0 is slow to end the
averaging, and Horovod, which has started MPI, ends it with rank 1's process.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import mpi4py
import numpy as np

HOW = sys.argv[1]
if HOW == "threads":
    mpi4py.rc.thread_level = "serialized"

if HOW == "horovod":
    import horovod.torch as hvd

    hvd.init()

from mpi4py import MPI  # noqa: E402

from accordion_hvd.engine.wait_avoiding import WaitAvoiding  # noqa: E402

RANK = MPI.COMM_WORLD.Get_rank()


def main() -> None:
    model = np.zeros(1000)
    averaging = WaitAvoiding([model], group_size=2, period=5, timeout=2)
    if HOW == "horovod":
        for _ in range(7):
            averaging.average([model])
        return end_slowly(averaging)
    for step in range(1000):
        time.sleep(0.001)
        if step == 12 and RANK == 1:
            grief(averaging)
        if step == 12 and HOW == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        averaging.average([model])


def end_slowly(averaging: WaitAvoiding) -> None:
    if RANK == 0:
        listen = averaging._listen

        def late() -> None:
            if averaging._ended is not None:
                time.sleep(1)
            listen()

        averaging._listen = late
    averaging.close()


def grief(averaging: WaitAvoiding) -> None:
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "moving":
        averaging._add_up = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "asleep":
        time.sleep(100)
    if HOW == "uncaught":
        raise ValueError("intended")
    if HOW == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main()
