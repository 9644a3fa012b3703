"""What the errors of Gloo and NCCL do not say: whom this rank waits for, and which rank has ended.

Each rank writes to the ranks' store where it runs, how many operations it has waited for, and how
it ends. A thread of a rank that waits for long reads the others' numbers: a rank with a smaller
number is late, and one whose entry does not change has stopped. While waits are short, a wait costs
four assignments. A rank whose operation fails looks for a rank that has ended: by the entry of that
rank, by its process if that ran on the same host, or by what another rank has found out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accordion_hvd.comm import timeouts

logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds in which other ranks may say which rank has ended
_PAUSE = 0.05  # seconds between two looks

LEFT, LOST = "has left", "has lost the other ranks"
"""How a rank ends: in order, or because another rank has ended, which is no reason to name it."""


class Watch:
    """The watch of this process; `start` connects it to those of the other ranks.

    Attributes:
        count: number of operations that this rank has waited for.
        name: name of the last one.
        began: time at which the present wait began; None between waits.
    """

    def __init__(self) -> None:
        self.count, self.name = 0, ""
        self.began: float | None = None
        self._ended: threading.Event | None = None

    @property
    def on(self) -> bool:
        return self._ended is not None

    def start(self, store: Any, rank: int, size: int, keeper: int | None = None) -> None:
        """Connect this watch to those of the other ranks.

        Args:
            keeper: the rank whose process keeps the store; None: another process does.
        """
        self._keeper = keeper
        self._store = dist.PrefixStore("accordion.watch", store).clone()  # waits for nobody else
        self._store.set(f"place.{rank}", f"{_host()} {os.getpid()}")
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._seen: dict[int, tuple[str, float]] = {}  # entry, and since when it is the same
        self.count, self._ended = 0, threading.Event()
        self._interval = timeouts.interval()
        about = (self._ended,)
        self._thread = threading.Thread(
            target=self._run, args=about, name="accordion.watch", daemon=True
        )
        self._thread.start()

    def end(self, how: str = LEFT) -> None:
        """End the thread, and tell the other ranks how this rank ends.

        Nobody waits long for it, because the store may not answer.
        """
        if self._ended is not None:
            self._ended.set()
            self._in_time(lambda: self._store.set(f"end.{self._rank}", how))
            if self._rank == self._keeper and how != LEFT:
                time.sleep(_PATIENCE)  # others look for the rank that has ended
            self._thread.join(timeout=1)
        self._ended = None

    def missing(self) -> str:
        """Describe the ranks that have ended, else those that this rank waits for."""
        if self._ended is None:
            return "which rank is late is not known"
        found: list[str] = []
        answers = self._in_time(lambda: found.extend(self._find_ended()))
        if not answers and self._keeper is not None:
            return f"rank {self._keeper}, which keeps the ranks' store, does not answer"
        return ", ".join(found or self._late()) or "which rank is late is not known"

    def _late(self) -> list[str]:
        late, now = [], time.monotonic()
        for rank, (entry, since) in sorted(self._seen.items()):
            words = entry.split(maxsplit=2)
            if now - since > 2.5 * self._interval:  # two beats are missing
                late.append(f"rank {rank} does not answer")
            elif int(words[0]) < self.count:
                last = f"its last one is {words[0]}, {words[2]}" if words[2:] else "it joined none"
                late.append(f"rank {rank} has not joined collective {self.count}: {last}")
        return late

    def _find_ended(self) -> list[str]:
        places = {r: self._read(f"place.{r}").split() for r in self._others}
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            ends = {rank: self._read(f"end.{rank}") for rank in self._others}
            for rank, place in places.items():
                here = place[:1] == [_host()]
                if not ends[rank] and here and _has_ended(int(place[1])):
                    ends[rank] = "has ended"
                    self._store.set(f"end.{rank}", ends[rank])  # for ranks of other hosts
            if found := [f"rank {r} {how}" for r, how in ends.items() if how not in ("", LOST)]:
                return found
            time.sleep(_PAUSE)
        return []

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _in_time(self, call: Callable[[], None]) -> bool:
        answers = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended
                call()
                answers.append(True)

        # In a thread: a store that does not answer would block this one.
        thread = threading.Thread(target=run, name="accordion.store", daemon=True)
        thread.start()
        thread.join(2 * _PATIENCE)
        return bool(answers)

    def _run(self, ended: threading.Event) -> None:
        beats = 0
        try:
            while not ended.wait(self._interval):
                beats += 1
                self._store.set(str(self._rank), f"{self.count} {beats} {self.name}")
                began = self.began
                waited = 0.0 if began is None else time.monotonic() - began
                if waited < self._interval:
                    self._seen = {}
                    continue
                self._look()
                late = ", ".join(self._late()) or "which rank is late is not known"
                text = f"rank {self._rank} has waited for {waited:.0f} s: {late}"
                logger.warning("accordion_hvd: %s.", text)
        except RuntimeError:  # the store has ended, with the process that keeps it
            self._seen = {}

    def _look(self) -> None:
        seen, now = {}, time.monotonic()
        for rank in self._others:
            entry = self._read(str(rank)) or "0 0"
            before = self._seen.get(rank, ("", now))
            seen[rank] = before if before[0] == entry else (entry, now)
        self._seen = seen  # as a whole, because another thread reads it


def _host() -> str:
    try:
        # Processes are looked for by their numbers, which hold within one namespace.
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}{namespace}"


def _has_ended(process: int) -> bool:
    try:
        # A process that has ended exists until its parent asks for its status.
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, or there is no /proc
        return False


watch = Watch()
