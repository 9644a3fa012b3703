"""Rates of links over time, from a CSV file with columns seconds, rate and optionally host."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accordion_hvd.tools.text import parse_rate
from benchmarks.netbench.links import parse_rates
from benchmarks.netbench.sandbox import Refusal

SUFFIX = ".csv"
"""End of a rate that names a trace."""

COLUMNS = (["seconds", "rate"], ["seconds", "rate", "host"])


@dataclass(frozen=True)
class Change:
    """Change of the rate of a host's link.

    Attributes:
        seconds: time since the start of the trace.
        host: index of the host.
        bits: bits per second; None for an unlimited link.
    """

    seconds: float
    host: int
    bits: float | None


def changes(rate: str, hosts: int) -> list[Change]:
    """Return the changes of a rate in order; those at 0 seconds set all links.

    Args:
        rate: a rate, a rate for each host, or the name of a trace.
        hosts: number of hosts.

    Raises:
        ValueError: if the rate or the trace is invalid.
    """
    if rate.endswith(SUFFIX):
        return read(Path(rate), hosts)
    return [Change(0.0, host, bits) for host, bits in enumerate(parse_rates(rate, hosts))]


def read(path: Path, hosts: int) -> list[Change]:
    """Return the changes of a trace.

    A row without a host changes the links of all hosts.

    Raises:
        ValueError: with the line, if the trace is invalid.
    """
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(path.read_text().splitlines())]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {str(path)!r} cannot be read: {error}.") from None
    if not rows or rows[0] not in COLUMNS:
        raise ValueError(
            f"trace {str(path)!r} must start with the line 'seconds,rate' or 'seconds,rate,host'."
        )
    found: list[Change] = []
    for line, row in enumerate(rows[1:], 2):
        try:
            found += _changes(row, len(rows[0]), hosts, found[-1].seconds if found else 0.0)
        except ValueError as error:
            raise ValueError(f"trace {str(path)!r}, line {line}: {error}") from None
    if missing := set(range(hosts)) - {change.host for change in found if not change.seconds}:
        raise ValueError(f"trace {str(path)!r} has no rate of host {min(missing)} at 0 seconds.")
    return found


def _changes(row: Sequence[str], columns: int, hosts: int, least: float) -> list[Change]:
    """Return the changes of a row, whose seconds must be at least `least`."""
    if len(row) != columns:
        raise ValueError(f"{len(row)} values instead of {columns}.")
    seconds, bits = _number(row[0]), parse_rate(row[1])
    if seconds is None or not least <= seconds < float("inf"):
        raise ValueError(f"seconds {row[0]!r} must be a number of at least {least:g}.")
    if bits is None:
        raise ValueError("rate 'none' is invalid, since a trace limits links at all times.")
    host = row[2] if columns > 2 else ""
    if host and not (host.isdecimal() and int(host) < hosts):
        raise ValueError(f"host {host!r} must be in 0..{hosts - 1}, or empty for all hosts.")
    return [Change(seconds, each, bits) for each in ([int(host)] if host else range(hosts))]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Player:
    """Thread that applies changes, each at its time from now on.

    Args:
        changes: changes in order.
        apply: function that sets the rate of a host's link.

    Attributes:
        error: exception that ended the thread, if any.
    """

    def __init__(
        self, changes: Sequence[Change], apply: Callable[[int, float | None], None]
    ) -> None:
        self.error: Refusal | None = None
        self._changes, self._apply, self._began = changes, apply, time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _play(self) -> None:
        try:
            for change in self._changes:
                if self._stopping.wait(max(0.0, self._began + change.seconds - time.monotonic())):
                    return
                self._apply(change.host, change.bits)
        except Refusal as error:
            self.error = error
