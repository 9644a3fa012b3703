"""Time and memory of compressors without the network, for docs/kernels.md (`make bench-kernels`).

Times are of one exchange of one fp32 gradient on one thread: encoding (until the first request is
ready) and decoding (all work after it), each as a multiple of the time to copy the gradient into
warm memory. Copies of this rank's own requests stand in for the answers of three more ranks. In
TensorFlow, an exchange is one graph (`graph_kernels`).
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pandas as pd
from tqdm import tqdm

from accordion_hvd import check
from accordion_hvd.comm import local
from accordion_hvd.core.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Compressor,
    Info,
    Request,
    State,
    Tensor,
    consecutive,
)
from accordion_hvd.core.running import Running
from accordion_hvd.ops import backend
from accordion_hvd.resolve import parse
from benchmarks.compressors.catalog import CATALOG
from benchmarks.report import render, write_page
from examples.command_line import read_options
from examples.tables import as_text

RANKS = 4
LATE = 10**6
"""Number of a step in which every method is in its last phase."""
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "numpy": "NumPy"}


@dataclass
class Cost:
    """Cost of a compressor, relative to the time to copy the gradient and to the gradient's bytes.

    Attributes:
        encode: time until the first request.
        decode: time after the first request, without waiting.
        state: bytes of state between steps.
        peak: largest number of further bytes beyond state and gradient, answers included; NaN if
            unknown.
        eager: whether the exchange cannot be traced in TensorFlow, and was measured eagerly.
    """

    encode: float
    decode: float
    state: float
    peak: float
    eager: bool = False


class Bench:
    """Measurement of compressors on one gradient.

    Args:
        framework: "torch", "tensorflow" or "numpy".
        side: number of rows and columns of the gradient.
        rounds: number of repetitions, of which the median counts.

    Attributes:
        round: number of the requests that are being answered, from 1, within a step.
    """

    def __init__(self, framework: str, side: int, rounds: int) -> None:
        one_thread(framework)
        self.xp: ModuleType = backend(framework)
        draw = np.random.Generator(np.random.Philox(1))
        self.values = draw.standard_normal((side, side), np.float32)
        self.rounds, self._warm = rounds, np.zeros_like(self.values)
        self.round = 0
        self._sent: Tensor | None = None  # reused in each step, as in communicators

    def measure(self, compressor: Compressor) -> Cost:
        """Return the costs on rank 0 over consecutive steps, so that residuals are in use.

        Rank 0 does most: it draws the noise of private compressors, and if ranks alternate as
        leader, it leads in each of these steps.
        """
        hosts = consecutive(RANKS, 2) if compressor.topology_aware else ()
        spec = self.xp.spec(self.xp.asarray(self.values))
        state = compressor.init(spec, Info(size=RANKS, name="w", hosts=hosts))
        state_size = sum(_bytes(self.xp, x) for x in state.values()) / self.values.nbytes
        copies, encodes, decodes, peak = [], [], [], math.nan
        for step in range(self.rounds + 2):
            phase = compressor.variant(LATE + step)
            info = Info(step * RANKS, 0, RANKS, "w", 0.1, hosts, phase, shape=spec.shape)
            gradient = self.xp.asarray(self.values)
            before = forget_peak()
            encode, decode, (_, state) = self._step(compressor, gradient, state, info)
            if step == (compressor.period or 1):  # earlier steps allocated persistent memory
                peak = (peak_memory() - before) / self.values.nbytes
            if step > 1:
                encodes.append(encode)
                decodes.append(decode)
                copies.append(self._copy())
        copy = statistics.median(copies)
        return Cost(
            statistics.median(encodes) / copy,
            statistics.median(decodes) / copy,
            state_size,
            peak,
        )

    def _copy(self) -> float:
        began = time.perf_counter()
        np.copyto(self._warm, self.values)
        return time.perf_counter() - began

    def _step(
        self, compressor: Compressor, gradient: Tensor, state: State, info: Info
    ) -> tuple[float, float, tuple[Tensor, State]]:
        """Return the seconds before and after the first requests, and the exchange's result."""
        self.round, spent, began = 0, [0.0, 0.0], time.perf_counter()
        running = Running(compressor.exchange(gradient, state, info))
        spent[0] += time.perf_counter() - began
        while not running.done:
            self.round += 1
            answers = [self._decoded(request, spent) for request in running.requests]
            began = time.perf_counter()
            running.answer(answers)
            spent[1] += time.perf_counter() - began
        return spent[0], spent[1], running.result

    def _decoded(self, request: Request, spent: list[float]) -> Any:
        """Return the answer in the form that the exchange generator receives."""
        answer = self._answer(request, spent)
        if request.decode is None:
            return answer
        began = time.perf_counter()
        if isinstance(request, Alltoall):
            answer = tuple(self.xp.unstack(answer))
        if isinstance(answer, tuple):
            answer = tuple(request.decode(part)[0] for part in answer)
        else:
            answer = request.decode(answer)[0]
        spent[1] += time.perf_counter() - began
        return answer

    def _answer(self, request: Request, spent: list[float]) -> Any:
        """Return the combined answer of ranks that all send this rank's request."""
        ranks = len(request.group) if request.group is not None else RANKS
        if isinstance(request, Allreduce) and request.wire:
            return self._through_wire(request, spent)
        return self._combined(request, ranks)

    def _combined(self, request: Request, ranks: int) -> Any:
        if isinstance(request, Allgather):
            return tuple(self.xp.copy(request.tensor) for _ in range(ranks))
        if not isinstance(request, Allreduce):
            return self.xp.copy(request.tensor)
        op = "max" if request.sender is not None else request.op  # other ranks send zeros
        combined = local.repeated(self.xp, request.tensor, op, ranks)
        return combined if request.reuse or op == "sum" else self.xp.copy(combined)

    def _through_wire(self, request: Allreduce, spent: list[float]) -> Tensor:
        """Convert the request as communicators do for a narrower dtype."""
        assert request.wire is not None
        count = math.prod(self.xp.shape(request.tensor))
        began = time.perf_counter()
        sent = self._sent = self.xp.to_wire([request.tensor], request.wire, count, self._sent)
        spent[0] += time.perf_counter() - began
        received, began = self._received(sent), time.perf_counter()
        (mean,) = self.xp.from_wire(received, request.wire, [request.tensor])
        spent[1] += time.perf_counter() - began
        return mean

    def _received(self, sent: Tensor) -> Tensor:
        """Return the mean of equal bytes."""
        return sent


def make_bench(framework: str, side: int, rounds: int) -> Bench:
    """Return the measurement of compressors in a framework; in TensorFlow, in graphs."""
    if framework == "tensorflow":
        from benchmarks.compressors.graph_kernels import GraphBench

        return GraphBench(side, rounds)
    return Bench(framework, side, rounds)


def one_thread(framework: str) -> None:
    """Limit the framework to one thread."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
    elif framework == "tensorflow":
        import tensorflow as tf

        try:
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        except RuntimeError:  # TensorFlow is already initialized
            pass


def _bytes(xp: ModuleType, x: Tensor) -> int:
    return int(xp.to_numpy(x).nbytes)


# ------------------------------------------------------------------------------- memory, on Linux
def forget_peak() -> float:
    """Reset the peak of `peak_memory`; return the resident bytes, or NaN if unsupported."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return math.nan
    return _status("VmRSS")


def peak_memory() -> float:
    """Return the largest number of resident bytes since `forget_peak`; NaN if unknown."""
    return _status("VmHWM")


def _status(key: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next((1024.0 * int(x.split()[1]) for x in lines if x.startswith(key + ":")), math.nan)


# ----------------------------------------------------------------------------------- the page
def table(found: dict[str, dict[str, Cost]]) -> pd.DataFrame:
    """Return a table, from framework -> compressor -> cost."""
    costs = {
        (name, FRAMEWORKS[framework] + ", eager" * costs[name].eager): vars(costs[name])
        for name in next(iter(found.values()))
        for framework, costs in found.items()
    }
    numbers = pd.DataFrame(costs).drop("eager").astype(float).clip(lower=0.0)
    numbers = numbers.T.rename(columns={"peak": "peak memory"})
    table = numbers.map(lambda x: "-" if math.isnan(x) else f"{x:.1f}")
    return table.rename_axis(["compressor", "framework"]).reset_index()


def page(side: int, rounds: int) -> str:
    """Return the text of docs/kernels.md."""
    return render(
        "kernels",
        side=side,
        megabytes=f"{4e-6 * side * side:.0f}",
        processor=processor(),
        ranks=RANKS,
        rounds=rounds,
    )


def processor() -> str:
    """Return the processor's name as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


OWNER = "kernels.py"


@dataclass(frozen=True)
class Options:
    """Measure time and memory of compressors without the network.

    Args:
        side: rows and columns of the gradient.
        rounds: repetitions, of which the median counts.
        frameworks: frameworks to measure; by default those that are installed.
        only: compressors, such as topk:0.01; by default all.
        output: page to write, such as docs/kernels.md; the table is data/kernels.csv beside it.
    """

    side: int = 5000
    rounds: int = 5
    frameworks: list[Literal["torch", "tensorflow", "numpy"]] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer(OWNER, "--side", self.side, least=1)
        check.integer(OWNER, "--rounds", self.rounds, least=1)
        for spec in self.only:
            parse(spec)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the page if requested."""
    options: Options = read_options(Options, arguments, owner=OWNER)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    chosen = [parse(word) for word in options.only] or CATALOG
    installed = [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)]
    found: dict[str, dict[str, Cost]] = {}
    for framework in options.frameworks or installed:
        bench = make_bench(framework, options.side, options.rounds)
        bar = tqdm(chosen, desc=FRAMEWORKS[framework], unit="compressor")
        found[framework] = {repr(compressor): bench.measure(compressor) for compressor in bar}
    costs = table(found)
    print(as_text(costs))
    if options.output:
        write_page(options.output, page(options.side, options.rounds))
        data = options.output.parent / "data"
        data.mkdir(exist_ok=True)
        costs.to_csv(data / "kernels.csv", index=False)
        print(f"\npage: {options.output}")


if __name__ == "__main__":
    main()
