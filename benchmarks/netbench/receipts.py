"""Benchmark of the receipt: its estimates of other jobs against those jobs, in turn on one link."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accordion_hvd import Ledger
from accordion_hvd.engine import rehearsal
from accordion_hvd.engine.ledger.summary import WARM, summarize
from accordion_hvd.tools import text
from benchmarks.netbench import bench, contestants
from benchmarks.netbench.contestants import OURS, OVER
from examples import results
from examples.command_line import option

STEPS = 40
"""Steps of a job."""

PLACES = (WARM, STEPS // 2, 3 * STEPS // 4)
"""Steps of a job after which exchanges are rehearsed."""

KINDS = {"dense": "Dense()", "fp16": "FP16()", "powersgd:4": "PowerSGD(rank=4)"}
"""Spec string -> name of the estimate."""

CLOSE, SELF = 0.1, 0.05
"""Largest relative errors: of the estimate of another job, and of a job's own mean step."""


@dataclass(kw_only=True)
class Options(bench.Options):
    """Hold the receipt's estimates against the jobs that they are about.

    Each repetition runs one job of each kind on the same link: without compression, with fp16 and
    with PowerSGD(4), over Horovod and, in PyTorch, over torch.distributed.

    Args:
        framework: framework of all jobs.
        rates: rates of links; none is an unlimited one (none 200mbit 1gbit).
        methods: jobs (all).
    """

    hosts: int = 2
    model: str = "vgg"
    rates: list[str] = option(None)
    repetitions: int = option(None)

    def __post_init__(self) -> None:
        """Set defaults and check the options."""
        self.rates = self.rates or ["none", "200mbit", "1gbit"]
        self.repetitions = self.repetitions or 20
        prefixes = [OURS, OVER] if self.framework == "torch" else [OURS]
        self.methods = self.methods or [prefix + kind for prefix in prefixes for kind in KINDS]
        super().__post_init__()


def run(options: Options, folder: Path, tag: str) -> int:
    """Measure, write the results as JSON and print the table; return 0."""
    network = bench.connect(options, folder, tag)
    groups = bench.start(options, network, folder, options.methods)
    rows: list[results.Row] = []
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = options.output or Path(f"runs/netbench/receipts-{options.framework}-{stamp}.json")
    try:
        for method in options.methods:
            with bench.running(groups[method]):
                groups[method].ask("warm", method, bench.WARM_UP)
        for repetition in range(options.repetitions):
            for rate in options.rates:
                network.limit(rate)
                for method in options.methods:
                    if contestants.reduces_fp16(method):
                        bench.ask(groups[method], "judge", method, 0)
                    found = bench.ask(groups[method], "receipt", method, STEPS)
                    rows.append({"repetition": repetition, "rate": rate, "method": method} | found)
                    bench.say(f"{repetition:3} {rate:>8} {method:<42} {found['ms']:8.1f} ms a step")
            results.write_json(path, {"machine": bench.machine(), "rows": rows})
    finally:
        for group in set(groups.values()):
            group.close()
    bench.say(f"\n{table(rows)}\n\nresults: {path}")
    return 0


class Job:
    """The steps of one job, with a ledger of its own, of a contestant that was trained before.

    Args:
        averager: the averager of the contestant's optimizer.
    """

    def __init__(self, averager: Any) -> None:
        rehearsal.ALLOWANCE = math.inf  # these jobs stand for longer ones
        self._averager, self._exchange = averager, averager.exchange
        self._exchange.account()
        self.ledger = averager.ledger = self._exchange.ledger = Ledger()
        self.ledger.attach(self._exchange)
        self.ledger.extended(self._exchange.bucket_states)
        self._steps, self._began, self._measured = 0, 0.0, 0.0

    def stepped(self) -> None:
        """Count a step that has ended; rehearse after some."""
        self._exchange.account()
        self._steps += 1
        began = time.perf_counter()
        if self._steps == WARM:
            self._began = began
        if self._steps in PLACES:
            self._averager._rehearsals.hold(self._exchange, self.ledger, self._averager.prepare)
            spent = time.perf_counter() - began
            self.ledger.add("measure", spent)
            self._measured += spent

    def result(self) -> dict[str, Any]:
        """Return milliseconds per step, by a stopwatch and by the ledger, and the estimates."""
        seconds = time.perf_counter() - self._began - self._measured
        summary = summarize(self.ledger.as_dict())
        ms = {
            name: [1e3 * (summary.seconds + x) for x in (found.low, found.more, found.high)]
            for name, found in summary.estimates.items()
        }
        took = 1e3 * seconds / (self._steps - WARM)
        return {"ms": took, "own": 1e3 * summary.seconds, "estimates": ms}


def job(averager: Any, count: int, take: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of a job of `count` steps that `take` takes one by one."""
    made = Job(averager)
    for _ in range(count):
        take()
        made.stepped()
    return made.result()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the estimates, one line for each link and pair of kinds of jobs.

    An estimate is divided by what the other job has taken in the same repetition.
    """
    lines = [["link", "from", "of", "runs", "estimate / measured", "within", "in its range"]]
    took = {(row["rate"], row["repetition"], row["method"]): row["ms"] for row in rows}
    for rate, method in dict.fromkeys((row["rate"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["rate"], row["method"]) == (rate, method)]
        prefix = OVER if method.startswith(OVER) else OURS
        own = [row["own"] / row["ms"] for row in mine]
        lines.append([rate, method, "itself", *_summary(own, SELF), ""])
        for kind, name in KINDS.items():
            pairs = [
                (row["estimates"][name], took[rate, row["repetition"], prefix + kind])
                for row in mine
                if name in row["estimates"] and (rate, row["repetition"], prefix + kind) in took
            ]
            if pairs:
                ratios = [middle / ms for (_, middle, _), ms in pairs]
                covered = sum(low <= ms <= high for (low, _, high), ms in pairs) / len(pairs)
                lines.append([rate, method, name, *_summary(ratios, CLOSE), f"{covered:.0%}"])
    return text.table(lines, left=(0, 1, 2))


def _summary(ratios: Sequence[float], limit: float) -> list[str]:
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    close = sum(abs(ratio - 1) <= limit for ratio in ratios) / len(ratios)
    return [str(len(ratios)), f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{close:.0%}"]
