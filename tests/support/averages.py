"""An oracle for wait-avoiding averaging, computed in plain loops from the ranks' logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from accordion_hvd.averaging.groups import Groups

Array = np.ndarray
Log = Sequence[tuple[int, bool, int]]
"""One rank's averages: (version, whether all ranks average, label of the contributed model)."""


def tree(rows: list[Array]) -> Array:
    """Return the sum of the rows, with the additions in the order of `engine.group_protocol`.

    Each pass adds up groups of neighbours. The size of the groups is the largest divisor of the
    number of rows up to 8, or else its smallest prime factor.
    """
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
    """Return each rank's correct models after each version.

    Args:
        groups: the groups that average models at each version.
        logs: the log of each rank.
        update: function of (rank, step) that returns the rank's update of its model in that step.
        first: initial model of all ranks.
        extra: versions in which all ranks average without taking a step before.
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
    """Return descriptions of the errors in the ranks' logs; [] if there are none.

    A rank must take its versions in order. A contributed model must not be newer than the version
    that it contributes to, nor older than the last average of all ranks or than `period` allows.
    To an average of all ranks, each rank must contribute its newest model.
    """
    found = []
    for rank, log in enumerate(logs):
        if [version for version, _, _ in log] != list(range(len(logs[0]))):
            found.append(f"rank {rank} did not take its versions in order")
        latest = -1  # version of the last average of all ranks
        for version, whole, label in log:
            if label > version or label < latest:
                found.append(f"rank {rank} gave version {label} of its model for {version}")
            if version - label > period - 1:
                found.append(f"rank {rank} lagged by {version - label} at {version}")
            if whole and label != version:
                found.append(f"rank {rank} gave an old model to the average of all at {version}")
            latest = version if whole else latest
    return found
