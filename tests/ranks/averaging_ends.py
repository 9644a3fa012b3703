"""A training with wait-avoiding averaging that ends badly: `averaging_ends.py HOW`.

HOW is one of these words:

- killed: the process of rank 1 is killed.
- stopped: the process of rank 1 is stopped by a signal.
- moving: as stopped, but when all ranks are ready and the data is about to be exchanged.
- asleep: rank 1 sleeps for longer than the timeout.
- uncaught: rank 1 raises an exception outside of any `with` block.
- exit: rank 1 calls `sys.exit()` with a status.
- interrupt: all ranks are interrupted as by Ctrl-C.
- threads: MPI was started without MPI_THREAD_MULTIPLE.
- horovod: Horovod has started MPI and ends it with rank 1's process, while rank 0 is slow to end
  the averaging.
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
