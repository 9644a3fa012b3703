"""Records of a storm: what ranks did and what was done to them, by the monotonic clock.

All processes of a machine share that clock, so that their records can be compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Journal:
    """A file with one JSON object per line; several processes may write to it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **values: Any) -> None:
        """Append an entry with the present time."""
        line = json.dumps({"time": time.monotonic(), "event": event, **values})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def has(self, event: str) -> bool:
        """Return whether an event has been noted."""
        return self.path.exists() and f'"event": "{event}"' in self.path.read_text()

    def last_step(self) -> int:
        """Return the number of the last step that has been noted, 0 before the first."""
        steps = (entry["step"] for entry in self.entries() if entry["event"] == "step")
        return max(steps, default=0)

    def entries(self) -> list[Entry]:
        """Return all entries, in the order of their times."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda entry: entry["time"])


def evaluate(entries: Sequence[Entry]) -> list[Entry]:
    """Return a row for each change of the ranks that the job went through.

    A row has the `event` ("kill", "leave" or "join"), the `seconds` to the next committed step of
    the new ranks, the number of `ranks` then, the steps `lost`, the steps since the last commit
    (`uncommitted`), and the `drift` of what an orderly change conserves. Changes that follow each
    other before the ranks have connected give one row: that of the first kill, else of the last
    change.
    """
    changes = ("kill", "leave", "join")
    rows, pending = [], None
    for index, entry in enumerate(entries):
        if entry["event"] in changes:
            if pending is None or pending["event"] != "kill":
                pending = entry
        elif entry["event"] == "enter" and pending is not None:
            rows.append(_row(pending, entry, entries[:index], entries[index:]))
            pending = None
    return [row for row in rows if row is not None]


def _row(change: Entry, enter: Entry, before: Sequence[Entry], after: Sequence[Entry]) -> Any:
    commit = next((entry for entry in after if entry["event"] == "commit"), None)
    if commit is None:
        return None
    reached = max((entry["step"] for entry in before if entry["event"] == "step"), default=0)
    kept = max((entry["step"] for entry in before if entry["event"] == "commit"), default=0)
    return {
        "event": change["event"],
        "seconds": commit["time"] - change["time"],
        "ranks": enter["ranks"],
        "lost": max(0, reached - enter["step"]),
        "uncommitted": reached - kept,
        "drift": None if change["event"] == "kill" else enter["drift"],
    }
