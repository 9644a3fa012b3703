"""When the ranks' weights are alike, under methods that let them differ at times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.slots import Slot


def drifting(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots under whose compressors the ranks' weights differ at times."""
    plain = Compressor.synchronous
    return [slot for slot in slots if type(slot.compressor).synchronous is not plain]


def span(slots: Sequence[Slot], counted: int) -> int:
    """Return the exchanges at whose end the weights are alike now and were not before: 0 if not.

    1 with methods that keep them alike; else the number of those since they last were, without
    skipped ones. A function of the clock alone, so equal on all ranks.

    Args:
        slots: of an exchange.
        counted: its exchanges that were not skipped.
    """
    found = drifting(slots)

    def alike(back: int) -> bool:
        turns = ((s.compressor, counted - s.since - back) for s in found)
        return all(method.synchronous(max(turn, 0)) for method, turn in turns)

    if not found:
        return 1
    return next(n for n in itertools.count(1) if alike(n)) if alike(0) else 0
