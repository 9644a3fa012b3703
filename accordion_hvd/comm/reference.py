"""The reference of the collectives: their results, computed in one process.

Simulated ranks get these results, and so do ranks that exist only in a benchmark or an estimate of
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from accordion_hvd.core.base import Allgather, Allreduce, Broadcast, Neighbours, Request, Tensor
from accordion_hvd.ops import namespace


def results(requests: Mapping[int, Request]) -> dict[int, Any]:
    """Return each rank's result of one collective.

    Args:
        requests: rank to its request, for all members in rank order.
    """
    first = next(iter(requests.values()))
    xp = namespace(first.tensor)
    tensors = [request.tensor for request in requests.values()]
    if isinstance(first, Neighbours):
        senders = {rank: cast(Neighbours, request).of for rank, request in requests.items()}
        return {
            rank: tuple(xp.copy(requests[other].tensor) for other in others)
            for rank, others in senders.items()
        }
    if isinstance(first, Allreduce):
        combined = reduce(xp, tensors, first.op)
        return {rank: xp.copy(combined) for rank in requests}
    if isinstance(first, Allgather):
        read = first.decode or (lambda part: (part, None))
        return {rank: tuple(read(xp.copy(x))[0] for x in tensors) for rank in requests}
    if isinstance(first, Broadcast):
        return {rank: xp.copy(requests[first.root].tensor) for rank in requests}
    parts = [deal(xp, x, len(tensors)) for x in tensors]
    return {rank: xp.concat([part[i] for part in parts]) for i, rank in enumerate(requests)}


def reduce(xp: ModuleType, tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return the mean, sum or maximum of the ranks' tensors, added in rank order.

    Floats of 16 bits are added in fp32.
    """
    dtype = xp.dtype(tensors[0])
    half = dtype in ("float16", "bfloat16")
    total = xp.cast(tensors[0], "float32") if half else tensors[0]
    for x in tensors[1:]:
        total = xp.maximum(total, x) if op == "max" else total + xp.cast(x, xp.dtype(total))
    return xp.cast(total / len(tensors) if op == "mean" else total, dtype)


def deal(
    xp: ModuleType, tensor: Tensor, ranks: int, splits: Sequence[int] | None = None
) -> list[Tensor]:
    """Return the parts of a tensor that go to each rank: equal parts, or `splits` rows each."""
    even = [xp.shape(tensor)[0] // ranks] * ranks
    return list(xp.split(tensor, list(even if splits is None else splits)))


def repeated(xp: ModuleType, tensor: Tensor, op: str, ranks: int) -> Tensor:
    """Return `reduce` of `ranks` equal tensors."""
    return tensor * ranks if op == "sum" and ranks > 1 else tensor
