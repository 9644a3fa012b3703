"""The files of a ledger, each of which is written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accordion_hvd
from accordion_hvd.engine.checkpoint_files import write_whole
from accordion_hvd.engine.ledger.page import page

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


FORMAT = 1
"""Version of the content of `ledger.json`."""

_ledgers: Counter[Path] = Counter()  # of this process in each folder


def next_number(folder: Path) -> int:
    """Return the number of a new ledger in a folder; each ledger of this process has its own."""
    folder = folder.absolute()
    _ledgers[folder] += 1
    return _ledgers[folder] - 1


def save(folder: Path, number: int, found: Mapping[str, Any]) -> Path:
    """Write the content of a ledger.

    Args:
        folder: where to write; made if it does not exist.
        number: number of the ledger in the folder, which is part of the name if it is not 0.
        found: result of `Ledger.as_dict`.

    Returns:
        The path of the file.

    Raises:
        OSError: if the file cannot be written.
    """
    name = f"ledger-{number}.json" if number else "ledger.json"
    return write(folder / name, json.dumps(_finite(found), allow_nan=False))


def write_receipt(ledger: Path, found: Mapping[str, Any]) -> Path:
    """Write the receipt of a ledger beside its file; return the path.

    Raises:
        OSError: if the file cannot be written.
    """
    return write(receipt_of(ledger), page(_finite(found)))


def load(path: Path) -> dict[str, Any]:
    """Return the content of a ledger's file.

    Raises:
        ValueError: if the file is no ledger of this version; the message has the reason.
        OSError: if it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not the ledger of a job.") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}, but must have format {FORMAT}.")
    return found


def ledgers(folder: Path) -> list[Path]:
    return sorted(folder.glob("ledger*.json"))


def receipt_of(path: Path) -> Path:
    return path.with_name(path.name.replace("ledger", "receipt")).with_suffix(".html")


def write(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all; return its path.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), durable=False)
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has no NaN and no infinity
    if isinstance(value, Mapping):
        return {str(key): _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return value


# ---------------------------------------------------------------------------- the facts about a job
class Job:
    """Facts about a job.

    Attributes:
        number: number of the job's ledger among those of this process in one folder.
        rank, ranks: number of this rank, and of all ranks.
        buckets: facts about each bucket, by name.
        until: time at which the last step ended, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.begun = False
        self.number, self.rank, self.ranks = 0, 0, 1
        self.engine = ""
        self.buckets: dict[str, dict[str, Any]] = {}
        self.policy: Any = None
        self._began = self.until = time.time()

    def join(self, exchange: Exchange) -> None:
        communicator = exchange.communicator
        self.begun, self.policy = True, exchange.policy
        self.rank, self.ranks = communicator.rank, communicator.size
        self.engine = communicator.label

    def add_buckets(self, entries: Sequence[Any]) -> None:
        """Store the facts about the buckets (`BucketState`) that are not known yet."""
        for entry in entries:
            bucket, compressor = entry.bucket, repr(entry.compressor)
            facts = {
                "shape": list(bucket.shape),
                "tensors": len(bucket.members),
                "dense": bucket.dense_bytes,
                "compress": bucket.compress,
                "first": compressor,
                "compressor": compressor,
            }
            self.buckets.setdefault(bucket.name, facts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": accordion_hvd.__version__,
            "host": socket.gethostname(),
            "began": self._began,
            "until": self.until,
            "ranks": self.ranks,
            "engine": self.engine,
            "cores": len(os.sched_getaffinity(0)),
            "policy": repr(self.policy),
            "buckets": self.buckets,
        }

    def verdict(self) -> str:
        """Return the verdict of the policy's gate; "" if there is none."""
        gate = self.policy.gate
        return "" if gate is None else gate.verdict
