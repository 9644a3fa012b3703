"""An oracle for wait-avoiding averages: plain loops over what ranks say they contributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from accordion_hvd.averaging.groups import Groups

Array = np.ndarray
Log = Sequence[tuple[int, bool, int]]
"""Of one rank, version by version: (version, whether all average, label of what it contributed)."""


def tree(rows: list[Array]) -> Array:
    """Up to eight neighbours first, as many as divide their number, or else a prime factor."""
    if len(rows) == 1:
        return rows[0]
    radix = next(r for r in (8, 7, 6, 5, 4, 3, 2, *range(9, 1000)) if len(rows) % r == 0)
    added = []
    for first in range(0, len(rows), radix):
        total = rows[first]
        for row in rows[first + 1 : first + radix]:
            total = total + row
        added.append(total)
    return tree(added)


def replay(
    groups: Groups,
    logs: Sequence[Log],
    update: Callable[[int, int], Array],
    first: Array,
    extra: Sequence[int] = (),
) -> list[list[Array]]:
    """What each rank's model must be after each version.

    Args:
        groups: who averages with whom.
        logs: of each rank.
        update: (rank, step) to what is added to its model at that step.
        first: the model that all start from.
        extra: versions that average all beside the steps, and so have no update.
    """
    ranks = range(groups.size)
    now = [first.copy() for _ in ranks]
    published = [{-1: first.copy()} for _ in ranks]
    found: list[list[Array]] = [[] for _ in ranks]
    step = 0
    for version, (_, whole, _) in enumerate(logs[0]):
        for rank in ranks:
            if version not in extra:
                now[rank] = now[rank] + update(rank, step)
            published[rank][version] = now[rank]
        step += version not in extra
        labels = [logs[rank][version][2] for rank in ranks]
        given = [published[rank][label].copy() for rank, label in zip(ranks, labels, strict=True)]
        fresh = list(now)
        for group in [tuple(ranks)] if whole else groups.at(version):
            total = tree([given[rank] for rank in group])
            for rank in group:
                on_time = labels[rank] == version
                share = total if on_time else fresh[rank] + total
                now[rank] = share / (len(group) + (not on_time))
                if whole:
                    published[rank][version] = now[rank]
        for rank in ranks:
            found[rank].append(now[rank])
    return found


def problems(groups: Groups, period: int, logs: Sequence[Log]) -> list[str]:
    """What is wrong with the versions that ranks contributed, in words."""
    found = []
    for rank, log in enumerate(logs):
        if [version for version, _, _ in log] != list(range(len(logs[0]))):
            found.append(f"rank {rank} did not take its versions in order")
        latest = -1  # what all have averaged last
        for version, whole, label in log:
            if label > version or label < latest:
                found.append(f"rank {rank} gave version {label} of its model for {version}")
            if version - label > period - 1:
                found.append(f"rank {rank} lagged by {version - label} at {version}")
            if whole and label != version:
                found.append(f"rank {rank} gave an old model to the average of all at {version}")
            latest = version if whole else latest
    return found
