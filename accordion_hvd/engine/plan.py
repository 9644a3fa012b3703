"""Plans of bucket batches and fusion groups; equal on all ranks.

Small buckets that the same compressor serves form a *bucket batch*, which shares one call of
`exchange`, so that a thousand layers cost little more than ten layers of the same total size.
Bucket batches whose first requests are launched together, as soon as all their gradients are ready,
form a *fusion group*. Readiness order cannot define the groups: it differs between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_hvd.engine.buckets import Bucket
from accordion_hvd.ops.spec import on_cpu


@dataclass(frozen=True)
class Limits:
    """Sizes that bound bucket batches and fusion groups.

    Attributes:
        stacked: largest bucket in a batch, in elements: up to this size, copying costs less than
            another call.
        least, most: bounds of a fusion group in bytes; between them, it has 1 / `PARTS` of a step.
    """

    stacked: float
    least: float
    most: float


PARTS = 4
CPU = Limits(1 << 16, 1 << 18, 8 << 20)
ACCELERATOR = Limits(math.inf, 1 << 20, 1 << 28)
"""A kernel's launch costs as much as copying a megabyte."""


def limits_of(device: Any) -> Limits:
    return CPU if on_cpu(device) else ACCELERATOR


@dataclass(frozen=True)
class BucketBatch:
    """Like buckets whose tensors share one call of `exchange`.

    Attributes:
        buckets: positions of the buckets.
        members: positions of their tensors in the exchange's list, bucket by bucket.
        stacked: layout: "alike" if the tensors are stacked along a new first dimension, "any" if
            they are flattened into one vector, "" for a single bucket in its own shape.
    """

    buckets: tuple[int, ...]
    members: tuple[int, ...]
    stacked: str = ""


@dataclass(frozen=True)
class Plan:
    """Bucket batches and fusion groups.

    Attributes:
        batches: all bucket batches; each bucket belongs to one.
        groups: fusion groups, each as positions of bucket batches.
        batch_of: position of the bucket batch of each tensor, by the tensor's number.
    """

    batches: tuple[BucketBatch, ...]
    groups: tuple[tuple[int, ...], ...]
    batch_of: dict[int, int]


def make_plan(
    buckets: Sequence[Bucket],
    alike: Sequence[tuple[str, Hashable]],
    payloads: Sequence[float],
    limit: float | None = None,
    device: Any = None,
) -> Plan:
    """Divide `buckets` into bucket batches and fusion groups.

    Args:
        buckets: all buckets, in the order in which their gradients are expected.
        alike: for each bucket, its layout in a batch (`Compressor.batching`) and a key; buckets of
            a batch have equal keys.
        payloads: approximate bytes of each bucket's first requests.
        limit: size in bytes at which a fusion group is closed. Default: 1 / `PARTS` of all
            payloads, between `limits.least` and `limits.most`.
        device: device of the tensors.
    """
    limits = limits_of(device)
    if limit is None:
        limit = min(max(sum(payloads) / PARTS, limits.least), limits.most)
    batches: list[BucketBatch] = []
    groups = []
    for group in make_groups(payloads, limit):
        first = len(batches)
        batches += _batches(buckets, alike, group, limits.stacked)
        groups.append(tuple(range(first, len(batches))))
    batch_of = {member: i for i, batch in enumerate(batches) for member in batch.members}
    return Plan(tuple(batches), tuple(groups), batch_of)


def make_groups(payloads: Sequence[float], limit: float) -> list[list[int]]:
    """Divide the positions of `payloads`, in order, into groups of at most about `limit` bytes."""
    groups: list[list[int]] = [[]]
    filled = 0.0
    for position, payload in enumerate(payloads):
        if groups[-1] and filled + payload > limit:
            groups.append([])
            filled = 0.0
        groups[-1].append(position)
        filled += payload
    return [group for group in groups if group]


def _batches(
    buckets: Sequence[Bucket], alike: Sequence[tuple[str, Hashable]], group: Sequence[int],
    largest: float,
) -> list[BucketBatch]:  # fmt: skip
    shared: dict[Hashable, list[int]] = {}
    for i in group:
        stacked, common = alike[i]
        key: Hashable = (i,)
        if stacked and buckets[i].size <= largest:
            key = (stacked, common, buckets[i].shape if stacked == "alike" else None)
        shared.setdefault(key, []).append(i)
    return [_batch(buckets, chosen, alike[chosen[0]][0]) for chosen in shared.values()]


def _batch(buckets: Sequence[Bucket], chosen: list[int], stacked: str) -> BucketBatch:
    members = tuple(member for i in chosen for member in buckets[i].members)
    return BucketBatch(tuple(chosen), members, stacked if len(chosen) > 1 else "")
