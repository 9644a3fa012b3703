"""Choice of the fp16 reduction: alltoall and allgather, or on slow links the engine's allreduce."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd.core.base import Allreduce

if TYPE_CHECKING:
    from accordion_hvd.comm.communicator import Communicator

SLOW = {"horovod": 300e6 / 8, "torch": 2e9 / 8}
"""Link speed in bytes/s below which an engine's ring allreduce of fp16 is faster.

In an alltoall, all ranks send to all ranks at once and fill each other's queues
(docs/performance.md). On faster links, the engine's scalar fp16 additions cost more time;
torch.distributed adds faster than Horovod.
"""

PROBE, TRIES = 1 << 16, 8
"""Number of elements of the vector for the measurement, and largest number of trials. The fastest
trial counts, because other load on a host looks like a slow link."""

ENOUGH, SECONDS = 3, 0.25
"""Number of trials, and their duration, after which a link counts as slow without further ones."""


def slow(engine: str) -> float:
    """Return the number in `SLOW`; an engine without one counts as torch.distributed."""
    return SLOW.get(engine, SLOW["torch"])


def choose_reduction(communicator: Communicator, needed: bool, device: Any = None) -> None:
    """Set `communicator.native_fp16_allreduce` by the speed of the link; collective.

    Measures the link once, if the engine's choice is not known already. A gate, which measures the
    link anyway, calls `choose_by` instead. The highest speed of all ranks counts: a rank that
    waited for others has measured the wait, too. The measurement ends early when it can only
    confirm the choice.

    Args:
        needed: whether the policy sends fp16 before a gate has measured the link.
    """
    known = communicator.native_fp16_allreduce is not None or communicator.size == 1
    if known or not needed:
        return
    tensor = communicator.xp.zeros((PROBE,), "float32", device)
    fastest = communicator.run("accordion.fp16_reduction", _fastest(tensor, communicator))
    communicator.native_fp16_allreduce = fastest < slow(communicator.engine)


def choose_by(bandwidth: float, communicator: Communicator, device: Any = None) -> Any:
    """Choose by the ranks' highest `bandwidth` (bytes per second); a generator of one allreduce."""
    if communicator.native_fp16_allreduce is None and communicator.size > 1:
        own = communicator.xp.full((1,), bandwidth, "float32", device)
        highest = communicator.xp.to_numpy((yield Allreduce(own, op="max")))
        communicator.native_fp16_allreduce = float(highest[0]) < slow(communicator.engine)


def _fastest(tensor: Any, communicator: Communicator) -> Any:
    xp, ranks, fastest, elapsed = communicator.xp, communicator.size, 0.0, 0.0
    for count in range(1, TRIES + 1):
        began = time.perf_counter()
        yield Allreduce(tensor)
        seconds = time.perf_counter() - began
        speed = 2 * (ranks - 1) / ranks * 4 * PROBE / seconds
        own = xp.asarray(np.array([speed, seconds], np.float32), xp.device(tensor))
        speed, seconds = xp.to_numpy((yield Allreduce(own, op="max"))).tolist()  # all ranks agree
        fastest, elapsed = max(fastest, speed), elapsed + seconds
        if fastest >= slow(communicator.engine) or (count >= ENOUGH and elapsed > SECONDS):
            break
    return fastest
