"""When the ranks' weights are alike, under methods that let them differ at times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.bucket_state import BucketState


def drifting(entries: Sequence[BucketState]) -> list[BucketState]:
    """Return the entries under whose compressors the ranks' weights differ at times."""
    plain = Compressor.synchronous
    return [entry for entry in entries if type(entry.compressor).synchronous is not plain]


def span(entries: Sequence[BucketState], counted: int) -> int:
    """Return the exchanges at whose end the weights are alike now and were not before: 0 if not.

    1 with methods that keep them alike; else the number of those since they last were, without
    skipped ones. A function of the clock alone, so equal on all ranks.

    Args:
        entries: of an exchange.
        counted: its exchanges that were not skipped.
    """
    found = drifting(entries)

    def alike(back: int) -> bool:
        turns = ((s.compressor, counted - s.served_from - back) for s in found)
        return all(method.synchronous(max(turn, 0)) for method, turn in turns)

    if not found:
        return 1
    return next(n for n in itertools.count(1) if alike(n)) if alike(0) else 0
