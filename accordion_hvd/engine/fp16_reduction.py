"""The choice of who adds 16-bit floats: the owners of parts, or on slow links the engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from accordion_hvd.core.base import Allreduce

if TYPE_CHECKING:
    from accordion_hvd.comm.communicator import Communicator
    from accordion_hvd.policies import Policy

SLOW = 100e6 / 8
"""Bytes a second below which the ring is quicker: an alltoall, in which all send to all at once,
fills queues there (docs/performance.md); above, engines' scalar additions of halves cost more."""

PROBE, TRIES = 1 << 16, 8
"""Elements of the vector with which that is measured, and how often: the quickest counts, for what
else keeps a machine busy looks like a slow link."""


def choose_reduction(communicator: Communicator, policy: Policy, device: Any = None) -> None:
    """Measure the link once, if a level of `policy`, or its gate, sends halves; collective.

    Engines that are known to add halves well are not asked. A link that one rank has seen quick is
    quick: a rank that had to wait for others has measured the waiting.
    """
    known = communicator.native_fp16_allreduce is not None or communicator.size == 1
    if known or not _sends_halves(policy):
        return
    xp = communicator.xp
    tensor = xp.zeros((PROBE,), "float32", device)
    fastest = communicator.run("accordion.fp16_reduction", _fastest(tensor, xp, communicator.size))
    communicator.native_fp16_allreduce = float(fastest) < SLOW


def _sends_halves(policy: Policy) -> bool:
    return policy.fp16_reduction or (policy.gate is not None and policy.gate.fp16_reduction)


def _fastest(tensor: Any, xp: Any, ranks: int) -> Any:
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        yield Allreduce(xp.copy(tensor))
        taken.append(time.perf_counter() - began)
    seen = 2 * (ranks - 1) / ranks * 4 * PROBE / min(taken)
    fastest = yield Allreduce(xp.full((1,), seen, "float32", xp.device(tensor)), op="max")
    return fastest[0]
