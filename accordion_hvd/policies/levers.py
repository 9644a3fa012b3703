"""What `Accordion` moves besides compression: batch sizes; and what caps all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd import check

MEGABYTE = 1e6


def batch_sizes(owner: Any, given: Any, window: int | None) -> tuple[int, int] | None:
    """(small, large) from what users write.

    Raises:
        ValueError: they are no two positive integers, the large one is no multiple of the small
            one, or a window ends before one large batch is full.
    """
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or not all(check.is_integer(size) and size >= 1 for size in pair):
        check.refuse(owner, "batch_size", given, "two positive integers such as (512, 4096)")
    small, large = int(pair[0]), int(pair[1])
    if small > large or large % small:
        allowed = "(small, large) with a large one that is a multiple of the small one"
        check.refuse(owner, "batch_size", given, allowed)
    if window is not None and window < large // small:
        least = f"at least {large // small}, the small batches in a large one"
        check.refuse(owner, "window", window, f"{least}, with batch_size={(small, large)}")
    return small, large


def share(owner: Any, batch_size: tuple[int, int], ranks: int) -> int:
    """What of a small batch is one rank's.

    Raises:
        ValueError: ranks cannot have equal shares.
    """
    if batch_size[0] % ranks:
        check.refuse(owner, "batch_size", batch_size, f"multiples of {ranks}, the number of ranks")
    return batch_size[0] // ranks


def affordable(
    wanted: Mapping[str, int],
    prices: Mapping[str, Sequence[float]],
    urgency: Mapping[str, float],
    room: float,
) -> dict[str, int]:
    """The levels that are wanted where there is room for them, else the cheaper ones.

    All begin with the cheapest that they may have; then, as long as there is room, they get what
    is wanted, the most urgent first.

    Args:
        wanted: bucket -> level.
        prices: bucket -> bytes of each level.
        urgency: bucket -> the larger, the earlier it is served.
        room: bytes that all together may take.
    """
    chosen = {name: _cheapest(prices[name], level) for name, level in wanted.items()}
    room -= sum(prices[name][level] for name, level in chosen.items())
    for name in sorted(wanted, key=lambda name: -urgency.get(name, math.inf)):
        more = prices[name][wanted[name]] - prices[name][chosen[name]]
        if more <= room:
            chosen[name] = wanted[name]
            room -= more
    return chosen


def least(prices: Mapping[str, Sequence[float]], rest: float) -> float:
    """Bytes of an exchange, all levels at their cheapest."""
    return rest + sum(map(min, prices.values()))


def _cheapest(prices: Sequence[float], level: int) -> int:
    """The cheapest level; `level` if none is cheaper."""
    found = min(range(len(prices)), key=prices.__getitem__)
    return level if prices[level] <= prices[found] else found
