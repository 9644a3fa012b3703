"""Command line of `scripts/bench_optimizers.py`.

Results are written after each training. Trainings whose results exist are skipped.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, get_args

from tqdm import tqdm

from accordion_hvd import check
from benchmarks.netbench.bench import machine, say
from benchmarks.optbench import page
from benchmarks.optbench.methods import METHODS, ON_ONE_HOST, SEEDS, TUNING
from benchmarks.optbench.tasks import TASKS, TaskName
from examples import launcher, results
from examples.command_line import option, read_options
from examples.data import DataError
from examples.results import Row

OWNER = "bench_optimizers.py"
FORMAT = 2
KEY = ("task", "method", "seed", "lr", "settings")
"""Keys that identify a training."""

PLACE = KEY[:3]
"""Keys that identify a training on the page."""


class Refusal(Exception):
    """Raised with a sentence when the requested work is not possible."""


def main(script: Path) -> None:
    """Run the requested action.

    Args:
        script: program of the ranks.
    """
    about = "Compressed optimizers and uncompressed Adam. Trainings with results are not repeated."
    options = read_options(ACTIONS, owner=OWNER, about=about)
    try:
        if isinstance(options, Report):
            files = [results.read_json(path) for path in options.files]
            say("page: {}   picture: {}".format(*page.write(files, options.output)))
            return
        jobs = list(wanted(options))
        if isinstance(options, Run) and not (options.work or options.simulated):
            launch(options, script)
        else:
            work(options, jobs)
    except (Refusal, launcher.NoLauncher, DataError, OSError, ValueError) as error:
        raise SystemExit(f"{OWNER}: {error}") from None


@dataclass(kw_only=True)
class Trainings:
    """Trainings of tasks with methods.

    Args:
        tasks: tasks to train.
        methods: names of methods; by default those that make sense on one host.
        np: number of ranks.
        work: run as one of the ranks.
    """

    action: ClassVar[str]
    tasks: list[TaskName] = field(default_factory=lambda: list(get_args(TaskName)))
    methods: list[str] = field(default_factory=lambda: list(ON_ONE_HOST))
    np: int = option(4, "-np")
    work: bool = option(False, hidden=True)
    seeds: list[int]
    output: Path

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer(OWNER, "-np", self.np, least=1)
        for name in self.methods:
            check.one_of(OWNER, "--methods", name, tuple(METHODS))


@dataclass(kw_only=True)
class Run(Trainings):
    """Train on real or simulated ranks.

    Args:
        seeds: seeds of weights and batches.
        output: file of the results.
        simulated: simulate the ranks in one process, which takes less time and gives the same
            losses up to rounding.
        tuning: results of `tune`, whose best learning rates are used where they exist.
    """

    action = "run"
    seeds: list[int] = field(default_factory=lambda: list(SEEDS))
    output: Path = Path("runs/optbench/accuracy.json")
    simulated: bool = False
    tuning: Path = Path("runs/optbench/tuning.json")


@dataclass(kw_only=True)
class Tune(Trainings):
    """Try grids of learning rates on simulated ranks.

    Args:
        seeds: seeds of weights and batches, other than those of `run`.
        output: file of the results.
        lr: learning rates, instead of each method's grid.
    """

    action = "tune"
    seeds: list[int] = field(default_factory=lambda: list(TUNING))
    output: Path = Path("runs/optbench/tuning.json")
    lr: list[float] | None = None


@dataclass(kw_only=True)
class Report:
    """Write a page and a picture of results, and of those of netbench.

    Args:
        files: results of `run`, `tune` and `netbench.py bench`.
        output: folder for page and picture.
    """

    files: list[Path]
    output: Path = Path("docs")


ACTIONS = {"run": Run, "tune": Tune, "report": Report}


def wanted(options: Run | Tune) -> Iterator[Row]:
    """Yield the requested trainings, seed by seed."""
    found = None
    if isinstance(options, Run) and options.tuning.is_file():
        found = results.read_json(options.tuning)
    for seed in options.seeds:
        for task, name in itertools.product(options.tasks, options.methods):
            method, steps = METHODS[name], TASKS[task].steps
            if task not in method.lr:
                continue
            job: Row = {"task": task, "method": name, "seed": seed}
            job["settings"] = method.describe(task, steps)
            chosen = (best(found, task, name) if found else None) or method.lr[task]
            for lr in (chosen,) if isinstance(options, Run) else options.lr or method.grid:
                yield job | {"lr": lr}


def best(tuning: Row, task: str, method: str) -> float | None:
    """Return the learning rate with the lowest loss; None if none was tried."""
    losses = page.tried(tuning, task, method)
    return None if losses.empty else losses.idxmin()


def launch(options: Run, script: Path) -> None:
    """Start the ranks and wait for them.

    Raises:
        Refusal: if the ranks fail.
        launcher.NoLauncher: if they cannot be started.
    """
    command = launcher.command(options.np, [script, *sys.argv[1:], "--work"])
    for task in options.tasks:  # find or fetch data before ranks wait for each other
        TASKS[task].problem()
    result = subprocess.run(command, env=launcher.environment(), check=False)
    if result.returncode:
        raise Refusal("the ranks failed; run make doctor to find the cause.")


def work(options: Run | Tune, jobs: Sequence[Row]) -> None:
    """Run trainings without results, as one of the ranks or with simulated ranks."""
    import torch

    from benchmarks.optbench import training

    torch.set_num_threads(1)
    rank, size, hosts, path = 0, training.RANKS, 1, options.output
    team: type = training.Simulated
    if options.work:
        import horovod.torch as hvd

        hvd.init()
        rank, size, team = hvd.rank(), hvd.size(), training.Real
        hosts = size // hvd.local_size()
    found = read(path, options.action, size, hosts, team is training.Simulated) if rank == 0 else {}
    missing = [job for job in jobs if not has(found, job)] if rank == 0 else []
    if options.work:
        missing = hvd.broadcast_object(missing, name="optbench.jobs")
    for job in tqdm(missing, unit="training", disable=rank > 0):
        ranks = team(job["task"], job["method"], job["lr"], job["seed"])
        row = job | training.train(ranks, job["task"], job["lr"])
        digests = hvd.allgather_object(row.pop("weights")) if options.work else [""]
        row["equal"] = len(set(digests)) == 1
        del ranks
        if rank == 0:
            add(found, row)
            found["tasks"][job["task"]] = facts(job["task"])
            results.write_json(path, found)
            say(summary(row))
    if rank == 0:
        say("\n".join([*advice(found), f"results: {path}"]))


def advice(found: Row) -> list[str]:
    """List tasks and methods whose best learning rate of a grid differs from `METHODS`."""
    lines = []
    for task, name in itertools.product(found["tasks"], METHODS):
        lr = best(found, task, name) if found["action"] == "tune" else None
        if lr is not None and lr != METHODS[name].lr.get(task):
            loss = page.tried(found, task, name)[lr]
            lines.append(f"{task}: {name} is best at lr {lr:g} (loss {loss:.5f})")
    return lines


def read(path: Path, action: str, ranks: int, hosts: int = 1, simulated: bool = False) -> Row:
    """Return the results so far.

    Raises:
        Refusal: if the file holds results of another benchmark.
    """
    fresh: Row = {
        "format": FORMAT, "benchmark": "optimizers", "action": action, "ranks": ranks,
        "hosts": hosts, "simulated": simulated, "machine": machine(), "tasks": {}, "runs": [],
    }  # fmt: skip
    if not path.exists():
        return fresh
    found = results.read_json(path)
    for key in ("format", "benchmark", "action", "ranks", "hosts", "simulated"):
        if found.get(key) != fresh[key]:
            raise Refusal(
                f"{path} has results with {key} {found.get(key)!r}, not {fresh[key]!r}; name "
                "another file with --output."
            )
    return found


def add(found: Row, row: Row) -> None:
    """Add a training; remove a reported one with other settings."""
    if found["action"] == "run":
        place = [row[key] for key in PLACE]
        found["runs"] = [run for run in found["runs"] if [run[key] for key in PLACE] != place]
    found["runs"].append(row)


def has(found: Row, job: Row) -> bool:
    """Return whether the results contain this training."""
    return any(all(run[key] == job[key] for key in KEY) for run in found["runs"])


def facts(name: str) -> Row:
    """Return the facts about a task for the page."""
    from benchmarks.optbench.training import problem

    task, net = TASKS[name], problem(name).make()
    sizes = [parameter.numel() for parameter in net.parameters()]
    plain = {
        key: getattr(task, key) for key in ("title", "what", "loss", "steps", "batch", "warmup")
    }
    return plain | {
        "least": problem(name).least, "parameters": sum(sizes), "tensors": len(sizes)
    }  # fmt: skip


def summary(row: Row) -> str:
    """Return a line about a training."""
    sent = row["sent"][-1]
    return (
        f"{time.strftime('%H:%M')} {row['task']:<10} {row['method']:<16} seed "
        f"{row['seed']:<2} lr {row['lr']:<7g} loss {row['loss'][-1]:.5f}  {sent / 1e6:8.2f} MB  "
        f"{row['seconds']:6.1f} s"
    )
