"""Bytes and seconds that an exchange has cost so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.engine.bucket_state import BucketState
from accordion_hvd.engine.step import Step


class Accounts:
    """Bytes and seconds of this rank since the start of training.

    Attributes:
        dense_bytes: bytes of the uncompressed gradients of all steps.
        seconds: seconds spent in encoding, waiting and decoding, by these names.
        each_step: bytes of the uncompressed gradients of one step.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.dense_bytes = self.each_step = 0.0
        self.seconds = {"encode": 0.0, "wait": 0.0, "decode": 0.0}

    def count(self, step: Step) -> None:
        self.traffic.add(step.traffic)
        self.dense_bytes += self.each_step
        for key, value in step.seconds.items():
            self.seconds[key] += value

    def stats(self, ranks: int) -> dict[str, Any]:
        """Return the entries of `Exchange.stats` about bytes and seconds."""
        dense_sent, sent = 2 * (ranks - 1) / ranks * self.dense_bytes, self.traffic.sent
        return {
            "dense": self.dense_bytes,
            "dense_sent": dense_sent,
            "payload": self.traffic.payload,
            "sent": sent,
            "received": self.traffic.received,
            "between": sent - self.traffic.within,
            "ratio": dense_sent / sent if sent else math.nan,
            "seconds": dict(self.seconds),
        }


def reports(entries: Sequence[BucketState]) -> dict[str, dict[str, float]]:
    """Return the reports of the compressors (`Compressor.report`) by bucket, without empty ones."""
    found = {entry.bucket.name: entry.compressor.report(entry.state or {}) for entry in entries}
    return {
        entry.bucket.name: {
            key: float(entry.spec.xp.to_numpy(x).reshape(-1)[0])
            for key, x in found[entry.bucket.name].items()
        }
        for entry in entries
        if found[entry.bucket.name]
    }
