"""The stages of the elastic trainings, which PyTorch and Keras share."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FEW, MANY = "localhost:2\n", "localhost:2\n127.0.0.1:1\n"
"""Hosts with two and three ranks; Horovod never uses a host again on which a rank has died."""

ABSENCE = 3.0
"""Seconds for which discovery finds no host, which is some of its periods."""

STEPS = 6
"""Steps before each stage, and after the last one."""

PATIENCE = 60.0
"""Seconds to wait for other ranks."""

CUT = Path(os.environ["CHECK_FOLDER"], "cut")

BEGIN: dict[str, Any] = {
    "step": 0, "entered": 0, "sizes": [], "leaders": [], "changes": [], "total": None
}  # fmt: skip
"""Attributes of the elastic state before the training."""


class Stages:
    """Changes of the set of ranks, one after the other.

    Args:
        names: "join" (a third rank joins), "vanish" (discovery finds no host for a while and then
            the hosts of three ranks, of which the third is now the first), "leave" (the rank on
            the second host leaves in order), "kill" (that rank is killed), "cut" (the network of
            the last of three hosts is cut, see `cut_hosts`).

    Attributes:
        resumed: seconds from the cut until the other ranks went on.
    """

    resumed = 0.0

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.waited, self.begun = names, 0.0, 0

    def enter(self, state: Any, size: int, total: np.ndarray) -> None:
        """Record the number of ranks, and the change of the conserved sum since the last step."""
        if state.total is not None:
            norm = float(np.linalg.norm(state.total))
            drift = float(np.linalg.norm(total - state.total)) / (norm or 1.0)
            state.changes = [*state.changes, (norm, drift)]
        state.sizes, state.entered = [*state.sizes, size], state.step
        state.leaders = [*state.leaders, state.leading_rank]
        if CUT.exists():
            self.resumed = time.time() - CUT.stat().st_mtime

    def over(self, state: Any) -> bool:
        """Return whether all stages and the steps after them are done, or waiting took too long."""
        finished = len(state.sizes) > len(self.names) and state.step >= state.entered + STEPS
        return finished or self.waited > PATIENCE

    def act(self, state: Any, rank: int) -> None:
        """Begin the next stage if it is due, and wait for it; called after each step."""
        number = len(state.sizes) - 1
        if number >= len(self.names) or state.step < state.entered + STEPS:
            return
        if rank == 0 and self.begun <= number:
            self.begun = number + 1
            change_hosts(self.names[number])
        if self.names[number] == "kill" and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        self.waited += 0.1


def change_hosts(name: str) -> None:
    """Write the hosts of a stage to the file that discovery reads."""
    if name == "join":
        write_hosts(MANY)
    elif name == "vanish":
        write_hosts("")
        threading.Timer(ABSENCE, write_hosts, [MANY]).start()
    elif name == "leave":
        write_hosts(FEW)
    elif name == "cut":
        CUT.touch()


def write_hosts(text: str) -> None:
    """Replace the file of hosts atomically, because discovery may read it at any moment."""
    path = Path(os.environ["ELASTIC_HOSTS"])
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
