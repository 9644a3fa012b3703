"""The common part of the trainings in PyTorch and Keras: data, methods, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd import WAGMA, Accordion, LocalSGD, TopK
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


def checkpoints(rank: Rank) -> Path:
    """Return the folder of the checkpoints; unwritable in one case."""
    unwritable = rank.case.action == "unwritable"
    return Path("/proc/checkpoints") if unwritable else rank.folder / "checkpoints"
