"""Time and bytes of a step on this machine: plain Horovod against this package, in PyTorch.

`python scripts/bench.py [-np RANKS] [--width N] [--rounds N] [--steps N]`. Methods alternate, so
that other load on the machine affects them alike; each is compared with plain Horovod within the
same round. Ranks communicate through this machine's memory, which is faster than any network. On
slower networks, the bytes saved count more and the time of compression counts less.

With `--tensors 10 100 1000`, the same number of elements is split into 10, 100 and 1000 tensors,
and the table shows the cost of each additional tensor.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from accordion_hvd import check  # noqa: E402
from examples import launcher, results, tables  # noqa: E402
from examples.command_line import as_settings, option, read_options, stop  # noqa: E402

OWNER = "bench.py"
STOCK = {"Horovod": "none", "Horovod fp16": "fp16"}
OURS = ("dense", "fp16", "powersgd:4", "powersgd:1", "topk:0.01", "randomk:0.01")


@dataclass(kw_only=True)
class Options:
    """Measure time and bytes of a step on this machine: plain Horovod against this package.

    Args:
        np: number of ranks.
        width: units of each hidden layer.
        rounds: repetitions of each method.
        steps: optimizer steps per repetition.
        output: folder for results and table.
        tensors: numbers of tensors with the same total size.
        work: run as one of the ranks.
    """

    np: int = option(2, "-np")
    width: int = 768
    rounds: int = 7
    steps: int = 8
    output: Path = Path("runs/bench")
    tensors: list[int] = field(default_factory=list)
    work: bool = option(False, hidden=True)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        for key in ("width", "rounds", "steps"):
            check.integer(OWNER, f"--{key}", getattr(self, key), least=1)
        check.integer(OWNER, "-np", self.np, least=1)
        for count in self.tensors:
            check.integer(OWNER, "--tensors", count, least=1)


def model(width: int) -> Any:
    """Return a network of four large layers."""
    from torch import nn

    sizes = [256, width, width, width, 64]
    layers: list[Any] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def bag(width: int, count: int) -> Any:
    """Return a module of `count` square matrices with about 2 * width^2 elements in total.

    Its backward pass costs almost nothing.
    """
    import torch

    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *matrices: Any) -> Any:
            context.shapes = [matrix.shape for matrix in matrices]
            return torch.zeros((), requires_grad=True)

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            return tuple(torch.full(shape, 0.5) for shape in context.shapes)

    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            side = max(int((2 * width * width / count) ** 0.5), 32)
            matrices = [torch.nn.Parameter(torch.randn(side, side)) for _ in range(count)]
            self.matrices = torch.nn.ParameterList(matrices)

        def forward(self, _: Any) -> Any:
            return Fill.apply(*self.matrices)

    return Bag()


NO_EXCHANGE = "no exchange"


def contestants(width: int, count: int = 0) -> dict[str, tuple[Any, Any]]:
    """Return (network, distributed optimizer) by method."""
    import horovod.torch as horovod
    import torch

    import accordion_hvd.torch as ours

    found = {}
    for method in (*((NO_EXCHANGE,) if count else ()), *STOCK, *OURS):
        torch.manual_seed(1)
        net = bag(width, count) if count else model(width)
        plain = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        named = [(f"{method}.{count}.{name}", p) for name, p in net.named_parameters()]
        if method == NO_EXCHANGE:
            optimizer = plain
        elif method in STOCK:
            wire = getattr(horovod.Compression, STOCK[method])
            optimizer = horovod.DistributedOptimizer(plain, named, compression=wire)
        else:
            optimizer = ours.DistributedOptimizer(plain, named, compression=method, guard="off")
        found[method] = (net, optimizer)
    return found


def measure(net: Any, optimizer: Any, steps: int) -> float:
    """Return the milliseconds per step, measured once all ranks are ready."""
    import horovod.torch as horovod
    import torch

    inputs, labels = torch.randn(16, 256), torch.randint(0, 64, (16,))
    horovod.allreduce(torch.zeros(1), name="ready")
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, labels) if outputs.dim() else outputs
        loss.backward()
        optimizer.step()
    return 1000 * (time.perf_counter() - began) / steps


def by_tensors(options: Options) -> None:
    """Run the work of a rank with `--tensors`; rank 0 writes the results."""
    import horovod.torch as horovod

    rows: dict[str, dict[str, list[float]]] = {}
    for count in options.tensors:
        found = contestants(options.width, count)
        for round_ in range(options.rounds + 1):
            for method, (net, optimizer) in found.items():
                spent = measure(net, optimizer, options.steps)
                if round_:
                    rows.setdefault(method, {}).setdefault(str(count), []).append(spent)
    if horovod.rank() == 0:
        head = {"ranks": horovod.size(), "parameters": 2 * options.width**2, **as_settings(options)}
        results.write_json(options.output / "tensors.json", {"settings": head, "methods": rows})


def table_by_tensors(found: results.Row) -> pd.DataFrame:
    """Return a table of milliseconds, and microseconds per additional tensor."""
    counts = found["settings"]["tensors"]
    medians = pd.DataFrame(found["methods"]).T.map(statistics.median)[[str(x) for x in counts]]
    slope = 1000 * (medians.iloc[:, -1] - medians.iloc[:, 0]) / max(counts[-1] - counts[0], 1)
    table = medians.map("{:.1f} ms".format).add_suffix(" tensors")
    table["us a tensor"] = slope.map("{:.0f}".format)
    table["over no exchange"] = (slope - slope.get(NO_EXCHANGE, 0.0)).map("{:.0f}".format)
    return table.rename_axis("method").reset_index()


def work(options: Options) -> None:
    """Run the work of a rank; rank 0 writes the results."""
    import horovod.torch as horovod
    import torch

    horovod.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // horovod.local_size()))
    if options.tensors:
        by_tensors(options)
        return
    found = contestants(options.width)
    times: dict[str, list[float]] = {method: [] for method in found}
    for round_ in range(options.rounds + 1):
        for method, (net, optimizer) in found.items():
            spent = measure(net, optimizer, options.steps)
            if round_:  # the first round is a warm-up
                times[method].append(spent)
    net, _ = found["Horovod"]
    ring = 2 * (horovod.size() - 1) / horovod.size()
    dense = ring * sum(4 * parameter.numel() for parameter in net.parameters())
    rows = {}
    for method, (_, optimizer) in found.items():
        if method in STOCK:
            sent = dense / (2 if STOCK[method] == "fp16" else 1)
        else:
            stats = optimizer.exchange.stats()
            sent = stats["sent"] / stats["steps"]
        ratios = [a / b for a, b in zip(times[method], times["Horovod"], strict=True)]
        rows[method] = {
            "ms": statistics.median(times[method]),
            "time_ratio": statistics.median(ratios),
            "time_ratio_range": [min(ratios), max(ratios)],
            "sent": sent,
            "bytes_ratio": dense / sent,
            "all_ms": times[method],
        }
    if horovod.rank() == 0:
        head = {
            "ranks": horovod.size(),
            "parameters": int(dense / ring / 4),
            **as_settings(options),
        }
        results.write_json(options.output / "bench.json", {"settings": head, "methods": rows})


COLUMNS = {
    "method": "{method}",
    "": "{whose}",
    "ms/step": "{ms:.1f}",
    "time / Horovod's": "{time_ratio:.2f}",
    "(range)": "{time_ratio_range[0]:.2f}-{time_ratio_range[1]:.2f}",
    "MB sent/step": "{megabytes:.3f}",
    "fewer bytes": "{bytes_ratio:.1f} x",
}


def table(found: results.Row) -> pd.DataFrame:
    """Return a table with a row for each method."""
    rows = pd.DataFrame(found["methods"].values(), index=found["methods"]).rename_axis("method")
    rows["whose"] = ["" if method in STOCK else "ours" for method in rows.index]
    return tables.format_table(COLUMNS, rows.assign(megabytes=rows["sent"] / 1e6).reset_index())


def launch(options: Options) -> None:
    """Start the ranks and wait for them."""
    program = [HERE, "--work", *sys.argv[1:]]
    try:
        command = launcher.command(options.np, program, mpi=False)
    except launcher.NoLauncher as error:
        stop(f"{OWNER}: {error}")
    if subprocess.run(command, env=launcher.environment(), check=False).returncode:
        raise SystemExit(f"{OWNER}: the ranks failed; run `make doctor` to find the cause.")


def main() -> None:
    """Start the ranks, then print their results."""
    options: Options = read_options(Options, owner=OWNER)
    if options.work:
        work(options)
        return
    launch(options)
    name, make = ("tensors", table_by_tensors) if options.tensors else ("bench", table)
    written = options.output / f"{name}.json"
    found = results.read_json(written)
    made, settings = make(found), found["settings"]
    written.with_suffix(".md").write_text(tables.as_markdown(made) + "\n")
    print(f"{settings['ranks']} ranks on this machine, {settings['parameters']:,} parameters\n")
    print(tables.as_text(made))
    print(f"\nresults: {written}")


if __name__ == "__main__":
    main()
