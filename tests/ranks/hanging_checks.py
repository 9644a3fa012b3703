"""A negative control of the harness: rank 1 hangs in its second check, others wait in the third."""

import time

import harness


def wait_for_ever() -> None:
    time.sleep(600)


def wait_for_others() -> None:
    time.sleep(600)


def check_passes() -> None:
    pass


def check_hangs_on_rank_1() -> None:
    if harness.RANK == 1:
        wait_for_ever()


def check_waits_for_rank_1() -> None:
    wait_for_others()


if __name__ == "__main__":
    harness.main(globals())
