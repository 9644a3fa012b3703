"""The sum of vectors within a group: parts are scattered, added and gathered again.

Recursive halving and doubling for groups of 2^k, as in MPI's allreduces; other sizes are taken
prime factor by prime factor, within which everybody exchanges with everybody. Each member sends
2 (S - 1) / S of a vector, whatever S is, where recursive doubling sends log2 S of them. Every
element is added by one member alone, so all members end with the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Round:
    """What leaves and what arrives together: pairs of a member's place and memory."""

    send: list[tuple[int, Array]]
    receive: list[tuple[int, Array]]


def factors(count: int) -> tuple[int, ...]:
    """The prime factors of a group's size, ascending."""
    found, divisor = [], 2
    while count > 1:
        while count % divisor == 0:
            found.append(divisor)
            count //= divisor
        divisor += 1
    return tuple(found)


def total(
    mine: Array, into: Array, scratch: Array, place: int, members: int
) -> Generator[Round, None, None]:
    """Add up the members' vectors; yields rounds of messages, which the caller carries.

    Args:
        mine: this member's vector, which is only read.
        into: where the sum will be.
        scratch: memory for `members` elements more.
        place: which of the members this is, from 0.
        members: how many there are.
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
        slots = _slots(scratch, len(others), high - low)
        yield Round(
            [(peers[o], source[cuts[o] : cuts[o + 1]]) for o in others],
            [(peers[o], slot) for o, slot in zip(others, slots, strict=True)],
        )
        own = source[low:high]
        if source is into and digit > 1:
            own = own.copy()  # the first two terms are about to take its place
        terms = slots[:digit] + [own] + slots[digit:]
        np.add(terms[0], terms[1], out=into[low:high])
        for term in terms[2:]:
            into[low:high] += term
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


def _slots(scratch: Array, count: int, size: int) -> list[Array]:
    return [scratch[i * size : (i + 1) * size] for i in range(count)]


def oracle(vectors: Sequence[Array]) -> Array:
    """What `total` must give, bit for bit, from all members' vectors."""
    rows = [np.asarray(vector) for vector in vectors]
    for radix in factors(len(rows)):  # neighbours in the row differ in the lowest digit
        rows = [_added(rows[i : i + radix]) for i in range(0, len(rows), radix)]
    return rows[0].copy()


def _added(rows: Sequence[Array]) -> Array:
    result = rows[0] + rows[1]
    for row in rows[2:]:
        result = result + row
    return result
