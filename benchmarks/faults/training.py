"""The common part of the trainings in PyTorch and Keras: data, methods, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd import WAGMA, Accordion, Ledger, LocalSGD, TopK
from accordion_hvd.engine.ledger.sinks import JsonLines, Sink, Tracker
from benchmarks.faults.cases import STEPS
from benchmarks.faults.rank import Rank

FEATURES, HIDDEN, CLASSES, BATCH = 16, 64, 4, 8
WINDOW = 5
"""Steps of a window of the policy."""

METHODS: dict[str, Callable[[], Any]] = {
    "topk": lambda: TopK(0.1),
    "accordion": lambda: Accordion(TopK(0.2), TopK(0.1), window=WINDOW, interval=1),
    "local": lambda: LocalSGD(2),
    "wagma": lambda: WAGMA(2, period=5),
}


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's images and labels of a step."""
    draws = np.random.default_rng([rank, step])
    images = draws.standard_normal((BATCH, FEATURES)).astype(np.float32)
    return images, images[:, :CLASSES].argmax(1).astype(np.int64)


def method(rank: Rank) -> Any:
    """Return the rank's compression."""
    if rank.differs("compressor"):
        return TopK(0.2)
    if rank.differs("averaging"):
        return LocalSGD(3)
    return METHODS[rank.case.method]()


def steps(rank: Rank) -> int:
    """Return the number of steps that the rank takes."""
    return STEPS - 3 if rank.differs("steps") else STEPS


def ledger(rank: Rank) -> Ledger | None:
    """Return the ledger of a rank whose case has one, whose sinks are places of faults."""
    folder = rank.folder / "ledger"
    sinks: list[Sink] = []
    if rank.differs("ledger unwritable"):
        folder = Path("/proc/ledger")
    if rank.differs("ledger file"):
        folder.write_text("a file")
    if "sink" in rank.case.options:
        sinks = [JsonLines("/dev/full") if rank.differs("sink full") else FaultySink(rank)]
    if "tracker" in rank.case.options:
        sinks = [FaultyTracker(rank)]
    if sinks or "ledger" in rank.case.options:
        return Ledger(None if sinks else folder, sinks=sinks)
    return None


class FaultySink:
    """A sink whose calls are places of faults."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __call__(self, record: Any) -> None:
        """Pass a place of faults, as `close` does."""
        self._rank.at("sink")

    def close(self) -> None:
        """Pass a place of faults."""
        self._rank.at("sink's end")


class FaultyTracker(Tracker):
    """A tracker whose logging is a place of faults."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(every=2)
        self._rank = rank

    def log(self, values: Any, step: int) -> None:
        """Pass a place of faults."""
        self._rank.at("tracker")


def checkpoints(rank: Rank) -> Path:
    """Return the folder of the checkpoints; unwritable in one case."""
    unwritable = rank.case.action == "unwritable"
    return Path("/proc/checkpoints") if unwritable else rank.folder / "checkpoints"
