"""The model of the bytes that a collective moves, by which `stats()` counts.

Counted per rank, for n ranks taking part and B bytes of a rank's tensor: ring allreduce
2 (n - 1) / n B sent and received; allgather (n - 1) B sent (a ring passes every block on) and the
others' bytes received; broadcast and alltoall (n - 1) / n B; to neighbours B each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from accordion_hvd.core.base import Allgather, Allreduce, Neighbours, Request
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import ITEMSIZE


@dataclass
class Traffic:
    """Bytes of one rank.

    Attributes:
        payload: what the algorithm handed over.
        sent: what a rank sends for it.
        received: what a rank receives for it.
        within: what of `sent` goes to ranks of the same machine.
    """

    payload: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    within: float = 0.0

    def add(self, other: Traffic) -> None:
        """Count `other` too."""
        self.payload += other.payload
        self.sent += other.sent
        self.received += other.received
        self.within += other.within


def size_of(tensor: Any, dtype: str | None = None) -> int:
    """Bytes of a tensor, were it of `dtype`."""
    xp = namespace(tensor)
    return math.prod(xp.shape(tensor)) * ITEMSIZE[dtype or xp.dtype(tensor)]


def traffic_of(request: Request, ranks: int, gathered: int | None = None) -> Traffic:
    """Return the bytes of `request` for a rank when `ranks` take part.

    Args:
        request: the request.
        ranks: how many take part.
        gathered: for an uneven allgather, the bytes that all ranks gave together.
    """
    wire = request.wire if isinstance(request, Allreduce) else None
    payload = size_of(request.tensor, wire)
    if isinstance(request, Allreduce):
        moved = 2 * (ranks - 1) / ranks * payload
        return Traffic(payload, moved, moved)
    if isinstance(request, Allgather):
        others = gathered - payload if gathered is not None else (ranks - 1) * payload
        return Traffic(payload, (ranks - 1) * payload, others)
    if isinstance(request, Neighbours):
        return Traffic(payload, len(request.to) * payload, len(request.of) * payload)
    moved = (ranks - 1) / ranks * payload
    return Traffic(payload, moved, moved)
