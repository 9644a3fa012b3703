"""Allreduce of vectors within a group: a reduce-scatter, followed by an allgather.

The algorithm is MPI's recursive halving and doubling with the factors of the group size S in place
of twos. Within a factor, each member exchanges parts with all others, so a group of up to eight
members needs two rounds. Each member sends 2 (S - 1) / S of a vector for any S; recursive doubling
sends log2 S vectors. A single member adds up each element, so all members get the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Round:
    """The messages of one round, each as a pair (place of the other member, array)."""

    send: list[tuple[int, Array]]
    receive: list[tuple[int, Array]]


WIDEST = 8
"""Largest number of members that exchange directly, except where a prime factor is larger."""

BLOCK = 1 << 15
"""Number of elements to add at a time, so that the operands stay in a core's cache."""


def factors(count: int) -> tuple[int, ...]:
    """Factorize a group size: the largest factors up to `WIDEST`, then larger prime factors."""
    result = []
    while count > 1:
        small = [radix for radix in range(2, WIDEST + 1) if count % radix == 0]
        large = (radix for radix in range(WIDEST + 1, count + 1) if count % radix == 0)
        result.append(small[-1] if small else next(large))
        count //= result[-1]
    return tuple(result)


def total(
    mine: Array, into: Array, scratch: Array, place: int, members: int
) -> Generator[Round, None, None]:
    """Add up the vectors of all members of a group.

    Args:
        mine: this member's vector, which is only read.
        into: array that receives the sum.
        scratch: scratch memory for at least `mine.size + members` elements.
        place: this member's place in the group, from 0.

    Yields:
        Rounds of messages, which the caller transfers.
    """
    source, low, high = mine, 0, mine.size
    stack: list[tuple[list[int], list[int], int]] = []
    stride = 1
    for radix in factors(members):
        digit = place // stride % radix
        peers = [place + (other - digit) * stride for other in range(radix)]
        cuts = [low + (high - low) * i // radix for i in range(radix + 1)]
        low, high = cuts[digit], cuts[digit + 1]
        others = [other for other in range(radix) if other != digit]
        buffers = _buffers(scratch, len(others), high - low)
        yield Round(
            [(peers[o], source[cuts[o] : cuts[o + 1]]) for o in others],
            [(peers[o], buffer) for o, buffer in zip(others, buffers, strict=True)],
        )
        _add([*buffers[:digit], source[low:high], *buffers[digit:]], into[low:high])
        source = into
        stack.append((peers, cuts, digit))
        stride *= radix
    if members == 1:
        np.copyto(into, mine)
    for peers, cuts, digit in reversed(stack):
        others = [o for o in range(len(peers)) if o != digit]
        part = into[cuts[digit] : cuts[digit + 1]]
        yield Round(
            [(peers[o], part) for o in others],
            [(peers[o], into[cuts[o] : cuts[o + 1]]) for o in others],
        )


def _add(terms: Sequence[Array], into: Array) -> None:
    """Add `terms`, first to last, into `into`, which may be one of the terms."""
    room = np.empty(min(BLOCK, into.size), into.dtype)
    for start in range(0, into.size, BLOCK):
        parts = [term[start : start + BLOCK] for term in terms]
        block = room[: parts[0].size]
        np.add(parts[0], parts[1], out=block)
        for part in parts[2:]:
            block += part
        into[start : start + BLOCK] = block


def _buffers(scratch: Array, count: int, size: int) -> list[Array]:
    return [scratch[i * size : (i + 1) * size] for i in range(count)]


def oracle(vectors: Sequence[Array]) -> Array:
    """Return the sum of all members' vectors with the same bits as `total` computes."""
    rows = [np.asarray(vector) for vector in vectors]
    for radix in factors(len(rows)):  # neighbours differ in the lowest digit
        rows = [_added(rows[i : i + radix]) for i in range(0, len(rows), radix)]
    return rows[0].copy()


def _added(rows: Sequence[Array]) -> Array:
    result = rows[0] + rows[1]
    for row in rows[2:]:
        result = result + row
    return result
