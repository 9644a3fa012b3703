"""Plans: buckets that share a call, and calls that leave together; equal on all ranks.

Small buckets that the same compressor serves share one conversation (a *batch*), so that a thousand
layers cost little more than ten of the same bytes. BucketBatches whose first requests leave
together, as
soon as all their gradients are there, are a *group*. What happens to be ready at a time would be no
guide: it differs between ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from accordion_hvd.engine.buckets import Bucket

SMALL = 1 << 16
"""Elements up to which a bucket shares a conversation: copying them costs less than one more."""

LEAST, MOST, PARTS = 1 << 18, 8 << 20, 4
"""A group has a `PARTS`-th of a step's bytes, but at least `LEAST` and at most `MOST` of them."""


@dataclass(frozen=True)
class BucketBatch:
    """Buckets that share a conversation.

    Attributes:
        buckets: their positions.
        members: positions of their tensors in the exchange's list, bucket by bucket.
        stacked: "alike": along a new first dimension; "any": flattened into one vector; "" for a
            single bucket in its own shape.
    """

    buckets: tuple[int, ...]
    members: tuple[int, ...]
    stacked: str = ""


@dataclass(frozen=True)
class Plan:
    """BucketBatches and groups.

    Attributes:
        batches: all of them; each bucket is in one.
        groups: positions of batches whose requests leave together.
        batch_of: tensor number -> position of its batch.
    """

    batches: tuple[BucketBatch, ...]
    groups: tuple[tuple[int, ...], ...]
    batch_of: dict[int, int]


def make_plan(
    buckets: Sequence[Bucket],
    alike: Sequence[tuple[str, Hashable]],
    payloads: Sequence[float],
    limit: float | None = None,
) -> Plan:
    """Cut `buckets`, in the order in which their gradients are expected, into batches and groups.

    Args:
        buckets: what is exchanged.
        alike: how each bucket may be stacked (`Compressor.batching`), and what else it must have in
            common with others besides its shape.
        payloads: for each bucket, about how many bytes its first requests have.
        limit: bytes after which a group is closed; by default a part of all of them.
    """
    if limit is None:
        limit = min(max(sum(payloads) / PARTS, LEAST), MOST)
    batches: list[BucketBatch] = []
    groups = []
    for group in make_groups(payloads, limit):
        first = len(batches)
        batches += _batches(buckets, alike, group)
        groups.append(tuple(range(first, len(batches))))
    batch_of = {member: i for i, batch in enumerate(batches) for member in batch.members}
    return Plan(tuple(batches), tuple(groups), batch_of)


def make_groups(payloads: Sequence[float], limit: float) -> list[list[int]]:
    """Positions, in order, in groups of at most about `limit` bytes."""
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
    buckets: Sequence[Bucket], alike: Sequence[tuple[str, Hashable]], group: Sequence[int]
) -> list[BucketBatch]:
    shared: dict[Hashable, list[int]] = {}
    for i in group:
        stacked, common = alike[i]
        key: Hashable = (i,)
        if stacked and buckets[i].size <= SMALL:
            key = (stacked, common, buckets[i].shape if stacked == "alike" else None)
        shared.setdefault(key, []).append(i)
    return [_batch(buckets, chosen, alike[chosen[0]][0]) for chosen in shared.values()]


def _batch(buckets: Sequence[Bucket], chosen: list[int], stacked: str) -> BucketBatch:
    members = tuple(member for i in chosen for member in buckets[i].members)
    return BucketBatch(tuple(chosen), members, stacked if len(chosen) > 1 else "")
