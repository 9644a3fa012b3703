"""Packing: what is requested together travels together, in as few collectives as can be.

Each program serves requests of one kind: it yields handles of the engine's operations, is sent
their results, and returns one result a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.collectives import Collectives
from accordion_hvd.comm.traffic import Traffic, traffic_of
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Neighbours,
    Request,
    Tensor,
)
from accordion_hvd.ops.spec import ITEMSIZE

Program = Generator[Any, Any, list[Any]]

_SMALL = ("int8", "uint8", "int16", "uint16")
"""Integers that engines do not add everywhere (Horovod's for PyTorch: none of them)."""

_APART = 1 << 18  # bytes from which a tensor is not worth copying into a common buffer


def together(communicator: Collectives, requests: Sequence[Request]) -> list[list[int]]:
    """Positions of requests that can share a collective, in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(_key(communicator, request), []).append(i)
    return list(groups.values())


def program(communicator: Collectives, traffic: Traffic, name: str, requests: list[Any]) -> Program:
    """Return the program that serves `requests`, all of one kind; count bytes in `traffic`."""
    kind = _key(communicator, requests[0])[0]
    return _PROGRAMS[kind](communicator, traffic, name, requests)


def _key(communicator: Collectives, request: Request) -> tuple[Any, ...]:
    """Return the key that requests in one collective share; its first entry names the program."""
    if not isinstance(request, Request):
        raise TypeError(f"a conversation yielded {request!r}, which is no request.")
    group = request.group
    if isinstance(request, Allreduce):
        if group is not None and len(group) == 1:
            return "alone", group
        dtype = request.wire or communicator.xp.dtype(request.tensor)
        half = dtype in ("float16", "bfloat16") and request.op == "mean"
        if half and not (communicator.native_fp16_allreduce and dtype == "float16"):
            return "half", dtype, group
        if dtype in _SMALL and request.op == "sum":
            return "small", dtype, group
        return "reduce", dtype, request.op, group
    if isinstance(request, Allgather):
        return ("uneven" if request.uneven else "gather"), group
    if isinstance(request, Broadcast):
        return "broadcast", request.root, group
    if isinstance(request, Alltoall):
        return ("alltoall" if request.splits is None else "shares"), group
    if isinstance(request, Neighbours):
        return "neighbours", request.to, request.of
    raise TypeError(f"{type(request).__name__} is a request that no program serves.")


def _count(
    communicator: Collectives,
    traffic: Traffic,
    requests: Sequence[Request],
    gathered: Sequence[int] | None = None,
) -> None:
    for i, request in enumerate(requests):
        ranks = communicator.ranks(request.group)
        cost = traffic_of(request, ranks, gathered[i] if gathered else None)
        if communicator.within_host(request.group):
            cost.within = cost.sent
        traffic.add(cost)


def _alone(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allreduce]
) -> Program:
    """Groups of one, of which no engine needs to know."""
    return [request.tensor for request in requests]
    yield


def _reduce(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allreduce]
) -> Program:
    """Large tensors as they are, small ones in one buffer, all in one operation."""
    _count(communicator, traffic, requests)
    xp = communicator.xp
    sent = [_as_wire(xp, request) for request in requests]
    large = [i for i, x in enumerate(sent) if _elements(xp, x) * 4 >= _APART or len(sent) == 1]
    small = [i for i in range(len(sent)) if i not in set(large)]
    buffers = [
        sent[i] if requests[i].reuse or requests[i].wire else xp.copy(sent[i]) for i in large
    ]
    if small:
        buffers.append(xp.concat([xp.reshape(sent[i], (-1,)) for i in small]))
    first = requests[0]
    buffers = yield communicator.allreduce(name, buffers, first.op, first.group)
    results: list[Any] = [None] * len(sent)
    for i, result in zip(large, buffers, strict=False):
        results[i] = xp.cast(result, xp.dtype(requests[i].tensor))
    if small:
        parts = xp.split(buffers[-1], [_elements(xp, sent[i]) for i in small])
        for i, part in zip(small, parts, strict=True):
            shaped = xp.reshape(part, xp.shape(sent[i]))
            results[i] = xp.cast(shaped, xp.dtype(requests[i].tensor))
    return results


def _reduce_half(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allreduce]
) -> Program:
    """Average 16-bit floats: send parts to their owners, add them there in fp32, gather the means.

    As many bytes as a ring allreduce, and exact where the engine's own addition is missing (bf16)
    or scalar and slow (fp16 over Gloo). Parts are added in rank order.
    """
    _count(communicator, traffic, requests)
    xp, group = communicator.xp, requests[0].group
    ranks = communicator.ranks(group)
    tensors = [request.tensor for request in requests]
    wire = requests[0].wire or xp.dtype(tensors[0])
    part = -(-sum(_elements(xp, tensor) for tensor in tensors) // ranks)
    kept = communicator.scratch
    flat = xp.to_wire(tensors, wire, part * ranks, kept.get(name) if kept else None)
    if kept is not None:
        kept[name] = flat
    theirs = yield communicator.alltoall(f"{name}.parts", flat, group)
    mean = xp.mean_of_wire(theirs, wire, ranks)
    del theirs, flat  # or they would stay until the rest has arrived
    flat = yield communicator.allgather(f"{name}.means", mean, group)
    likes = [r.tensor if r.reuse else xp.copy(r.tensor) for r in requests]
    return xp.from_wire(flat, wire, likes)


def _reduce_small(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allreduce]
) -> Program:
    """Sums of small integers, which wrap around: parts to their owners, added there, and back.

    As many bytes as a ring allreduce.
    """
    _count(communicator, traffic, requests)
    xp, group = communicator.xp, requests[0].group
    ranks, kind = communicator.ranks(group), xp.dtype(requests[0].tensor)
    sizes = [_elements(xp, request.tensor) for request in requests]
    part = -(-sum(sizes) // ranks)
    flat = xp.concat([xp.reshape(request.tensor, (-1,)) for request in requests])
    flat = xp.to_bytes(xp.pad_last(flat, part * ranks))
    theirs = yield communicator.alltoall(f"{name}.parts", flat, group)
    rows = xp.unstack(xp.from_bytes(theirs, kind, (ranks, part)))
    total = sum(rows[1:], rows[0])
    flat = yield communicator.allgather(f"{name}.sums", xp.to_bytes(total), group)
    _compare_sizes(xp, flat, xp.shape(xp.to_bytes(total))[0] * ranks, name)
    pieces = xp.split(xp.from_bytes(flat, kind, (-1,)), [*sizes, part * ranks - sum(sizes)])
    shaped = zip(pieces, requests, strict=False)
    return [xp.reshape(piece, xp.shape(request.tensor)) for piece, request in shaped]


def _gather(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allgather]
) -> Program:
    """Everything as bytes in one operation of known size."""
    _count(communicator, traffic, requests)
    xp, group = communicator.xp, requests[0].group
    ranks = communicator.ranks(group)
    sent, sizes = _as_bytes(xp, requests)
    flat = yield communicator.allgather(name, sent, group)
    _compare_sizes(xp, flat, sum(sizes) * ranks, name)
    pieces = xp.split(flat, sizes * ranks)
    return _by_request(xp, pieces, requests)


def _gather_uneven(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allgather]
) -> Program:
    """Sizes first, then everything as bytes."""
    xp, group = communicator.xp, requests[0].group
    ranks = communicator.ranks(group)
    sent, sizes = _as_bytes(xp, requests)
    mine = xp.asarray(np.array(sizes, np.int64), xp.device(sent))
    table = yield communicator.allgather(f"{name}.sizes", xp.to_bytes(mine), group)
    table = xp.to_numpy(xp.from_bytes(table, "int64", (ranks, len(sizes))))
    _count(communicator, traffic, requests, [int(total) for total in table.sum(0)])
    flat = yield communicator.allgather(name, sent, group)
    _compare_sizes(xp, flat, int(table.sum()), name)
    pieces = xp.split(flat, [int(size) for size in table.reshape(-1)])
    return _by_request(xp, pieces, requests)


def _compare_sizes(xp: ModuleType, flat: Tensor, due: int, name: str) -> None:
    came = xp.shape(flat)[0]
    if came is not None and came != due:
        raise check.PayloadError(
            f"the ranks have sent {came} bytes together in {name!r}, where {due} were due: some "
            "rank's payload has another size than it should."
        )


def _as_bytes(xp: ModuleType, requests: Sequence[Request]) -> tuple[Tensor, list[int]]:
    """Return the bytes of all tensors, concatenated, and the number of bytes of each."""
    parts = [xp.to_bytes(request.tensor) for request in requests]
    sizes = [_elements(xp, part) for part in parts]
    return parts[0] if len(parts) == 1 else xp.concat(parts), sizes


def _like(xp: ModuleType, request: Request, piece: Tensor) -> Tensor:
    shape = xp.shape(request.tensor)
    if isinstance(request, Allgather) and request.uneven:
        shape = (-1, *shape[1:])
    return xp.from_bytes(piece, xp.dtype(request.tensor), shape)


def _by_request(
    xp: ModuleType, pieces: Sequence[Tensor], requests: Sequence[Request]
) -> list[tuple[Tensor, ...]]:
    """Return the received tensors: one tuple per request, in rank order."""
    return [
        tuple(_like(xp, request, piece) for piece in pieces[i :: len(requests)])
        for i, request in enumerate(requests)
    ]


def _broadcast(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Broadcast]
) -> Program:
    _count(communicator, traffic, requests)
    xp, first = communicator.xp, requests[0]
    sent, sizes = _as_bytes(xp, requests)
    flat = yield communicator.broadcast(name, sent, first.root, first.group)
    pieces = zip(requests, xp.split(flat, sizes), strict=True)
    return [_like(xp, request, piece) for request, piece in pieces]


def _alltoall(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Alltoall]
) -> Program:
    """Row by row, the bytes of all requests side by side."""
    _count(communicator, traffic, requests)
    xp, group = communicator.xp, requests[0].group
    if len(requests) == 1:  # large ones are alone: no copies
        flat = yield communicator.alltoall(name, xp.to_bytes(requests[0].tensor), group)
        return [_like(xp, requests[0], flat)]
    ranks = communicator.ranks(group)
    rows = [xp.reshape(xp.to_bytes(request.tensor), (ranks, -1)) for request in requests]
    widths = [xp.shape(row)[1] for row in rows]
    flat = xp.concat([xp.reshape(row[peer], (-1,)) for peer in range(ranks) for row in rows])
    flat = yield communicator.alltoall(name, flat, group)
    pieces = xp.split(flat, widths * ranks)
    return [
        _like(xp, request, xp.concat(pieces[i :: len(rows)])) for i, request in enumerate(requests)
    ]


def _shares(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Alltoall]
) -> Program:
    """Run one operation per request, which also returns the number of rows from each rank."""
    xp, group = communicator.xp, requests[0].group
    members = range(communicator.size) if group is None else group
    mine, results = list(members).index(communicator.rank), []
    for i, request in enumerate(requests):
        shape, splits = xp.shape(request.tensor), list(request.splits or ())
        if len(splits) != len(members) or sum(splits) != shape[0]:
            raise ValueError(
                f"splits {splits} do not deal {shape[0]} rows to {len(members)} ranks."
            )
        dtype = xp.dtype(request.tensor)
        width = ITEMSIZE[dtype] * math.prod(shape[1:])
        rows = xp.reshape(xp.to_bytes(request.tensor), (shape[0], width))
        came, counts = yield communicator.alltoall(f"{name}.{i}", rows, group, splits)
        sent, received = (width * (sum(x) - x[mine]) for x in (splits, counts))
        near = communicator.within_host(group)
        traffic.add(Traffic(width * sum(splits), sent, received, sent if near else 0.0))
        results.append(
            tuple(
                xp.from_bytes(xp.reshape(piece, (-1,)), dtype, (count, *shape[1:]))
                for piece, count in zip(xp.split(came, counts), counts, strict=True)
            )
        )
    return results


def _neighbours(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Neighbours]
) -> Program:
    """Send the concatenated bytes of all requests to each neighbour, as uneven shares."""
    _count(communicator, traffic, requests)
    xp, first = communicator.xp, requests[0]
    mine, sizes = _as_bytes(xp, requests)
    splits = [sum(sizes) if rank in first.to else 0 for rank in range(communicator.size)]
    sent = xp.concat([mine] * len(first.to)) if first.to else mine[:0]
    came, _ = yield communicator.alltoall(name, sent, None, splits)
    _compare_sizes(xp, came, sum(sizes) * len(first.of), name)
    counts = [sum(sizes) if rank in first.of else 0 for rank in range(communicator.size)]
    theirs = xp.split(came, counts)
    pieces = [piece for rank in first.of for piece in xp.split(theirs[rank], sizes)]
    return _by_request(xp, pieces, requests)


_PROGRAMS: dict[str, Callable[..., Program]] = {
    "alone": _alone,
    "reduce": _reduce,
    "half": _reduce_half,
    "small": _reduce_small,
    "gather": _gather,
    "uneven": _gather_uneven,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "shares": _shares,
    "neighbours": _neighbours,
}


def _elements(xp: ModuleType, tensor: Tensor) -> int:
    return math.prod(xp.shape(tensor))


def _as_wire(xp: ModuleType, request: Allreduce) -> Tensor:
    return xp.cast(request.tensor, request.wire) if request.wire else request.tensor
