"""Tests of a rank that is killed while it saves: restarted ranks load a complete checkpoint.

The environment variable KILLED_RANK is the rank, KILLED_AT the number of its operation on files at
which it is killed, and KILLED_FOLDER the folder of the checkpoints.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import harness
import numpy as np

import accordion_hvd.torch as hvd
from accordion_hvd.engine.checkpoint import load_state, save_state
from accordion_hvd.torch import engines

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from keepers import Numbers, counted  # noqa: E402

INIT = hvd.init
FOLDER = os.environ.get("KILLED_FOLDER", "")
SIZE = 10_000


def of_state(number: int) -> Numbers:
    saver = Numbers(engines.connect(hvd.global_process_set))
    saver.arrays, saver.steps = {"x": np.full(SIZE, 10.0 * number + hvd.rank())}, number
    return saver


def check_a_rank_is_killed() -> None:
    save_state(FOLDER, only=[of_state(1)])
    left, write = int(os.environ["KILLED_AT"]), os.write

    def kill(name: str, about: Any) -> None:
        nonlocal left
        left -= hvd.rank() == int(os.environ["KILLED_RANK"])
        if left == 0:
            if name == "write":
                descriptor, content = about
                write(descriptor, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    with counted(kill):
        save_state(FOLDER, only=[of_state(2)])


def check_the_last_complete_checkpoint_is_loaded() -> None:
    found = Numbers(engines.connect(hvd.global_process_set))
    load_state(FOLDER, only=[found])
    assert found.steps in (1, 2)
    np.testing.assert_array_equal(found.arrays["x"], [10.0 * found.steps + hvd.rank()] * SIZE)
    save_state(FOLDER, only=[of_state(3)])
    load_state(FOLDER, only=[found])
    assert found.steps == 3


if __name__ == "__main__":
    harness.main(globals())
