"""A negative control of the harness: rank 1 fails its second check while the others wait for it."""

import os
import time

import harness


def INIT() -> None:
    names = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
    assert next(int(os.environ[name]) for name in names if name in os.environ) > 1


def check_passes() -> None:
    pass


def check_fails_on_rank_1() -> None:
    if harness.RANK == 1:
        raise ValueError("intended")
    time.sleep(600)


def check_is_not_reached() -> None:
    raise AssertionError("never")


if __name__ == "__main__":
    harness.main(globals())
