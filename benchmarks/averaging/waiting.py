"""Throughput of averaging methods when ranks are late, compared with the best possible.

Real ranks over MPI sleep instead of computing: 20 ms per step, and in each step two ranks drawn at
random are late by 180 ms. Each averaging method is measured on models of several sizes. Two rates
are listed for comparison: the best that the delays allow (virtual time with free messages), and the
rate that virtual time predicts from the latency and bandwidth of exchanges on this machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from accordion_hvd import WAGMA, LocalSGD
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.groups import Groups
from accordion_hvd.engine.group_protocol import factors
from accordion_hvd.engine.wait_avoiding import WaitAvoiding
from accordion_hvd.simulation.compute_times import Stragglers
from accordion_hvd.simulation.links import Link
from benchmarks.averaging.virtual_time import train
from benchmarks.report import digits, spread
from examples.tables import format_table

Array = np.ndarray
ALL, LOCAL, WAITING, AVOIDING = "all", "local", "groups that wait", "groups that do not"
METHODS = (ALL, LOCAL, WAITING, AVOIDING)


@dataclass(frozen=True)
class Table:
    """Times of steps that have already been drawn, in seconds, (steps, ranks)."""

    seconds: Any

    def draw(self, ranks: int, steps: int, seed: int) -> Array:
        """Return the table itself."""
        return self.seconds


def expected(name: str, chosen: Any, times: Array, link: Link, size: float) -> float:
    """Return steps per second in virtual time, without the warm-up steps of `timed`."""
    method: Averaging = WAGMA(chosen.group_size, chosen.period)
    if name in (ALL, LOCAL):
        method = LocalSGD(1 if name == ALL else chosen.period)
    warm, ranks, avoiding = 2 * chosen.period, times.shape[1], name == AVOIDING
    seconds = []
    for table in (times[:warm], np.concatenate([times[:warm], times])):
        run = train(
            method, ranks, len(table), Table(table), link, wait_avoiding=avoiding, size=size
        )
        seconds.append(run.seconds)
    return len(times) / (seconds[1] - seconds[0])


class Waiting:
    """Groups whose members wait for each other: MPI's own allreduce in sub-communicators."""

    def __init__(self, comm: Any, groups: Groups, period: int) -> None:
        self._comm, self._groups, self._period, self._steps = comm, groups, period, 0
        own = [group for group in groups.all() if comm.Get_rank() in group]
        self._parts = {g: comm.Create_group(comm.Get_group().Incl(list(g))) for g in own}

    def average(self, model: Sequence[Array]) -> None:
        """Average with one allreduce, over the group or over all ranks."""
        from mpi4py import MPI

        group = self._groups.of(self._comm.Get_rank(), self._steps)
        self._steps += 1
        comm = self._comm if self._steps % self._period == 0 else self._parts[group]
        for vector in model:
            comm.Allreduce(MPI.IN_PLACE, vector)
            vector /= comm.Get_size()

    def close(self) -> None:
        """Free the communicators."""
        for comm in self._parts.values():
            comm.Free()


def averager(method: str, comm: Any, model: Array, group_size: int, period: int) -> Any:
    """Return the object that averages models by a method."""
    size = {LOCAL: 1, AVOIDING: group_size}.get(method, 1)
    if method == WAITING:
        return Waiting(comm, Groups(comm.Get_size(), group_size), period)
    steps = 1 if method == ALL else period
    return WaitAvoiding([model], group_size=size, period=steps, comm=comm, timeout=120)


def timed(comm: Any, averaging: Any, model: Array, times: Array, warm: int) -> tuple[float, float]:
    """Measure the steps after `warm` steps that first touch the memory.

    Args:
        comm: MPI communicator.
        averaging: object from `averager`.
        model: model to average.
        times: seconds of each step, (steps, ranks).
        warm: number of warm-up steps, a multiple of the period.

    Returns:
        Steps per second of the slowest rank, and CPU seconds per step and rank.
    """
    for step, row in enumerate([*times[:warm], *times]):
        if step == warm:
            comm.Barrier()
            began, used = time.perf_counter(), time.process_time()
        time.sleep(float(row[comm.Get_rank()]))
        averaging.average([model])
    took, used = time.perf_counter() - began, time.process_time() - used
    steps = len(times)
    return steps / comm.allreduce(took, op=_max()), comm.allreduce(used) / comm.Get_size() / steps


def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX


def link(comm: Any, size: int, group_size: int) -> Link:
    """Measure the latency and bandwidth of exchanges in groups on this machine."""
    seconds = {}
    for count in (1, size):
        model = np.zeros(count, np.float32)
        averaging = WaitAvoiding([model], group_size=group_size, period=10**6, comm=comm)
        took = []
        for _ in range(12):
            comm.Barrier()
            began = time.perf_counter()
            averaging.average([model])
            took.append(time.perf_counter() - began)
        averaging.close()
        seconds[count] = comm.allreduce(statistics.median(took)) / comm.Get_size()
    latency = seconds[1] / (2 * len(factors(group_size)) + 2)  # with activation and token
    sent = 2 * (group_size - 1) / group_size * 4 * size
    return Link(latency, sent / max(seconds[size] - seconds[1], 1e-6))


def measure(comm: Any, chosen: Any) -> list[dict[str, Any]]:
    """Return a row for each size and method, on every rank."""
    rows, ranks = [], comm.Get_size()
    times = Stragglers(chosen.compute, chosen.delay).draw(ranks, chosen.steps, 0)
    for size in chosen.sizes:
        measured_link = link(comm, size, chosen.group_size)
        rates: dict[str, list[float]] = {method: [] for method in METHODS}
        busy: dict[str, list[float]] = {method: [] for method in METHODS}
        late: list[float] = []
        for method in METHODS * chosen.repetitions:
            model = np.zeros(size, np.float32)
            averaging = averager(method, comm, model, chosen.group_size, chosen.period)
            rate, used = timed(comm, averaging, model, times, 2 * chosen.period)
            rates[method].append(rate)
            busy[method].append(used)
            averaging.close()
            if method == AVOIDING:
                late.append(comm.allreduce(averaging.late / averaging.steps) / ranks)
        for method, measured in rates.items():
            best, predicted = (
                expected(method, chosen, times, model_link, 4.0 * size)
                for model_link in (Link(0.0, float("inf")), measured_link)
            )
            row = {
                "size": size,
                "method": method,
                "rates": measured,
                "best": best,
                "predicted": predicted,
            }
            row |= {"busy": statistics.median(busy[method])}
            rows.append(row | {"late": statistics.median(late) if method == AVOIDING else 0.0})
    return rows


def idle(comm: Any, chosen: Any) -> list[dict[str, Any]]:
    """Measure the share of a core that a sleeping rank uses, without and with a waiting thread."""
    rows = []
    for _ in range(chosen.repetitions):
        plain = _share_of_a_core(comm, chosen.pause)
        averaging = averager(AVOIDING, comm, np.zeros(1000, np.float32), chosen.group_size, 10)
        waiting = _share_of_a_core(comm, chosen.pause)
        averaging.close()
        rows.append({"without": plain, "with": waiting})
    return rows


def _share_of_a_core(comm: Any, seconds: float) -> float:
    """Return the mean over ranks. No rank may wait in MPI, which waits busily."""
    comm.Barrier()
    began = time.process_time()
    time.sleep(seconds)
    used = (time.process_time() - began) / seconds
    time.sleep(0.2)
    return comm.allreduce(used) / comm.Get_size()


COLUMNS = {
    "parameters": "{size:,}",
    "average": "{method}",
    "steps/s": "{rates}",
    "limit": "{best:.2f}",
    "% of limit": "{reached:.0f} %",
    "predicted": "{predicted:.2f}",
    "error": "{off:+.0f} %",
    "CPU ms": "{busy:.1f}",
    "late": "{late}",
}


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a table with a row for each size and method."""
    found = pd.DataFrame(rows)
    rate = found["rates"].map(statistics.median)
    found["rates"] = [spread(rates, digits(2)) for rates in found["rates"]]
    found["reached"] = 100 * rate / found["best"]
    found["off"] = 100 * (found["predicted"] / rate - 1)
    found["busy"] *= 1e3
    found["late"] = [f"{100 * late:.0f} %" if late else "" for late in found["late"]]
    return format_table(COLUMNS, found)
