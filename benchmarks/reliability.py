"""The command of docs/reliability.md: faults of one rank, and storms in which ranks come and go.

Both keep what they have measured, and measure the rest if they are started again. `faults` writes
the page when it has all results, and `report` updates its section about storms.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import command as faults
from benchmarks.netbench import sandbox
from benchmarks.storm import command as storm
from benchmarks.storm import page
from examples.command_line import read_options, stop
from examples.data import DataError

MODULE, OWNER = "benchmarks.reliability", "reliability.py"


@dataclass(kw_only=True)
class Report:
    """Write the section about storms into the page.

    Args:
        results: folder of the results.
        page: page to update.
    """

    results: Path = Path("docs/data/storm")
    page: Path = Path("docs/reliability.md")


ACTIONS = {"faults": faults.Options, "storm": storm.Options, "report": Report}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested action."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    about = "What jobs do when ranks fail, leave and join."
    chosen = read_options(ACTIONS, arguments, owner=OWNER, about=about)
    try:
        if isinstance(chosen, Report):
            page.write(chosen.results, chosen.page)
        elif isinstance(chosen, faults.Options):
            faults.run(chosen)
        else:
            raise SystemExit(storm.run(chosen, arguments, MODULE))
    except (sandbox.Refusal, DataError) as error:
        stop(f"{OWNER}: {error}")


if __name__ == "__main__":
    main()
