"""A negative control of the harness: the process of rank 1 crashes in its second check."""

import os
import signal
import time

import harness


def check_passes() -> None:
    pass


def check_crashes_on_rank_1() -> None:
    if harness.RANK == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600)


if __name__ == "__main__":
    harness.main(globals())
