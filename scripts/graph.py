"""Skewed neighbour sampling: its moments and speed, and results of comparisons."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd import check  # noqa: E402
from benchmarks.graph import moments, page, speed  # noqa: E402
from examples.command_line import read_options  # noqa: E402
from examples.results import write_json  # noqa: E402

OWNER = "graph.py"


@dataclass(kw_only=True)
class Sampling:
    """Measure sampled edges per second on one core.

    Args:
        nodes: nodes of the block model.
        seconds: seconds for each sampler.
        output: file for the results.
    """

    nodes: int = 100_000
    seconds: float = 2.0
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer(OWNER, "--nodes", self.nodes, least=100)
        check.at_least(OWNER, "--seconds", self.seconds, least=0)


@dataclass(kw_only=True)
class Moments:
    """Measure second moments and variances of the samplers.

    Args:
        nodes: nodes of the block model.
        draws: estimates for each sampler.
        output: file for the results.
    """

    nodes: int = 5000
    draws: int = 1000
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer(OWNER, "--nodes", self.nodes, least=100)
        check.integer(OWNER, "--draws", self.draws, least=2)


@dataclass(kw_only=True)
class Report:
    """Write docs/graph.md and its picture from the results of `make bench-graph`.

    Args:
        folder: folder with the results of comparisons.
        output: folder for page and picture.
    """

    folder: Path
    output: Path = Path("docs")


ACTIONS = {"sampling": Sampling, "moments": Moments, "report": Report}


def main() -> None:
    """Run the requested action."""
    options = read_options(ACTIONS, owner=OWNER, about=__doc__ or "")
    if isinstance(options, Report):
        print(page.write(options.folder, options.output))
        return
    if isinstance(options, Moments):
        found = moments.measure(options.nodes, options.draws)
    else:
        found = speed.measure(options.nodes, options.seconds)
    if options.output:
        write_json(options.output, found)


if __name__ == "__main__":
    main()
