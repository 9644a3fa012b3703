"""Command line of `scripts/bench_plan.py`.

bench_plan.py measure   measure all cells (root; 80 minutes; continues an earlier run)
bench_plan.py fit       print the numbers of the engines that fit the cells that are not held out
bench_plan.py report    write docs/plan.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.netbench import bench, sandbox
from benchmarks.plan import cells, judge, measure, page
from examples import results

RESULTS = Path("runs/plan/cells.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested action; exit with its status."""
    options = parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        if options.action == "measure":
            raise SystemExit(_measure(options))
        known = results.read_json(options.cells)
        chosen = [cell for cell in cells.all_cells() if cell.name in known["cells"]]
        rehearsed = judge.rehearse(chosen, bench.say)
        if options.action == "fit":
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
        sandbox.stop(str(refusal))
    except OSError as error:
        sandbox.stop(f"results cannot be read: {error}; `bench_plan.py measure` makes them.")


def _measure(options: argparse.Namespace) -> int:
    """Measure the cells, each launch in namespaces of its own."""
    chosen = [x for x in cells.all_cells() if not options.cells or x.name in options.cells]
    if sandbox.inside():
        return sandbox.run(
            lambda folder, tag: measure.measure(chosen, options.output, folder, tag, options.turn)
        )
    for launch in measure.launches(chosen, options.output):
        names = [cell.name for cell in launch]
        settings = ["--output", str(options.output), "--turn", str(options.turn)]
        if status := sandbox.enter(["measure", *settings, "--cells", *names], __package__ or ""):
            return status
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench_plan.py", description=__doc__, formatter_class=raw)
    actions = parser.add_subparsers(dest="action", required=True)
    measures = actions.add_parser("measure", help="measure all cells")
    measures.add_argument("--output", type=Path, default=RESULTS)
    measures.add_argument("--turn", type=float, default=1.0, help="seconds of a measurement")
    measures.add_argument("--cells", nargs="+", metavar="CELL", help="names of some cells")
    fits = actions.add_parser("fit", help="print the numbers that fit the cells")
    reports = actions.add_parser("report", help="write docs/plan.md")
    for action in (fits, reports):
        action.add_argument("--cells", type=Path, default=RESULTS, help="results of measure")
    reports.add_argument("--output", type=Path, default=Path("docs"), help="folder of the page")
    return parser.parse_args(arguments)
