"""Packing of requests that are launched together into as few collectives as possible.

Each program is a generator that serves requests of one kind: it yields handles of the engine's
operations, receives their results, and returns one result per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.collectives import Collectives, Traffic, traffic_of
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Neighbours,
    Request,
    Tensor,
)
from accordion_hvd.ops import on_cpu
from accordion_hvd.ops.spec import ITEMSIZE

Collecting = Generator[Any, Any, list[Any]]

_SMALL_INTEGERS = ("int8", "uint8", "int16", "uint16")
"""Integers that some engines cannot add (Horovod for PyTorch: none of them)."""

_LARGE = {True: 1 << 18, False: 1 << 22}
"""Whether on a CPU -> bytes from which a tensor is not worth copying into a common buffer."""

MessageKind = tuple[Any, ...]
"""What requests in one collective share; the first entry names the program."""


def together(
    communicator: Collectives, requests: Sequence[Request]
) -> list[tuple[MessageKind, list[int]]]:
    groups: dict[MessageKind, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(key(communicator, request), []).append(i)
    return list(groups.items())


def program(
    communicator: Collectives, traffic: Traffic, name: str, kind: MessageKind, requests: list[Any]
) -> Collecting:
    """Return the program of a message kind; it adds the bytes of the requests to `traffic`."""
    if kind[0] in _COUNTING:
        return _COUNTING[kind[0]](communicator, traffic, name, requests)
    if kind[0] != "single":
        count(communicator, traffic, requests)
    return _PROGRAMS[kind[0]](communicator, name, requests)


def key(communicator: Collectives, request: Request) -> MessageKind:
    if not isinstance(request, Request):
        raise TypeError(f"an exchange generator yielded {request!r}, but must yield requests.")
    group = request.group
    if isinstance(request, Allreduce):
        if group is not None and len(group) == 1:
            return "single", group
        dtype = request.wire or communicator.xp.dtype(request.tensor)
        native = {
            "float16": communicator.native_fp16_allreduce,
            "bfloat16": communicator.native_bf16_allreduce,
        }
        if request.op == "mean" and not native.get(dtype, True):  # None: not measured yet
            return "half", dtype, group
        if request.wire:
            return "wire", dtype, group
        if dtype in _SMALL_INTEGERS and request.op == "sum":
            return "small", dtype, group
        return "reduce", dtype, request.op, group
    if isinstance(request, Allgather):
        return ("uneven" if request.uneven else "gather"), group
    if isinstance(request, Broadcast):
        return "broadcast", request.root, group
    if isinstance(request, Alltoall):
        return ("alltoall" if request.splits is None else "splits"), group
    if isinstance(request, Neighbours):
        return "neighbours", request.to, request.of
    raise TypeError(f"requests of type {type(request).__name__} are not supported.")


def count(
    communicator: Collectives,
    traffic: Traffic,
    requests: Sequence[Request],
    gathered: int | None = None,
) -> None:
    """Add the bytes of requests in one collective to `traffic`.

    Args:
        gathered: for uneven allgathers, the total bytes of all ranks' tensors.
    """
    group = requests[0].group  # requests in one collective share it
    ranks = communicator.size if group is None else len(group)
    cost = traffic_of(requests, ranks, gathered, communicator.xp)
    if communicator.hosts and communicator.within_host(group):
        cost.within = cost.sent
    traffic.add(cost)


def _single(communicator: Collectives, name: str, requests: list[Allreduce]) -> Collecting:
    return [request.tensor for request in requests]
    yield  # which makes it a generator


def _reduce(communicator: Collectives, name: str, requests: list[Allreduce]) -> Collecting:
    xp = communicator.xp
    tensors = [request.tensor for request in requests]
    sizes = [_elements(xp, x) for x in tensors]
    least = _LARGE[on_cpu(xp.device(tensors[0]))]
    large = [i for i, size in enumerate(sizes) if size * 4 >= least or len(tensors) == 1]
    small = sorted(set(range(len(tensors))) - set(large))
    # The engine overwrites its buffers. Small tensors share one, which costs a copy of each.
    buffers = [tensors[i] if requests[i].reuse else xp.copy(tensors[i]) for i in large]
    if small:
        buffers.append(xp.concat([xp.reshape(tensors[i], (-1,)) for i in small]))
    first = requests[0]
    buffers = yield communicator.allreduce(name, buffers, first.op, first.group)
    results: list[Any] = [None] * len(tensors)
    # The last buffer may be that of the small tensors.
    for i, result in zip(large, buffers, strict=False):
        results[i] = result
    if small:
        parts = xp.split(buffers[-1], [sizes[i] for i in small])
        for i, part in zip(small, parts, strict=True):
            results[i] = xp.reshape(part, xp.shape(tensors[i]))
    return results


def _reduce_wire(communicator: Collectives, name: str, requests: list[Allreduce]) -> Collecting:
    """Average 16-bit floats in one buffer, by the engine's own allreduce."""
    xp = communicator.xp
    wire = requests[0].wire or xp.dtype(requests[0].tensor)
    length = sum(_elements(xp, request.tensor) for request in requests)
    sent = xp.from_bytes(_to_wire(communicator, name, requests, wire, length), wire, (-1,))
    (mean,) = yield communicator.allreduce(name, [sent], "mean", requests[0].group)
    return xp.from_wire(xp.to_bytes(mean), wire, _places(xp, requests))


def _reduce_half(communicator: Collectives, name: str, requests: list[Allreduce]) -> Collecting:
    """Average 16-bit floats by an alltoall of parts, a mean of each part in fp32, an allgather.

    This sends as many bytes as a ring allreduce, and is exact. The engine's own addition is
    missing for bf16, and scalar and slow for fp16 over Gloo. Parts are added in rank order.
    """
    xp, group = communicator.xp, requests[0].group
    ranks = communicator.ranks(group)
    wire = requests[0].wire or xp.dtype(requests[0].tensor)
    part = -(-sum(_elements(xp, request.tensor) for request in requests) // ranks)
    flat = _to_wire(communicator, name, requests, wire, part * ranks)
    received = yield communicator.alltoall(f"{name}.parts", flat, group)
    size = xp.shape(flat)[0]
    _compare_sizes(xp, received, size, name)
    mean = xp.mean_of_wire(received, wire, ranks)
    del received, flat  # frees their memory before the means arrive
    flat = yield communicator.allgather(f"{name}.means", mean, group)
    _compare_sizes(xp, flat, size, name)
    return xp.from_wire(flat, wire, _places(xp, requests))


def _reduce_small(communicator: Collectives, name: str, requests: list[Allreduce]) -> Collecting:
    """Add 8-bit and 16-bit integers, which wrap around, by an alltoall of parts and an allgather.

    This sends as many bytes as a ring allreduce.
    """
    xp, group = communicator.xp, requests[0].group
    ranks, kind = communicator.ranks(group), xp.dtype(requests[0].tensor)
    sizes = [_elements(xp, request.tensor) for request in requests]
    part = -(-sum(sizes) // ranks)
    flat = xp.concat([xp.reshape(request.tensor, (-1,)) for request in requests])
    flat = xp.to_bytes(xp.pad_last(flat, part * ranks))
    received = yield communicator.alltoall(f"{name}.parts", flat, group)
    _compare_sizes(xp, received, xp.shape(flat)[0], name)
    rows = xp.unstack(xp.from_bytes(received, kind, (ranks, part)))
    total = sum(rows[1:], rows[0])
    flat = yield communicator.allgather(f"{name}.sums", xp.to_bytes(total), group)
    _compare_sizes(xp, flat, xp.shape(xp.to_bytes(total))[0] * ranks, name)
    pieces = xp.split(xp.from_bytes(flat, kind, (-1,)), [*sizes, part * ranks - sum(sizes)])
    shaped = zip(pieces, requests, strict=False)
    return [xp.reshape(piece, xp.shape(request.tensor)) for piece, request in shaped]


def _gather(communicator: Collectives, name: str, requests: list[Allgather]) -> Collecting:
    xp, group = communicator.xp, requests[0].group
    ranks = communicator.ranks(group)
    sent, sizes = _as_bytes(xp, requests)
    flat = yield communicator.allgather(name, sent, group)
    _compare_sizes(xp, flat, sum(sizes) * ranks, name)
    return _by_request(xp, xp.split(flat, sizes * ranks), requests)


def _gather_uneven(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Allgather]
) -> Collecting:
    xp, group = communicator.xp, requests[0].group
    ranks = communicator.ranks(group)
    sent, sizes = _as_bytes(xp, requests)
    row = xp.asarray(np.array(sizes, np.int64), xp.device(sent))
    # Sizes first: the result is cut by them, and torch.distributed must know them to pad.
    table = yield communicator.allgather(f"{name}.sizes", xp.to_bytes(row), group)
    _compare_sizes(xp, table, 8 * ranks * len(sizes), name)
    table = xp.to_numpy(xp.from_bytes(table, "int64", (ranks, len(sizes))))
    negative = np.flatnonzero((table < 0).any(1)).tolist()
    if negative:
        check.refuse_payload(negative, "a size is negative")
    count(communicator, traffic, requests, int(table.sum()))
    lengths = [int(length) for length in table.sum(1)]
    flat = yield communicator.allgather(name, sent, group, lengths)
    _compare_sizes(xp, flat, sum(lengths), name)
    pieces = xp.split(flat, [int(size) for size in table.reshape(-1)])
    return _by_request(xp, pieces, requests)


def _compare_sizes(xp: ModuleType, flat: Tensor, expected: int | None, name: str) -> None:
    size = xp.shape(flat)[0]  # None: unknown in a graph
    if size != expected and None not in (size, expected):
        raise check.PayloadError(
            f"the payloads received in {name!r} have {size} bytes, but {expected} were expected: "
            "the payload of at least one rank has a wrong size."
        )


def _as_bytes(xp: ModuleType, requests: Sequence[Request]) -> tuple[Tensor, list[int]]:
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
    return [
        # Pieces are all of the first rank, then all of the second one, ...
        tuple(_like(xp, request, piece) for piece in pieces[i :: len(requests)])
        for i, request in enumerate(requests)
    ]


def _broadcast(communicator: Collectives, name: str, requests: list[Broadcast]) -> Collecting:
    xp, first = communicator.xp, requests[0]
    sent, sizes = _as_bytes(xp, requests)
    flat = yield communicator.broadcast(name, sent, first.root, first.group)
    _compare_sizes(xp, flat, sum(sizes), name)
    pieces = zip(requests, xp.split(flat, sizes), strict=True)
    return [_like(xp, request, piece) for request, piece in pieces]


def _alltoall(communicator: Collectives, name: str, requests: list[Alltoall]) -> Collecting:
    xp, group = communicator.xp, requests[0].group
    if len(requests) == 1:  # without copies, since a single request may be large
        sent = xp.to_bytes(requests[0].tensor)
        flat = yield communicator.alltoall(name, sent, group)
        _compare_sizes(xp, flat, xp.shape(sent)[0], name)
        return [_like(xp, requests[0], flat)]
    ranks = communicator.ranks(group)
    rows = [xp.reshape(xp.to_bytes(request.tensor), (ranks, -1)) for request in requests]
    widths = [xp.shape(row)[1] for row in rows]
    flat = xp.concat([xp.reshape(row[peer], (-1,)) for peer in range(ranks) for row in rows])
    flat = yield communicator.alltoall(name, flat, group)
    _compare_sizes(xp, flat, sum(widths) * ranks, name)
    pieces = xp.split(flat, widths * ranks)
    return [
        _like(xp, request, xp.concat(pieces[i :: len(rows)])) for i, request in enumerate(requests)
    ]


def _alltoall_splits(
    communicator: Collectives, traffic: Traffic, name: str, requests: list[Alltoall]
) -> Collecting:
    xp, group = communicator.xp, requests[0].group
    members = range(communicator.size) if group is None else group
    position, results = list(members).index(communicator.rank), []
    for i, request in enumerate(requests):
        shape, splits = xp.shape(request.tensor), list(request.splits or ())
        if len(splits) != len(members) or sum(splits) != shape[0]:
            raise ValueError(
                f"Alltoall: splits is {splits}, but must be {len(members)} numbers, one per rank, "
                f"whose sum is {shape[0]}, the number of rows."
            )
        dtype = xp.dtype(request.tensor)
        width = ITEMSIZE[dtype] * math.prod(shape[1:])
        rows = xp.reshape(xp.to_bytes(request.tensor), (shape[0], width))
        # One operation per request: rows of different requests differ in width.
        flat, counts = yield communicator.alltoall(f"{name}.{i}", rows, group, splits)
        # A rank's own rows do not travel.
        sent, received = (width * (sum(x) - x[position]) for x in (splits, counts))
        within = sent if communicator.within_host(group) else 0.0
        traffic.add(Traffic(width * sum(splits), sent, received, within))
        results.append(
            tuple(
                xp.from_bytes(xp.reshape(piece, (-1,)), dtype, (count, *shape[1:]))
                for piece, count in zip(xp.split(flat, counts), counts, strict=True)
            )
        )
    return results


def _neighbours(communicator: Collectives, name: str, requests: list[Neighbours]) -> Collecting:
    xp, first = communicator.xp, requests[0]
    packed, sizes = _as_bytes(xp, requests)
    # Not all engines have collectives of neighbours: an alltoall sends nothing to others.
    splits = [sum(sizes) if rank in first.to else 0 for rank in range(communicator.size)]
    sent = xp.concat([packed] * len(first.to)) if first.to else packed[:0]
    flat, _ = yield communicator.alltoall(name, sent, None, splits)
    _compare_sizes(xp, flat, sum(sizes) * len(first.of), name)
    counts = [sum(sizes) if rank in first.of else 0 for rank in range(communicator.size)]
    received = xp.split(flat, counts)
    pieces = [piece for rank in first.of for piece in xp.split(received[rank], sizes)]
    return _by_request(xp, pieces, requests)


_PROGRAMS: dict[str, Callable[..., Collecting]] = {
    "single": _single,
    "reduce": _reduce,
    "wire": _reduce_wire,
    "half": _reduce_half,
    "small": _reduce_small,
    "gather": _gather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "neighbours": _neighbours,
}
_COUNTING: dict[str, Callable[..., Collecting]] = {
    "uneven": _gather_uneven,
    "splits": _alltoall_splits,
}
"""Programs that learn only on the way how many bytes the ranks send, and count them there."""


def _elements(xp: ModuleType, tensor: Tensor) -> int:
    return math.prod(xp.shape(tensor))


def _to_wire(
    communicator: Collectives, name: str, requests: Sequence[Allreduce], wire: str, length: int
) -> Tensor:
    scratch, tensors = communicator.scratch, [request.tensor for request in requests]
    flat = communicator.xp.to_wire(tensors, wire, length, scratch.get(name) if scratch else None)
    if scratch is not None and on_cpu(communicator.xp.device(flat)):
        scratch[name] = flat  # on accelerators, new memory costs nothing, and kept memory does
    return flat


def _places(xp: ModuleType, requests: Sequence[Allreduce]) -> list[Tensor]:
    return [r.tensor if r.reuse else xp.copy(r.tensor) for r in requests]
