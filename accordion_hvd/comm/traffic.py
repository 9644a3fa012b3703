"""A model of the bytes that collectives move, which `stats()` uses.

Bytes per rank, for n ranks that take part and B bytes in each rank's tensor:

- ring allreduce: 2 (n - 1) / n B sent and received;
- allgather: (n - 1) B sent, since a ring passes every block on; the other ranks' bytes received;
- broadcast and alltoall: (n - 1) / n B sent and received;
- neighbours: B sent to each receiver, B received from each sender.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accordion_hvd.core.base import Allgather, Allreduce, Neighbours, Request
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import ITEMSIZE


@dataclass
class Traffic:
    """Numbers of bytes of one rank.

    Attributes:
        payload: bytes of the tensors in requests.
        sent: bytes that the rank sends.
        received: bytes that the rank receives.
        within: bytes that the rank sends to ranks of the same host, included in `sent`.
    """

    payload: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    within: float = 0.0

    def add(self, other: Traffic) -> None:
        self.payload += other.payload
        self.sent += other.sent
        self.received += other.received
        self.within += other.within


def size_of(tensor: Any, dtype: str | None = None, xp: ModuleType | None = None) -> int:
    """Return the number of bytes of a tensor, or of the tensor cast to `dtype`."""
    xp = xp or namespace(tensor)
    return math.prod(xp.shape(tensor)) * ITEMSIZE[dtype or xp.dtype(tensor)]


def traffic_of(
    requests: Sequence[Request],
    ranks: int,
    gathered: int | None = None,
    xp: ModuleType | None = None,
) -> Traffic:
    """Return the bytes of one rank for requests of one kind, in one collective.

    Args:
        gathered: for uneven allgathers, the total number of bytes of all ranks' tensors.
        xp: operations of the tensors' framework, if known.
    """
    request, payload = requests[0], 0
    for one in requests:
        payload += size_of(one.tensor, one.wire if isinstance(one, Allreduce) else None, xp)
    if isinstance(request, Allreduce):
        moved = 2 * (ranks - 1) / ranks * payload
        return Traffic(payload, moved, moved)
    if isinstance(request, Allgather):
        received = gathered - payload if gathered is not None else (ranks - 1) * payload
        return Traffic(payload, (ranks - 1) * payload, received)
    if isinstance(request, Neighbours):
        return Traffic(payload, len(request.to) * payload, len(request.of) * payload)
    moved = (ranks - 1) / ranks * payload
    return Traffic(payload, moved, moved)
