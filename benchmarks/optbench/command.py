"""Command line of `scripts/bench_optimizers.py`.

bench_optimizers.py run [options]     train with all reported seeds, on real or simulated ranks
bench_optimizers.py tune [options]    try grids of learning rates on simulated ranks, other seeds
bench_optimizers.py report FILES      write a page and a picture of these results (and netbench's)

Results are written after each training. Trainings whose results exist are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.netbench.bench import machine, say
from benchmarks.optbench import page
from benchmarks.optbench.methods import METHODS, ON_ONE_HOST, SEEDS, TUNING
from benchmarks.optbench.tasks import TASKS
from examples import results
from examples.data import DataError
from examples.results import Row

FORMAT = 2
DEFAULTS = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
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
    options = parse()
    try:
        if options.action == "report":
            files = [results.read_json(Path(name)) for name in options.files]
            written = page.write(files, Path(options.output))
            say("page: {}   picture: {}".format(*written))
            return
        jobs = list(wanted(options))
        if options.action == "run" and not (options.work or options.simulated):
            launch(options, script)
        else:
            work(options, jobs)
    except (Refusal, DataError, OSError, ValueError) as error:
        raise SystemExit(f"bench_optimizers: {error}") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "bench_optimizers.py", description=__doc__, formatter_class=raw
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("run", "train on real or simulated ranks"),
        ("tune", "try learning rates on simulated ranks"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
        action.add_argument(
            "--methods", nargs="+", choices=tuple(METHODS), default=list(ON_ONE_HOST)
        )
        seeds = SEEDS if name == "run" else TUNING
        action.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
        file = "accuracy" if name == "run" else "tuning"
        action.add_argument("--output", default=f"runs/optbench/{file}.json")
        action.add_argument("-np", type=int, default=4, help="number of ranks")
        if name == "tune":
            action.add_argument("--lr", nargs="+", type=float, help="instead of each method's grid")
        else:
            action.add_argument(
                "--simulated", action="store_true",
                help="simulate the ranks in one process, which takes less time and gives the same "
                "losses up to rounding",
            )  # fmt: skip
            action.add_argument(
                "--tuning", default="runs/optbench/tuning.json",
                help="results of `tune`, whose best learning rates are used where they exist",
            )  # fmt: skip
        action.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    reports = actions.add_parser("report", help="write a page and a picture")
    reports.add_argument("files", nargs="+")
    reports.add_argument("--output", default="docs", help="folder for page and picture")
    return parser.parse_args(arguments)


def wanted(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the requested trainings, seed by seed."""
    tuning = Path(options.tuning) if options.action == "run" else Path()
    found = results.read_json(tuning) if tuning.is_file() else None
    for seed in options.seeds:
        for task, name in itertools.product(options.tasks, options.methods):
            method, steps = METHODS[name], TASKS[task].steps
            if task not in method.lr:
                continue
            job: Row = {"task": task, "method": name, "seed": seed}
            job["settings"] = method.describe(task, steps)
            chosen = (best(found, task, name) if found else None) or method.lr[task]
            for lr in (chosen,) if options.action == "run" else options.lr or method.grid:
                yield job | {"lr": lr}


def best(tuning: Row, task: str, method: str) -> float | None:
    """Return the learning rate with the lowest loss; None if none was tried."""
    losses = page.tried(tuning, task, method)
    return None if losses.empty else losses.idxmin()


def launch(options: argparse.Namespace, script: Path) -> None:
    """Start the ranks and wait for them.

    Raises:
        Refusal: if the ranks cannot be started or fail.
    """
    folder = Path(sys.executable).parent
    launcher = shutil.which("horovodrun", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        raise Refusal(
            f"horovodrun was not found beside {sys.executable} or on PATH; run make setup."
        )
    for task in options.tasks:  # find or fetch data before ranks wait for each other
        TASKS[task].problem()
    paths = {
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": f"{script.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [launcher, "--gloo", "-np", str(options.np), sys.executable, str(script)]
    result = subprocess.run(
        [*command, *sys.argv[1:], "--work"], env={**DEFAULTS, **os.environ, **paths}
    )
    if result.returncode:
        raise Refusal("the ranks failed; run make doctor to find the cause.")


def work(options: argparse.Namespace, jobs: Sequence[Row]) -> None:
    """Run trainings without results, as one of the ranks or with simulated ranks."""
    import torch

    from benchmarks.optbench import training

    torch.set_num_threads(1)
    rank, size, hosts, path = 0, training.RANKS, 1, Path(options.output)
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
    for number, job in enumerate(missing, 1):
        ranks = team(job["task"], job["method"], job["lr"], job["seed"])
        row = job | training.train(ranks, job["task"], job["lr"])
        digests = hvd.allgather_object(row.pop("weights")) if options.work else [""]
        row["equal"] = len(set(digests)) == 1
        del ranks
        if rank == 0:
            add(found, row)
            found["tasks"][job["task"]] = facts(job["task"])
            results.write_json(path, found)
            say(summary(row, f"{number}/{len(missing)}"))
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


def summary(row: Row, progress: str) -> str:
    """Return a line about a training."""
    sent = row["sent"][-1]
    return (
        f"{progress:>7} {time.strftime('%H:%M')} {row['task']:<10} {row['method']:<16} seed "
        f"{row['seed']:<2} lr {row['lr']:<7g} loss {row['loss'][-1]:.5f}  {sent / 1e6:8.2f} MB  "
        f"{row['seconds']:6.1f} s"
    )
