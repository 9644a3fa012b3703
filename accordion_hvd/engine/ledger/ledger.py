"""The ledger: where the time and the bytes of each step of an exchange went."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm import tcp, timeouts
from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.ledger import files
from accordion_hvd.engine.ledger.files import Job
from accordion_hvd.engine.ledger.samples import PARTS, Samples, Series, thinned
from accordion_hvd.engine.ledger.sinks import Sink
from accordion_hvd.policies.base import plain
from accordion_hvd.policies.gate import Link

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import BucketState
    from accordion_hvd.engine.step import Step

logger = logging.getLogger(__name__)

VARIABLE, OFF = "ACCORDION_HVD_LEDGER", "off"

SUMS = ("seconds", *PARTS, "sent", "dense", "flight", "skipped")
"""Columns of the series of steps."""

GROUP = ("steps", "sent", "encode", "decode", "flight", "rounds")
"""Sums of each fusion group."""

SHARED = ("steps", "seconds", *PARTS, "sent", "flight", "wire", "rate", "rtt", "peer")
"""Numbers since the start that ranks show each other. The last four are about TCP connections:
bytes sent on all of them, and the rate, round-trip time and other end of the slowest one."""

RECENT, EVENTS, TABLES = 64, 4096, 64
"""Largest numbers of single steps, of events and of tables of all ranks that are kept."""

SAVE = 20.0
"""Seconds between two writes of the file, at least."""


class Ledger:
    """Record of the steps of one exchange, in bounded memory.

    Each rank has its own ledger. Ranks show each other their sums whenever they compare replicas
    (`guard_every`), so that the ledger of rank 0 knows which rank is slow.

    ```python
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=PowerSGD(4),
        ledger=Ledger("runs/x", shadow=PowerSGD(1)),
    )
    ```

    Args:
        folder: where rank 0 writes `ledger.json` during the training and `receipt.html` at the end.
            None: the ledger stays in memory; `write` writes it.
        shadow: compressors that encode the gradients of a few steps without sending anything, to
            show which bytes and errors they would have, and how long a step would take with them.
        price: price of an hour of the job, in any currency, for the receipt.
        sinks: functions that receive the record of each step, on rank 0. A method `close`, if one
            has it, is called when rank 0 ends.

    Attributes:
        enabled: whether steps are recorded; it may be changed between steps.
        rehearses: whether exchanges are rehearsed; False for a ledger that nobody has asked for.
        series: sums over steps: `seconds` between the ends of two exchanges, which is the sum of
            `compute` (forward and backward pass, optimizer, input and everything else outside of
            the exchange), `encode`, `wait` (time in which the training thread only waits for
            messages), `decode`, `decide` (decisions of the policy, comparisons of replicas),
            `graph` (an exchange within a graph, whose parts Python cannot time) and `measure`
            (rehearsals for the receipt); bytes `sent` and those that a ring allreduce of the
            gradients sends (`dense`); `flight`, the seconds from the first request of a step to its
            last result; and `skipped` steps.
        groups: sums of each fusion group (`GROUP`), by its label.
        recent: records of the last steps, the newest last.
        events: changes between steps, such as switched levels.
        tables: numbers of all ranks (`SHARED`), each with the step after which they were gathered.
        samples: errors of compression in some steps.
        job: facts about the job.
        links: bandwidth and latency of the link, each time that they were measured.
        rehearsals: seconds of exchanges that were timed beside the training
            (`engine.rehearsal`), each with the step after which they were.

    Raises:
        TypeError: if `folder`, a shadow or a sink has another type.
        ValueError: if `price` is negative, or a shadow cannot serve alone.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        shadow: Compressor | Sequence[Compressor] = (),
        price: float | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise TypeError(f"Ledger: folder is {folder!r}, but must be a path or None.")
        if price is not None:
            check.at_least(self, "price", price, least=0)
        for sink in sinks:
            if not callable(sink):
                raise TypeError(f"Ledger: sink {sink!r} must be callable, such as Perfetto(path).")
        self.enabled = self.rehearses = True
        self.folder = None if folder is None else Path(folder)
        self.price, self.sinks = price, tuple(sinks)
        self.samples = Samples([shadow] if isinstance(shadow, Compressor) else list(shadow))
        self.series = Series(SUMS)
        self.groups: dict[str, dict[str, float]] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.tables: list[tuple[int, list[list[float]]]] = []
        self.job = Job()
        self.links: list[Link] = []
        self.rehearsals: list[dict[str, Any]] = []
        self._connection: tcp.Connection | None = None  # the slowest one
        self._ended = time.perf_counter()  # of the last exchange
        self._parts = dict.fromkeys(PARTS, 0.0)  # of the present step
        self._saved = -math.inf
        self._earlier = 0.0  # bytes that this process had sent over TCP before the first step
        self._writes = True  # whether the folder could be written so far
        self._exchange: Callable[[], Any] = lambda: None

    # --------------------------------------------------------------------------- the exchange
    def attach(self, exchange: Exchange) -> None:
        """Begin to record the steps of `exchange`, which may replace an earlier exchange."""
        begins = not self.job.begun
        self.job.join(exchange)
        if begins and self.enabled:
            self._earlier = _sent_over_tcp()
            if self.folder is not None or self.sinks:
                timeouts.at_exit(self._end)
            if self.folder is not None:
                self._writes = self._spare("the ledger", self._try_out, self.folder)
        self._exchange = weakref.ref(exchange)
        self._ended = time.perf_counter()

    def _try_out(self, folder: Path) -> None:
        # Before the first step, not after hours, it shows that the folder cannot be written.
        self.job.number = files.next_number(folder)
        if not self.job.rank:
            files.write(folder / f"try.{os.getpid()}", "").unlink()

    def _spare(self, what: str, call: Callable[..., Any], *arguments: Any) -> bool:
        """Call what only watches; if it fails, warn, and return False: the training goes on."""
        try:
            call(*arguments)
        except Exception as error:
            text = f"{what} failed ({type(error).__name__}: {error})"
            logger.warning("accordion_hvd: %s; the training goes on without it.", text)
            return False
        return True

    def moved(self, exchange: Exchange) -> None:
        self.job.join(exchange)
        self.event("ranks", exchange.steps, ranks=self.job.ranks)

    def extended(self, entries: Sequence[Any]) -> None:
        self.job.add_buckets(entries)

    def switched(self, entry: BucketState, step: int) -> None:
        self.job.buckets[entry.bucket.name]["compressor"] = repr(entry.compressor)
        self.event("level", step, bucket=entry.bucket.name, compressor=repr(entry.compressor))

    # ------------------------------------------------------------------------------- one step
    def open(self, exchange: Exchange) -> None:
        if self.enabled:
            self.samples.begin(exchange)
        else:
            self.samples.measuring = False

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part of the present step."""
        self._parts[part] += seconds

    def close(self, exchange: Exchange, step: Step) -> None:
        """Record a step whose exchange has ended, with its fusion groups."""
        if not self.enabled:
            return
        groups = _groups(step)
        launched = [group["launched"] for group in groups if group["rounds"]]
        arrived = [group["arrived"] for group in groups if group["rounds"]]
        flight = max(arrived) - min(launched) if launched else 0.0
        for key in ("encode", "wait", "decode"):
            self._parts[key] += step.seconds[key]
        skipped = float(step.bad is True)
        self._record(exchange, 1, step.traffic.sent, flight, skipped, groups)

    def executed(self, exchange: Exchange, steps: int, sent: float, seconds: float) -> None:
        """Record steps that a graph has executed since the last call.

        Args:
            sent: bytes that they have sent.
            seconds: time from the last gradient of a step to its last mean, in all steps.
        """
        if self.enabled:
            self._parts["graph"] += seconds
            self._record(exchange, steps, sent, seconds, 0.0, [])

    def _record(
        self,
        exchange: Exchange,
        steps: int,
        sent: float,
        flight: float,
        skipped: float,
        groups: list[dict[str, Any]],
    ) -> None:
        now = time.perf_counter()
        seconds, self._ended, self.job.until = now - self._ended, now, time.time()
        parts, self._parts = self._parts, dict.fromkeys(PARTS, 0.0)
        parts["compute"] = seconds - sum(parts.values())
        ranks = self.job.ranks = exchange.communicator.size
        dense = 2 * (ranks - 1) / ranks * exchange.accounts.each_step * steps
        row = {
            "seconds": seconds, **parts, "sent": sent, "dense": dense, "flight": flight,
            "skipped": skipped,
        }  # fmt: skip
        self.series.add(row, steps)
        for group in groups:
            sums = self.groups.setdefault(group["label"], dict.fromkeys(GROUP, 0.0))
            sums["steps"] += 1
            for key in GROUP[1:]:
                sums[key] += group[key]
        record = {"step": exchange.steps, "steps": steps, "at": now, **row, "groups": groups}
        self.recent.append(record)
        if exchange.communicator.rank == 0:
            self.sinks = tuple(x for x in self.sinks if self._spare(_name(x), x, record))

    # -------------------------------------------------------------------------- between steps
    def event(self, kind: str, step: int, **facts: Any) -> None:
        """Record an event.

        Args:
            kind: "level" (a bucket has another compressor), "skipped" (a step whose gradients were
                not finite), "guard" (replicas differ) or "ranks" (their number has changed).
            step: number of exchanges before the event.
            facts: what else is known.
        """
        if self.enabled:
            self.events.append({"kind": kind, "step": step, **facts})

    def sums(self) -> np.ndarray:
        """Return the numbers of this rank that other ranks may see (`SHARED`), as float64."""
        totals = map(self.series.total, SHARED[:-4])
        wire = max(_sent_over_tcp() - self._earlier, 0) if self.enabled else 0.0
        slowest = self._connection
        link = (slowest.rate, slowest.rtt, slowest.peer) if slowest else (0.0, 0.0, 0.0)
        return np.array([*totals, wire, *link], dtype=np.float64)

    def measured(self, link: Link, slowest: tcp.Connection | None) -> None:
        """Record the link, and this rank's slowest TCP connection during the measurement."""
        self.links = thinned([*self.links, link], TABLES)
        self._connection = slowest or self._connection

    def rehearsed(self, step: int, pause: float, seconds: Mapping[str, Sequence[float]]) -> None:
        """Record seconds of exchanges that were timed beside the training after a step.

        Args:
            pause: seconds of them in which gradients were not ready yet.
            seconds: seconds of each turn, by compressor.
        """
        row = {"step": step, "pause": pause, "seconds": seconds}
        self.rehearsals = thinned([*self.rehearsals, row], TABLES)

    def share(self, step: int, table: np.ndarray) -> None:
        """Record the numbers of all ranks after a step; a row per rank.

        Rank 0 then writes `ledger.json`, unless it did so less than `SAVE` seconds ago.
        """
        if not self.enabled:
            return
        self.tables = thinned([*self.tables, (step, table.tolist())], TABLES)
        due = time.monotonic() - self._saved >= SAVE
        if self.folder is not None and self._writes and due and not self.job.rank:
            self._saved = time.monotonic()
            self._writes = self._spare("the ledger", self._save, self.folder)

    def _save(self, folder: Path) -> None:
        files.save(folder, self.job.number, self.as_dict())

    # ----------------------------------------------------------------------------- the result
    def as_dict(self) -> dict[str, Any]:
        """Return all records in numbers, strings, lists and dicts for JSON.

        Raises:
            RuntimeError: if no step has been recorded.
        """
        if not self._has_steps():
            raise RuntimeError("Ledger: no step has been recorded.")
        return {
            "format": files.FORMAT,
            "job": self.job.as_dict() | {"price": self.price},
            "steps": self.series.as_dict(),
            "groups": self.groups,
            "events": list(self.events),
            "decisions": plain(self.job.policy.history),
            "ranks": {"columns": list(SHARED), "tables": self.tables},
            "errors": self.samples.as_dict(),
            "gate": self.job.verdict(),
            "links": [asdict(link) for link in self.links],
            "rehearsals": self.rehearsals,
        }

    def _has_steps(self) -> bool:
        exchange = self._exchange()
        if exchange is not None:
            exchange.account()
        return bool(self.series.rows)

    def write(self, folder: str | os.PathLike[str] | None = None) -> Path | None:
        """Write `ledger.json` and `receipt.html`; return the path of the receipt.

        Other ranks than 0 write nothing and return None.

        Args:
            folder: where to write; default: the folder of the constructor.

        Raises:
            ValueError: if no folder is known.
            RuntimeError: if no step has been recorded.
            OSError: if a file cannot be written.
        """
        folder = self.folder if folder is None else Path(folder)
        if folder is None:
            raise ValueError("Ledger.write: folder is missing; pass one, such as 'runs/x'.")
        if self.job.rank:
            return None
        found = self.as_dict()
        return files.write_receipt(files.save(folder, self.job.number, found), found)

    def _end(self) -> None:
        for sink in self.sinks:
            self._spare(_name(sink), getattr(sink, "close", int))
        if self.folder is not None and self._writes and self._has_steps():
            self._spare("the receipt", self._end_folder)

    def _end_folder(self) -> None:
        path = self.write()
        if path is not None:
            logger.info("accordion_hvd: receipt of the communication: %s", path)


def _name(sink: Sink) -> str:
    return f"the sink {getattr(sink, '__name__', type(sink).__name__)}"


def _sent_over_tcp() -> float:
    return sum(x.sent for x in tcp.connections())


def _groups(step: Step) -> list[dict[str, Any]]:
    return [
        {
            "label": label,
            "compressor": compressor,
            "flight": max(cost.arrived - cost.launched, 0.0),
            **vars(cost),
        }
        for (label, compressor), cost in zip(step.layout.labels, step.costs, strict=True)
    ]


LedgerOption: TypeAlias = Ledger | str | os.PathLike[str] | bool | None
"""The types of `DistributedOptimizer(ledger=)`; see `as_ledger`."""


def as_ledger(ledger: LedgerOption) -> Ledger:
    """Return the ledger that an argument `ledger` means.

    Args:
        ledger: a `Ledger`; a folder; False for a ledger that records nothing; None or True for the
            folder in the environment variable ACCORDION_HVD_LEDGER ("off": as False), or a ledger
            in memory if it is not set.

    Raises:
        TypeError: if `ledger` is none of these.
        ValueError: if the ledger serves another optimizer already.
    """
    if isinstance(ledger, Ledger):
        if ledger.job.begun:
            raise ValueError("Ledger: this ledger serves another optimizer already; make another.")
        return ledger
    asked = ledger is True
    if ledger is None or ledger is True:
        ledger = os.environ.get(VARIABLE) or None
    if ledger is False or ledger == OFF:
        off = Ledger()
        off.enabled = False
        return off
    if ledger is None or isinstance(ledger, str | os.PathLike):
        made = Ledger(ledger)
        made.rehearses = asked or ledger is not None
        return made
    raise TypeError(
        f"DistributedOptimizer: ledger is {ledger!r}, but must be a Ledger, a folder or False."
    )
