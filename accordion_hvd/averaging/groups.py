"""Dynamic grouping: the groups of each step in WAGMA-SGD (Li et al., TPDS 2021)."""

from __future__ import annotations

import functools
import math

from accordion_hvd import check
from accordion_hvd.averaging.base import RankGroup

_EXTRA = 4  # number of cycle lengths to try beyond the shortest


class Groups:
    """Disjoint groups that change from step to step, so that every model reaches every rank.

    The ranks form a row, which is cut into groups. Before the next step, the row is reordered like
    dealt cards: first the first members of all groups, then the second members, and so on. If
    `size` and `group_size` are powers of two, this is the paper's rule: the partners of rank p at
    step t are p XOR the masks 2^((t s + i) mod d), i < s, for groups of 2^s ranks out of 2^d.

    The paper covers powers of two only. Dealing (ours) works for all numbers, with groups whose
    sizes differ by at most one and do not exceed `group_size`. The exception is an odd number of
    ranks in pairs: one group has three ranks, because no rank may be alone.

    Args:
        group_size: number of ranks that average together, from 1 to `size`.

    Attributes:
        sizes: number of ranks in each group, the larger ones first.
        cycle: number of steps after which the groups repeat.
        reach: number of steps after which every model has reached every rank; None for groups of
            one rank. With s ranks in the smallest group, this is ceil(log size / log s) for powers
            of two, and at most two steps more for other numbers.
    """

    def __init__(self, size: int, group_size: int) -> None:
        check.integer("Groups", "size", size, least=1)
        check.integer("Groups", "group_size", group_size, least=1, most=size)
        self.size, self.group_size = size, group_size
        self.sizes = _sizes(size, group_size)
        self._cycle = _best_cycle(size, group_size)
        self.cycle = len(self._cycle)
        self._group_of = [{r: g for g in partition for r in g} for partition in self._cycle]

    @functools.cached_property
    def reach(self) -> int | None:
        return _worst(self.size, self._cycle) if self.group_size > 1 or self.size == 1 else None

    def at(self, step: int) -> tuple[RankGroup, ...]:
        """Return all groups of a step. Each lists its ranks in ascending order."""
        return self._cycle[step % self.cycle]

    def of(self, rank: int, step: int) -> RankGroup:
        return self._group_of[step % self.cycle][rank]

    def all(self) -> tuple[RankGroup, ...]:
        """Return all distinct groups of all steps."""
        return tuple(dict.fromkeys(group for partition in self._cycle for group in partition))


def default_size(size: int) -> int:
    """Return about the square root of the number of ranks, as in the paper.

    The result for a power of two is a power of two.
    """
    if size & (size - 1) == 0:
        return 1 << -(-(size.bit_length() - 1) // 2)
    return math.isqrt(size - 1) + 1


def _sizes(size: int, group_size: int) -> tuple[int, ...]:
    count = -(-size // group_size)
    if group_size > 1 and size // count < 2:
        count = max(1, size // 2)
    least, larger = divmod(size, count)
    return (least + 1,) * larger + (least,) * (count - larger)


def _partitions(size: int, group_size: int, count: int) -> list[tuple[RankGroup, ...]]:
    row, sizes, partitions = list(range(size)), _sizes(size, group_size), []
    for _ in range(count):
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        groups = [row[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        partitions.append(tuple(tuple(sorted(group)) for group in groups))
        row = [g[i] for i in range(sizes[0]) for g in groups if i < len(g)]
    return partitions


@functools.lru_cache(maxsize=64)
def _best_cycle(size: int, group_size: int) -> list[tuple[RankGroup, ...]]:
    """Return the shortest cycle of partitions with the best reach when it repeats."""
    smallest = min(_sizes(size, group_size))
    if smallest == 1:
        return _partitions(size, group_size, 1)
    shortest = steps_needed(size, smallest)
    if (size & (size - 1)) == 0 and (group_size & (group_size - 1)) == 0:
        bits, group_bits = size.bit_length() - 1, group_size.bit_length() - 1
        return _partitions(size, group_size, bits // math.gcd(bits, group_bits))
    partitions = _partitions(size, group_size, shortest + _EXTRA)
    candidates = [partitions[:length] for length in range(1, len(partitions) + 1)]
    return min(candidates, key=lambda cycle: _worst(size, cycle))


def steps_needed(size: int, group_size: int) -> int:
    """Return ceil(log size / log group_size), a lower bound on the number of steps."""
    steps, reached = 0, 1
    while reached < size:
        steps, reached = steps + 1, reached * group_size
    return steps


def _worst(size: int, cycle: list[tuple[RankGroup, ...]]) -> int:
    return max(_reach(size, cycle, start) for start in range(len(cycle)))


def _reach(size: int, cycle: list[tuple[RankGroup, ...]], start: int) -> int:
    """Return the steps from `start` until every rank has received every rank's model.

    A bit set per rank records the ranks whose models it has received.
    """
    received, all_ranks = [1 << rank for rank in range(size)], (1 << size) - 1
    for step in range(4 * size):
        if all(ranks == all_ranks for ranks in received):
            return step
        for group in cycle[(start + step) % len(cycle)]:
            union = functools.reduce(int.__or__, (received[rank] for rank in group))
            for rank in group:
                received[rank] = union
    return 4 * size  # with these partitions, some models never reach all ranks
