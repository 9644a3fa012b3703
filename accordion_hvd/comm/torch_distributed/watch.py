"""A thread that says whom this rank waits for, because the errors of Gloo and NCCL do not.

Each rank writes to the ranks' store how many operations it has waited for. A rank that waits for
long reads the others' numbers: a rank with a smaller number is late, and one whose entry does not
change has stopped. While waits are short, a wait costs three assignments.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch.distributed as dist

from accordion_hvd.comm import timeouts

logger = logging.getLogger(__name__)


class Watch:
    """The watch of this process; `start` connects it to those of the other ranks.

    Attributes:
        count: number of operations that this rank has waited for.
        began: time at which the present wait began; None between waits.
    """

    def __init__(self) -> None:
        self.count = 0
        self.began: float | None = None
        self._ended: threading.Event | None = None

    def start(self, store: Any, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("accordion.watch", store).clone()  # waits for nobody else
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._seen: dict[int, tuple[str, float]] = {}  # entry, and since when it is the same
        self.count, self._ended = 0, threading.Event()
        self._interval = timeouts.interval()
        about = (self._ended,)
        self._thread = threading.Thread(
            target=self._run, args=about, name="accordion.watch", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """End the thread; wait for it, but not for long, because the store may not answer."""
        if self._ended is not None:
            self._ended.set()
            self._thread.join(timeout=1)
        self._ended = None

    def missing(self) -> str:
        """Describe the ranks that this rank waits for, as far as the thread has noticed."""
        late, now = [], time.monotonic()
        for rank, (entry, since) in sorted(self._seen.items()) if self._ended else ():
            count = int(entry.split()[0])
            if now - since > 2.5 * self._interval:
                late.append(f"rank {rank} does not answer")
            elif count < self.count:
                late.append(f"rank {rank} has come to operation {count} of {self.count}")
        return ", ".join(late) or "which rank is late is not known"

    def _run(self, ended: threading.Event) -> None:
        beats = 0
        try:
            while not ended.wait(self._interval):
                beats += 1
                self._store.set(str(self._rank), f"{self.count} {beats}")
                began = self.began
                waited = 0.0 if began is None else time.monotonic() - began
                if waited < self._interval:
                    self._seen = {}
                    continue
                self._look()
                text = f"rank {self._rank} has waited for {waited:.0f} s: {self.missing()}"
                logger.warning("accordion_hvd: %s.", text)
        except RuntimeError:  # the store has ended, with the process that keeps it
            self._seen = {}

    def _look(self) -> None:
        """Read the other ranks' entries."""
        seen, now = {}, time.monotonic()
        for rank in self._others:
            known = self._store.check([str(rank)])
            entry = self._store.get(str(rank)).decode() if known else "0 0"
            before = self._seen.get(rank, ("", now))
            seen[rank] = before if before[0] == entry else (entry, now)
        self._seen = seen


watch = Watch()
