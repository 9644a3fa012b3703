"""Skewed neighbour sampling: its moments and speed, and results of comparisons.

graph.py sampling [--output FILE]   measure sampled edges per second on one core
graph.py moments [--output FILE]    measure second moments and variances of the samplers
graph.py report FOLDER              write docs/graph.md from the results of `make bench-graph`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.graph import moments, page, speed  # noqa: E402
from examples.results import write_json  # noqa: E402


def main() -> None:
    """Run the requested action."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("graph.py", description=__doc__, formatter_class=raw)
    actions = parser.add_subparsers(dest="action", required=True)
    sampling = actions.add_parser("sampling", help="measure sampled edges per second on one core")
    sampling.add_argument("--nodes", type=int, default=100_000, help="nodes of the block model")
    sampling.add_argument("--seconds", type=float, default=2.0, help="seconds for each sampler")
    sampling.add_argument("--output", type=Path, help="file for the results")
    errors = actions.add_parser("moments", help="measure second moments and variances")
    errors.add_argument("--nodes", type=int, default=5000, help="nodes of the block model")
    errors.add_argument("--draws", type=int, default=1000, help="estimates for each sampler")
    errors.add_argument("--output", type=Path, help="file for the results")
    report = actions.add_parser("report", help="write the page and the picture")
    report.add_argument("folder", type=Path, help="folder with the results of comparisons")
    report.add_argument(
        "--output", type=Path, default=Path("docs"), help="folder for page and picture"
    )
    options = parser.parse_args()
    if options.action == "report":
        print(page.write(options.folder, options.output))
        return
    if options.action == "moments":
        found = moments.measure(options.nodes, options.draws)
    else:
        found = speed.measure(options.nodes, options.seconds)
    if options.output:
        write_json(options.output, found)


if __name__ == "__main__":
    main()
