"""Choice of the fp16 reduction: alltoall and allgather, or on slow links the engine's allreduce."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from accordion_hvd.core.base import Allreduce

if TYPE_CHECKING:
    from accordion_hvd.comm.communicator import Communicator
    from accordion_hvd.policies import Policy

SLOW = 100e6 / 8
"""Link speed in bytes/s below which the engine's ring allreduce of fp16 is faster.

On slow links, an alltoall, in which all ranks send to all ranks at once, fills queues
(docs/performance.md). On faster links, the engines' scalar fp16 additions cost more time.
"""

PROBE, TRIES = 1 << 16, 8
"""Number of elements of the vector for the measurement, and number of trials. The fastest trial
counts, because other load on a host looks like a slow link."""


def choose_reduction(communicator: Communicator, policy: Policy, device: Any = None) -> None:
    """Choose the reduction of fp16 by the speed of the link; collective.

    Measures the link once, if a level of `policy` or its gate sends fp16 and the engine's choice is
    not known already. The highest speed of all ranks counts: a rank that waited for others has
    measured the wait, too.

    Args:
        communicator: communicator whose `native_fp16_allreduce` is set.
        policy: the policy.
        device: device of the measured vector.
    """
    known = communicator.native_fp16_allreduce is not None or communicator.size == 1
    if known or not _sends_fp16(policy):
        return
    xp = communicator.xp
    tensor = xp.zeros((PROBE,), "float32", device)
    fastest = communicator.run("accordion.fp16_reduction", _fastest(tensor, xp, communicator.size))
    communicator.native_fp16_allreduce = float(fastest) < SLOW


def _sends_fp16(policy: Policy) -> bool:
    return policy.fp16_reduction or (policy.gate is not None and policy.gate.fp16_reduction)


def _fastest(tensor: Any, xp: Any, ranks: int) -> Any:
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        yield Allreduce(xp.copy(tensor))
        seconds.append(time.perf_counter() - began)
    speed = 2 * (ranks - 1) / ranks * 4 * PROBE / min(seconds)
    fastest = yield Allreduce(xp.full((1,), speed, "float32", xp.device(tensor)), op="max")
    return fastest[0]
