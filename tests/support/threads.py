"""Simulated ranks in threads, for code that waits for other ranks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from accordion_hvd.simulation.one_process import SimulatedCommunicator

LIMIT = 20  # seconds that a rank waits for others


class Threaded(SimulatedCommunicator):
    """The communicator of a rank that runs in its own thread, and so may wait for other ranks."""

    lock = threading.RLock()

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._times: Counter[tuple[str, Any]] = Counter()

    def _put(self, name: str, group: Any, *about: Any) -> Any:
        self._times[name, group] += 1  # a rank may reuse a name before others have fetched
        with self.lock:
            return super()._put(f"{name}.{self._times[name, group]}", group, *about)

    def poll(self, handle: Any) -> bool:
        with self.lock:
            return super().poll(handle)

    def wait(self, handle: Any) -> Any:
        with self.lock:
            return super().wait(handle)

    def pause(self, waited: float) -> None:
        if waited > LIMIT:
            raise TimeoutError(f"rank {self.rank} waited {waited:.0f} s for others")
        time.sleep(1e-4)
