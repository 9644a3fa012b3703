"""The sum of vectors within a group: parts are scattered, added and gathered again.

As MPI's recursive halving and doubling, but factor by factor of the group's size instead of two
by two: within a factor everybody exchanges with everybody, so a group of up to eight needs two
rounds. Each member sends 2 (S - 1) / S of a vector, whatever S is, where recursive doubling sends
log2 S of them. Every element is added by one member alone, so all members end with the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Round:
    """The messages of one round: pairs of a member's place and memory, sent and received."""

    send: list[tuple[int, Array]]
    receive: list[tuple[int, Array]]


WIDEST = 8
"""Members that exchange with each other directly, unless a prime factor is larger."""

BLOCK = 1 << 15
"""Elements that are added at a time: what is added stays in a core's cache meanwhile."""


def factors(count: int) -> tuple[int, ...]:
    """Factors of a group's size: the largest ones up to `WIDEST`, and then the prime ones."""
    found = []
    while count > 1:
        wide = [radix for radix in range(2, WIDEST + 1) if count % radix == 0]
        rest = (radix for radix in range(WIDEST + 1, count + 1) if count % radix == 0)
        found.append(wide[-1] if wide else next(rest))
        count //= found[-1]
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
        _add([*slots[:digit], source[low:high], *slots[digit:]], into[low:high])
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
    """Return the sum, first to last; `into` may be one of them."""
    room = np.empty(min(BLOCK, into.size), into.dtype)
    for start in range(0, into.size, BLOCK):
        parts = [term[start : start + BLOCK] for term in terms]
        some = room[: parts[0].size]
        np.add(parts[0], parts[1], out=some)
        for part in parts[2:]:
            some += part
        into[start : start + BLOCK] = some


def _slots(scratch: Array, count: int, size: int) -> list[Array]:
    return [scratch[i * size : (i + 1) * size] for i in range(count)]


def oracle(vectors: Sequence[Array]) -> Array:
    """Return the result that `total` must give, bit for bit, from all members' vectors."""
    rows = [np.asarray(vector) for vector in vectors]
    for radix in factors(len(rows)):  # neighbours differ in the lowest digit
        rows = [_added(rows[i : i + radix]) for i in range(0, len(rows), radix)]
    return rows[0].copy()


def _added(rows: Sequence[Array]) -> Array:
    result = rows[0] + rows[1]
    for row in rows[2:]:
        result = result + row
    return result
