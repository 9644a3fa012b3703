"""Dynamic grouping: the groups of each step in WAGMA-SGD (Li et al., TPDS 2021)."""

from __future__ import annotations

import functools
import math

from accordion_hvd import check

Group = tuple[int, ...]
Partition = tuple[Group, ...]
_MORE = 4  # lengths of the cycle that are tried beyond the shortest


class Groups:
    """Disjoint groups that change from step to step until everybody has reached everybody.

    Ranks stand in a row, which is cut into groups; before the next step they are dealt out like
    cards: first the first members of all groups, then the second ones, and so on. If `size` and
    `group_size` are powers of two, that is the paper's rule: the partners of rank p at step t are
    p XOR the masks 2^((t s + i) mod d), i < s, with 2^s ranks a group of 2^d. The paper has no
    other numbers; the dealing is ours and has them all, with groups whose sizes differ by at most
    one and are no larger than `group_size` (of an odd number of ranks in pairs, three are one
    group, as nobody may be left alone).

    Args:
        size: how many ranks there are.
        group_size: how many average with each other, from 1 to `size`.

    Attributes:
        sizes: how many ranks each group has, the larger ones first.
        cycle: steps after which the groups are the same again.
        reach: the number of steps after which every model has reached every rank;
            None if groups have one member. With s ranks in the smallest group that is
            ceil(log size / log s) for powers of two, and at most two steps more for others.
    """

    def __init__(self, size: int, group_size: int) -> None:
        check.integer("Groups", "size", size, least=1)
        check.integer("Groups", "group_size", group_size, least=1, most=size)
        self.size, self.group_size = size, group_size
        self.sizes = _sizes(size, group_size)
        self._cycle = _best_cycle(size, group_size)
        self.cycle = len(self._cycle)
        self._place = [{r: g for g in partition for r in g} for partition in self._cycle]

    @functools.cached_property
    def reach(self) -> int | None:
        """See the class."""
        return _worst(self.size, self._cycle) if self.group_size > 1 or self.size == 1 else None

    def at(self, step: int) -> Partition:
        """Return all groups of a step; each lists its ranks in ascending order."""
        return self._cycle[step % self.cycle]

    def of(self, rank: int, step: int) -> Group:
        """Return the group of a rank, including the rank."""
        return self._place[step % self.cycle][rank]

    def all(self) -> tuple[Group, ...]:
        """Return all groups of all steps, each once."""
        return tuple(dict.fromkeys(group for partition in self._cycle for group in partition))


def default_size(size: int) -> int:
    """Near the root of the number of ranks (the paper's choice); a power of two among such."""
    if size & (size - 1) == 0:
        return 1 << -(-(size.bit_length() - 1) // 2)
    return math.isqrt(size - 1) + 1


def _sizes(size: int, group_size: int) -> tuple[int, ...]:
    count = -(-size // group_size)
    if group_size > 1 and size // count < 2:
        count = max(1, size // 2)
    least, larger = divmod(size, count)
    return (least + 1,) * larger + (least,) * (count - larger)


def _partitions(size: int, group_size: int, count: int) -> list[Partition]:
    row, sizes, found = list(range(size)), _sizes(size, group_size), []
    for _ in range(count):
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        groups = [row[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        found.append(tuple(tuple(sorted(group)) for group in groups))
        row = [g[i] for i in range(sizes[0]) for g in groups if i < len(g)]
    return found


@functools.lru_cache(maxsize=64)
def _best_cycle(size: int, group_size: int) -> list[Partition]:
    """Return as many partitions as fit together best when they repeat; no more than needed."""
    smallest = min(_sizes(size, group_size))
    if smallest == 1:
        return _partitions(size, group_size, 1)
    shortest = steps_needed(size, smallest)
    if (size & (size - 1)) == 0 and (group_size & (group_size - 1)) == 0:
        bits, each = size.bit_length() - 1, group_size.bit_length() - 1
        return _partitions(size, group_size, bits // math.gcd(bits, each))
    partitions = _partitions(size, group_size, shortest + _MORE)
    tried = [partitions[:length] for length in range(1, len(partitions) + 1)]
    return min(tried, key=lambda cycle: _worst(size, cycle))


def steps_needed(size: int, group_size: int) -> int:
    """ceil(log size / log group_size): fewer steps cannot do."""
    steps, reached = 0, 1
    while reached < size:
        steps, reached = steps + 1, reached * group_size
    return steps


def _worst(size: int, cycle: list[Partition]) -> int:
    return max(_reach(size, cycle, start) for start in range(len(cycle)))


def _reach(size: int, cycle: list[Partition], start: int) -> int:
    """Steps from `start` until everybody knows of everybody (whom one knows is a bit set)."""
    known, everybody = [1 << rank for rank in range(size)], (1 << size) - 1
    for step in range(4 * size):
        if all(who == everybody for who in known):
            return step
        for group in cycle[(start + step) % len(cycle)]:
            together = functools.reduce(int.__or__, (known[rank] for rank in group))
            for rank in group:
                known[rank] = together
    return 4 * size  # these partitions never bring all together
