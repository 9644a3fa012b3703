"""Sinks, which pass the records of a ledger to other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
"""One step: its number `step`, the number of `steps` (several, if a graph executes several at
once), seconds by part, bytes, and its fusion groups with the times of their launch and arrival."""

MICRO = 1e6  # microseconds in a second


class Sink:
    """Base class of sinks. Rank 0 calls `write` after each step, and `close` when it ends."""

    def write(self, record: Record) -> None:
        """Take the record of a step; it must not be modified."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is not written yet; further calls have no effect."""


class _FileSink(Sink):
    """A sink that writes a text file, which is opened at the first record.

    Args:
        path: path of the file; an existing file is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None

    def _print(self, text: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w")
        self._file.write(text)
        self._file.flush()  # so that a forked child has nothing left to write

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._file.close()


class JsonLines(_FileSink):
    """Write one line of JSON for each step, with its fusion groups."""

    def write(self, record: Record) -> None:
        self._print(json.dumps(record) + "\n")


class CSV(_FileSink):
    """Write a table with one row for each step: seconds by part, and bytes."""

    def write(self, record: Record) -> None:
        row = {key: value for key, value in record.items() if key not in ("groups", "at")}
        if self._file is None:
            self._print(",".join(row) + "\n")
        self._print(",".join(map(str, row.values())) + "\n")


class Perfetto(_FileSink):
    """Write a trace for https://ui.perfetto.dev and chrome://tracing.

    The trace has a track for the parts of each step, and one for each fusion group, from its first
    request to its last result. The order of the parts of a step is that in which most of their time
    passes, because the ledger has sums.
    """

    _ORDER = ("compute", "encode", "decide", "wait", "decode", "graph")

    def write(self, record: Record) -> None:
        start = record["at"] - record["seconds"]
        for part in self._ORDER:
            if record[part] > 0:
                self._slice(part, 0, start, record[part], {"step": record["step"]})
                start += record[part]
        for number, group in enumerate(record["groups"], 1):
            if group["rounds"]:
                facts = {"step": record["step"], "bytes": group["sent"], "rounds": group["rounds"]}
                name = f"{group['label']}: {group['compressor']}"
                self._slice(name, number, group["launched"], group["flight"], facts)

    def _slice(
        self, name: str, track: int, start: float, seconds: float, facts: Mapping[str, Any]
    ) -> None:
        event = {
            "name": name, "ph": "X", "pid": 0, "tid": track, "ts": start * MICRO,
            "dur": seconds * MICRO, "args": facts,
        }  # fmt: skip
        self._print(("[\n" if self._file is None else ",\n") + json.dumps(event))

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._print("\n]\n")
        super().close()
