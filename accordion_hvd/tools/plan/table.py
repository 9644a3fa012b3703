"""The predicted costs of configurations, and their table."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from accordion_hvd.comm import fp16_reduction, tcp
from accordion_hvd.comm.agreement import started_by_horovod, started_by_mpi
from accordion_hvd.comm.recording import Operation
from accordion_hvd.core.base import Allreduce
from accordion_hvd.resolve import resolve
from accordion_hvd.simulation.prediction import (
    COSTS,
    SEGMENT,
    Cluster,
    Prediction,
    predict,
    wire_seconds,
)
from accordion_hvd.simulation.programs import Program, Rehearsal
from accordion_hvd.tools.plan.model import Model
from accordion_hvd.tools.text import short, table

CONFIGURATIONS = (
    "dense",
    "fp16",
    "powersgd:1",
    "powersgd:2",
    "powersgd:4",
    "powersgd:4,alternate",
    "topk:0.01",
    "topk:0.001",
    "qsgd:4",
    "efsignsgd",
)
"""Configurations that are compared if the user names none."""

IN_PARTS = ("doublesqueeze:qsgd:4", "doublesqueeze:efsignsgd", "doublesqueeze:topk:0.01")
"""Further ones on three ranks or more; on two, they send as much as the gathered codecs."""

FEW, MANY = 16, 64
"""Ranks on which methods that gather are measured if more than `MANY` ranks take part."""

LARGE = 64 << 20
"""Bytes of gathered messages up to which they are measured on all ranks nevertheless."""

UNCOMPRESSED = "dense"
GAIN = 0.03
"""Part of the step that compression must save to count as worthwhile."""


@dataclass(frozen=True)
class Row(Prediction):
    """The predicted step of a configuration, a spec string."""

    configuration: str

    @property
    def per_hour(self) -> float:
        """Return the bytes that each host sends in an hour."""
        return 3600 * self.sent / self.seconds


def configurations(ranks: int) -> list[str]:
    """Return the configurations that are compared if the user names none."""
    return [*CONFIGURATIONS, *(IN_PARTS if ranks > 2 else ())]


def rehearse(model: Model, configuration: str, cluster: Cluster, engine: str) -> list[Program]:
    """Measure the work of a configuration on this machine; return its steps.

    The messages of a thousand ranks may not fit into memory. So on more than `MANY` ranks, methods
    that gather are measured on `FEW` and `MANY` ranks, and their work is extrapolated.

    Raises:
        ValueError: if the configuration is no compressor, or does not support the model.
    """
    slow = cluster.bandwidth < fp16_reduction.slow(engine)  # as the engine decides in a job

    def on(ranks: int) -> list[Program]:
        return Rehearsal(
            resolve(configuration).serving, model.gradients, model.values, model.xp, ranks,
            cluster.per_host, slow, model.synchronize,
        ).steps()  # fmt: skip

    if cluster.ranks <= MANY:
        return on(cluster.ranks)
    pairs = list(zip(on(FEW), on(MANY), strict=True))
    operations = [both for a, b in pairs for both in zip(a.operations, b.operations, strict=True)]
    gathered = [b for a, b in operations if b.kind == "allgather" and a.size == b.size]
    if sum(x.size for x in gathered) * cluster.ranks <= LARGE or any(x.group for x in gathered):
        return on(cluster.ranks)
    return [extrapolated(a, b, cluster.ranks) for a, b in pairs]


def extrapolated(few: Program, many: Program, ranks: int) -> Program:
    """Return the step of more ranks, given those of `FEW` and `MANY` ranks.

    Work is linear in the number of ranks. A size that depends on it is that of a part.
    """
    share = (ranks - MANY) / (MANY - FEW)

    def work(a: float, b: float) -> float:
        return b + share * max(0.0, b - a)

    def operation(a: Operation, b: Operation) -> Operation:
        return b if a.size == b.size else replace(b, size=b.size * MANY / ranks)

    groups = []
    for a, b in zip(few.groups, many.groups, strict=True):
        rounds = tuple(
            tuple(tuple(map(operation, *chains)) for chains in zip(*launches, strict=True))
            for launches in zip(a.rounds, b.rounds, strict=True)
        )
        decode = tuple(map(work, a.decode, b.decode))
        groups.append(replace(b, encode=work(a.encode, b.encode), rounds=rounds, decode=decode))
    return replace(many, groups=tuple(groups), encode=work(few.encode, many.encode))


def row(
    model: Model, configuration: str, steps: Sequence[Program], cluster: Cluster, engine: str
) -> Row:
    """Return the predicted cost of a configuration, given the result of `rehearse`."""
    found = predict(steps, model.compute, cluster, COSTS[engine], model.backward, model.overlap)
    return Row(**vars(found), configuration=configuration)


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence with the fastest configuration, or that compression does not pay."""
    dense = next((row for row in rows if row.configuration == UNCOMPRESSED), None)
    others = [row for row in rows if row is not dense]
    if not others:
        return f"{_takes(rows[0])} a step."
    best = min(others, key=lambda row: row.seconds)
    if dense is None:
        return f"Fastest: {_takes(best)} a step."
    if best.seconds > (1 - GAIN) * dense.seconds:
        return f"Compression does not pay: {_takes(dense)} a step, and {_takes(best)}."
    ratio = dense.seconds / best.seconds
    return (
        f"Compression pays: {_takes(best)} a step, and {_takes(dense)}, {ratio:.1f} times as long."
    )


def text(rows: Sequence[Row], price: float | None = None) -> str:
    """Return the table, fastest first; the `price` of an hour of the job adds a column."""
    head = ["configuration", "ms/step", "compute", "encode, decode", "wait", "MB/step", "GB/hour"]
    if price is not None:
        head.append("1000 steps")
    lines = [head]
    for row in sorted(rows, key=lambda row: row.seconds):
        numbers = [row.seconds, row.compute, row.work, row.exposed]
        line = [row.configuration, *(short(1000 * x) for x in numbers)]
        line += [short(row.sent / 1e6), short(row.per_hour / 1e9)]
        if price is not None:
            line.append(f"{price * 1000 * row.seconds / 3600:.2f}")
        lines.append(line)
    return table(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    names = ("configuration", "seconds", "compute", "work", "exposed", "sent", "per_hour")
    return [{name: getattr(row, name) for name in names} for row in rows]


def _takes(row: Row) -> str:
    return f"{row.configuration} takes {short(1000 * row.seconds)} ms"


# ----------------------------------------------------------- the link between the ranks of a launch
MOST, TRIES = 8, 4
"""Largest size of the reduced vector in segments, and number of reductions."""


def launched() -> bool:
    """Return whether horovodrun, mpirun or torchrun has started this process with others."""
    return started_by_horovod() or started_by_mpi() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def prints() -> bool:
    """Return whether this process prints: rank 0, or a process without ranks."""
    if not launched():
        return True
    import accordion_hvd.torch as hvd

    return hvd.rank() == 0


def measured(engine: str | None) -> tuple[Cluster, str]:
    """Return the cluster of this launch, and its engine, by default the launcher's; collective.

    Raises:
        ValueError: if this process is no rank of a launch.
    """
    if not launched():
        raise ValueError(
            "pass --hosts and --link, or start this command with horovodrun or torchrun on the "
            "hosts, so that it measures their link."
        )
    import accordion_hvd.torch as hvd
    from accordion_hvd.ops import torch as xp
    from accordion_hvd.torch import engines

    hvd.init(engine=engine)
    ranks, local, name = hvd.size(), hvd.local_size(), engines.carrier()
    communicator, before = engines.connect(engines.process_set_of(None)), tcp.connections()
    size = min(ranks, MOST) * SEGMENT
    small, large = (xp.zeros((elements,), "float32") for elements in (1, size // 4))
    latency = communicator.run("plan.latency", _seconds(small, xp))
    whole = communicator.run("plan.bandwidth", _seconds(large, xp))
    seconds = max(whole - latency, whole / 5)  # on a fast link, latency may seem to be all
    connection = tcp.slowest(before, tcp.connections())
    rtt = connection.rtt if connection else latency / max(1, ranks - 1)
    bandwidth = 2 * (ranks - 1) / ranks * size / wire_seconds(seconds, ranks, rtt)
    hosts, cores = max(1, ranks // local), float(os.cpu_count() or 1)
    if hosts == 1:
        return Cluster(1, local, cores=cores, inside=bandwidth), name
    return Cluster(hosts, local, bandwidth, rtt, cores), name


def _seconds(vector: Any, xp: ModuleType) -> Any:
    """Return the least seconds of an allreduce of a vector; a generator of collectives."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        yield Allreduce(xp.copy(vector))
        times.append(time.perf_counter() - began)
    return min(times)
