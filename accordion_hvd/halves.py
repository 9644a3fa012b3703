"""Who adds 16-bit floats up: owners of parts, or on slow links the engine's own ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accordion_hvd.base import Allreduce
from accordion_hvd.policy.gate import probe

if TYPE_CHECKING:
    from accordion_hvd.communicator import Communicator
    from accordion_hvd.policy import Policy

SLOW = 100e6 / 8
"""Bytes a second below which the ring is quicker: an alltoall, in which all send to all at once,
fills queues there (docs/performance.md); above, engines' scalar additions of halves cost more."""

PROBE = 1 << 16
"""Elements of the vector with which that is measured."""


def meet(communicator: Communicator, policy: Policy, device: Any = None) -> None:
    """Measure the link once, if a level of `policy`, or its gate, sends halves; collective.

    Engines that are known to add halves well are not asked. A link that one rank has seen quick is
    quick: whoever had to wait for others has measured that.
    """
    known = communicator.half_allreduce is not None or communicator.size == 1
    if known or not _sends_halves(policy):
        return
    xp = communicator.xp
    tensor = xp.zeros((PROBE,), "float32", device)
    fastest = communicator.run("accordion.halves", _fastest(tensor, xp, communicator.size))
    communicator.half_allreduce = float(fastest) < SLOW


def _sends_halves(policy: Policy) -> bool:
    fallbacks = policy.gate.fallbacks if policy.gate is not None else ()
    return policy.halves or any(way.halves for way in fallbacks)


def _fastest(tensor: Any, xp: Any, ranks: int) -> Any:
    """A conversation: bytes a second, as the rank has them that sees most of them."""
    seen = []
    for _ in range(3):  # the best counts: what else a machine does looks like a slow link
        link = yield from probe(tensor, xp, ranks)
        seen.append(link.bandwidth)
    fastest = yield Allreduce(xp.full((1,), max(seen), "float32", xp.device(tensor)), op="max")
    return fastest[0]
