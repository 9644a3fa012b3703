"""Command line of `scripts/bench_plan.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from accordion_hvd import check
from benchmarks.netbench import bench, sandbox
from benchmarks.plan import cells, judge, measure, page
from examples import results
from examples.command_line import read_options, stop

OWNER = "bench_plan.py"
RESULTS = Path("runs/plan/cells.json")


@dataclass(kw_only=True)
class Measure:
    """Measure all cells (root; 80 minutes); continue an earlier run.

    Args:
        output: file of the results.
        turn: seconds of a measurement.
        cells: names of some cells; by default all.
    """

    output: Path = RESULTS
    turn: float = 1.0
    cells: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        if self.turn <= 0:
            check.refuse(OWNER, "--turn", self.turn, "a number above 0")
        known = tuple(cell.name for cell in cells.all_cells())
        for name in self.cells:
            check.one_of(OWNER, "--cells", name, known)


@dataclass(kw_only=True)
class Fit:
    """Print the numbers of the engines that fit the cells that are not held out.

    Args:
        cells: results of measure.
    """

    cells: Path = RESULTS


@dataclass(kw_only=True)
class Report(Fit):
    """Write docs/plan.md.

    Args:
        output: folder of the page.
    """

    output: Path = Path("docs")


ACTIONS = {"measure": Measure, "fit": Fit, "report": Report}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested action; exit with its status."""
    about = "Measured and predicted times per step."
    options = read_options(ACTIONS, arguments, owner=OWNER, about=about)
    try:
        if isinstance(options, Measure):
            raise SystemExit(_measure(options))
        known = results.read_json(options.cells)
        chosen = [cell for cell in cells.all_cells() if cell.name in known["cells"]]
        rehearsed = judge.rehearse(chosen, bench.say)
        if not isinstance(options, Report):
            unseen = cells.held_out()
            seen = [cell for cell in chosen if cell.name not in unseen]
            for name, engine in judge.fit(seen, known["cells"], rehearsed).items():
                bench.say(f"{name}: {engine}")
            return
        compared = [
            page.compare(cell, known["cells"][cell.name], judge.predictions(cell, rehearsed))
            for cell in chosen
        ]
        bench.say(f"page: {page.write(known, compared, options.output)}")
    except sandbox.Refusal as refusal:
        stop(f"{OWNER}: {refusal}")
    except OSError as error:
        stop(f"{OWNER}: results cannot be read: {error}; `bench_plan.py measure` makes them.")


def _measure(options: Measure) -> int:
    """Measure the cells, each launch in namespaces of its own."""
    chosen = [x for x in cells.all_cells() if not options.cells or x.name in options.cells]
    if sandbox.inside():
        return sandbox.run(
            lambda folder, tag: measure.measure(chosen, options.output, folder, tag, options.turn)
        )
    for launch in tqdm(measure.launches(chosen, options.output), unit="launch"):
        names = [cell.name for cell in launch]
        settings = ["--output", str(options.output), "--turn", str(options.turn)]
        if status := sandbox.enter(["measure", *settings, "--cells", *names], __package__ or ""):
            return status
    return 0
