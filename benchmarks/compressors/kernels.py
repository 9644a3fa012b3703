"""What compressors cost apart from the network, for docs/kernels.md (`make bench-kernels`).

Times are of one conversation over one fp32 gradient on one thread: encoding (until the first
request is ready) and decoding (all after it), each as a multiple of copying the gradient into warm
memory. Three more ranks are played by answers that repeat this rank's own requests.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd.comm import reference
from accordion_hvd.core.base import Allgather, Allreduce, Compressor, Info, Request, State, Tensor
from accordion_hvd.core.placement import consecutive
from accordion_hvd.core.running import Running
from accordion_hvd.ops import backend
from accordion_hvd.resolve import parse
from benchmarks.compressors.catalog import CATALOG
from benchmarks.report import render, write_page
from examples.report import as_markdown, as_text

RANKS = 4
LATE = 10**6
"""Steps after which every method is in its last phase."""
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "numpy": "NumPy"}


@dataclass
class Cost:
    """Of a compressor, in multiples of what the gradient is: its copying time, its bytes.

    Attributes:
        encode: time until the first request.
        decode: time after it, without waiting.
        state: bytes kept from step to step.
        peak: bytes beyond these and the gradient, at most, answers included; NaN if unknown.
    """

    encode: float
    decode: float
    state: float
    peak: float


class Bench:
    """One gradient, and what is measured on it.

    Args:
        framework: "torch", "tensorflow" or "numpy".
        side: rows and columns of the gradient.
        rounds: how often each time is taken; their median counts.
    """

    def __init__(self, framework: str, side: int, rounds: int) -> None:
        one_thread(framework)
        self.xp: ModuleType = backend(framework)
        draw = np.random.Generator(np.random.Philox(1))
        self.values = draw.standard_normal((side, side), np.float32)
        self.rounds, self._warm = rounds, np.zeros_like(self.values)
        self._sent: Tensor | None = None  # kept from step to step, as communicators do

    def measure(self, compressor: Compressor) -> Cost:
        """Its costs, of steps that follow each other: errors are at work.

        Where ranks take turns as leader, this one always leads.
        """
        machines = consecutive(RANKS, 2) if compressor.topology_aware else ()
        spec = self.xp.spec(self.xp.asarray(self.values))
        state = compressor.init(spec, Info(size=RANKS, name="w", hosts=machines))
        kept = sum(_bytes(self.xp, x) for x in state.values()) / self.values.nbytes
        copies, encodes, decodes, peak = [], [], [], math.nan
        for step in range(self.rounds + 2):
            info = Info(step, step % RANKS, RANKS, "w", 0.1, machines, compressor.variant(LATE))
            gradient = self.xp.asarray(self.values)
            before = forget_peak()
            encode, decode, state = self._step(compressor, gradient, state, info)
            if step == 1:  # the first one has made what is kept for ever
                peak = (peak_memory() - before) / self.values.nbytes
            if step > 1:
                encodes.append(encode)
                decodes.append(decode)
                copies.append(self._copy())
        copy = statistics.median(copies)
        return Cost(
            statistics.median(encodes) / copy, statistics.median(decodes) / copy, kept, peak
        )

    def _copy(self) -> float:
        began = time.perf_counter()
        np.copyto(self._warm, self.values)
        return time.perf_counter() - began

    def _step(
        self, compressor: Compressor, gradient: Tensor, state: State, info: Info
    ) -> tuple[float, float, State]:
        """Seconds before and after the first request, and the new state."""
        spent, began = [0.0, 0.0], time.perf_counter()
        running = Running(compressor.exchange(gradient, state, info))
        spent[0] += time.perf_counter() - began
        while not running.done:
            answers = [self._decoded(request, spent) for request in running.requests]
            began = time.perf_counter()
            running.answer(answers)
            spent[1] += time.perf_counter() - began
        return spent[0], spent[1], running.result[1]

    def _decoded(self, request: Request, spent: list[float]) -> Any:
        """The answer as the conversation is sent it."""
        answer = self._answer(request, spent)
        if request.decode is None:
            return answer
        began = time.perf_counter()
        if isinstance(answer, tuple):
            answer = tuple(request.decode(part)[0] for part in answer)
        else:
            answer = request.decode(answer)[0]
        spent[1] += time.perf_counter() - began
        return answer

    def _answer(self, request: Request, spent: list[float]) -> Any:
        """What all ranks would say if all were like this one."""
        ranks = len(request.group) if request.group is not None else RANKS
        if isinstance(request, Allgather):
            return tuple(self.xp.copy(request.tensor) for _ in range(ranks))
        if not isinstance(request, Allreduce):
            return self.xp.copy(request.tensor)
        if request.wire:
            return self._through_wire(request, ranks, spent)
        op = "max" if request.sender is not None else request.op  # the others' are 0
        combined = reference.repeated(self.xp, request.tensor, op, ranks)
        return combined if request.reuse or op == "sum" else self.xp.copy(combined)

    def _through_wire(self, request: Allreduce, ranks: int, spent: list[float]) -> Tensor:
        """What the communicator does for a compressor that asks for a narrower dtype."""
        assert request.wire is not None
        count = math.prod(self.xp.shape(request.tensor))
        began = time.perf_counter()
        sent = self._sent = self.xp.to_wire([request.tensor], request.wire, count, self._sent)
        spent[0] += time.perf_counter() - began
        began = time.perf_counter()
        (mean,) = self.xp.from_wire(sent, request.wire, [request.tensor])
        spent[1] += time.perf_counter() - began
        return mean


def one_thread(framework: str) -> None:
    """Have the framework compute in one."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
    elif framework == "tensorflow":
        import tensorflow as tf

        try:
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        except RuntimeError:  # it has computed already
            pass


def _bytes(xp: ModuleType, x: Tensor) -> int:
    return int(xp.to_numpy(x).nbytes)


# ------------------------------------------------------------------------------- memory, on Linux
def forget_peak() -> float:
    """Resident bytes now, from which `peak_memory` counts on; NaN where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return math.nan
    return _status("VmRSS")


def peak_memory() -> float:
    """The largest number of resident bytes since `forget_peak`; NaN where nobody knows."""
    return _status("VmHWM")


def _status(key: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next((1024.0 * int(x.split()[1]) for x in lines if x.startswith(key + ":")), math.nan)


# ----------------------------------------------------------------------------------- what is shown
def table(found: dict[str, dict[str, Cost]]) -> list[list[str]]:
    """Head and rows, from framework -> compressor -> cost."""
    rows = [["compressor", "framework", "encode", "decode", "state", "peak memory"]]
    compressors = list(dict.fromkeys(name for costs in found.values() for name in costs))
    for name in compressors:
        for framework, costs in found.items():
            cost = costs[name]
            numbers = [cost.encode, cost.decode, cost.state, cost.peak]
            cells = ["-" if math.isnan(x) else f"{max(x, 0.0):.1f}" for x in numbers]
            rows.append([f"`{name}`", FRAMEWORKS[framework], *cells])
    return rows


def page(rows: list[list[str]], side: int, rounds: int) -> str:
    """All of docs/kernels.md."""
    return render(
        "kernels",
        side=side,
        megabytes=f"{4e-6 * side * side:.0f}",
        processor=processor(),
        ranks=RANKS,
        rounds=rounds,
        table=as_markdown(rows),
    )


def processor() -> str:
    """As Linux calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, show the table, write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--side", type=int, default=5000, help="rows and columns of the gradient")
    parser.add_argument("--rounds", type=int, default=5, help="whose median counts")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, help="default: installed")
    parser.add_argument("--only", nargs="+", help="compressors, such as topk:0.01; default: all")
    parser.add_argument("--output", help="page to write, such as docs/kernels.md")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    chosen = [parse(word) for word in options.only or ()] or [row.compressor for row in CATALOG]
    usual = [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)]
    found: dict[str, dict[str, Cost]] = {}
    for framework in options.frameworks or usual:
        bench = Bench(framework, options.side, options.rounds)
        found[framework] = {repr(one): bench.measure(one) for one in chosen}
    rows = table(found)
    print(as_text(rows))
    if options.output:
        write_page(Path(options.output), page(rows, options.side, options.rounds))
        print(f"\npage: {options.output}")


if __name__ == "__main__":
    main()
