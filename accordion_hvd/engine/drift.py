"""Steps after which weights are equal on all ranks, for methods that let them differ at times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.bucket_state import BucketState


def drifting(entries: Sequence[BucketState]) -> list[BucketState]:
    """Return the bucket states with compressors that let weights differ between ranks."""
    plain = Compressor.synchronous
    return [entry for entry in entries if type(entry.compressor).synchronous is not plain]


def span(entries: Sequence[BucketState], counted: int) -> int:
    """Return how many exchanges ago the weights were equal before; 0 if they differ now.

    Skipped exchanges do not count. The number is 1 if no compressor lets weights differ. It depends
    only on the numbers of exchanges, so it is equal on all ranks.
    """
    states = drifting(entries)

    def equal(back: int) -> bool:
        served = ((s.compressor, counted - s.served_from - back) for s in states)
        return all(compressor.synchronous(max(count, 0)) for compressor, count in served)

    if not states:
        return 1
    return next(n for n in itertools.count(1) if equal(n)) if equal(0) else 0
