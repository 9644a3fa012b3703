"""Command line of `scripts/netbench.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netbench import accuracy, bench, page, picture, receipts, sandbox, trace
from benchmarks.netbench.launch import Backend, Job
from benchmarks.netbench.options import OWNER, Rig
from benchmarks.report import write_page
from examples import results
from examples.command_line import read_options, stop


@dataclass(kw_only=True)
class Run(Rig):
    """Run a Horovod command on limited links: `run [options] -- COMMAND`.

    Args:
        command: program and its arguments, after --.
        rate: rate of each link, such as 200mbit; one for each host, such as 200mbit,50mbit; or a
            CSV file with the columns seconds, rate and optionally host (0, 1, ...).
        timeout: seconds after which the command ends with status 124.
        backend: backend of Horovod, or torch for torch.distributed, without Horovod.
    """

    command: list[str]
    rate: str = "none"
    timeout: float | None = None
    backend: Backend = "gloo"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        super().__post_init__()
        trace.changes(self.rate, self.hosts)


@dataclass(kw_only=True)
class Report:
    """Write a page of results, and draw the pictures of all pages in its folder.

    Args:
        files: results of bench, one file per framework, or of accuracy.
        output: folder for pages and pictures.
    """

    files: list[Path]
    output: Path = Path("docs")


@dataclass(kw_only=True)
class Pictures:
    """Draw the pictures of pages anew, from the tables that the pages have.

    Args:
        output: folder of the pages.
    """

    output: Path = Path("docs")


ACTIONS = {
    "run": Run, "bench": bench.Options, "accuracy": accuracy.Options, "receipts": receipts.Options,
    "report": Report, "pictures": Pictures,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested action; exit with its status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    about = "Training on limited links within one machine."
    options = read_options(ACTIONS, arguments, owner=OWNER, about=about)
    try:
        raise SystemExit(_act(options, arguments))
    except sandbox.Refusal as refusal:
        stop(f"{OWNER}: {refusal}")


def _act(options: Any, arguments: Sequence[str]) -> int:
    """Run an action, in a sandbox if it needs links; return its exit status."""
    if isinstance(options, Report | Pictures):
        if isinstance(options, Report):
            report(options)
        print("pictures:", *picture.write(options.output))
        return 0
    if isinstance(options, accuracy.Options):
        accuracy.fetch(options)
    if not sandbox.inside():
        return sandbox.enter(arguments)
    works: dict[Any, Any] = {Run: run, bench.Options: bench.run, accuracy.Options: accuracy.run,
                             receipts.Options: receipts.run}  # fmt: skip
    work = works[type(options)]
    return sandbox.run(lambda folder, tag: work(options, folder, tag))


def report(options: Report) -> None:
    """Write the page of `netbench.py report`."""
    try:
        found = [results.read_json(path) for path in options.files]
    except (OSError, ValueError) as error:
        raise sandbox.Refusal(f"results cannot be read: {error}") from None
    trained = [result for result in found if result.get("benchmark") == "accuracy"]
    if trained and len(found) > 1:
        raise sandbox.Refusal("results of accuracy make a page of their own; name one file.")
    if trained:
        name = trained[0]["settings"].get("page", "accuracy")
        write_page(options.output / f"{name}.md", accuracy.PAGES[name].text(trained[0]))
    else:
        page.write(found, options.output)


def run(options: Run, folder: Path, tag: str) -> int:
    """Run `netbench.py run`: show rank 0's output and return its exit status."""
    network = bench.connect(options, folder, tag)
    before = [network.counters(host) for host in range(options.hosts)]
    network.limit(options.rate)
    job = Job(options.command, network, folder / "ranks", options.backend, options.per_host)
    try:
        status = job.wait(options.timeout)
    finally:
        job.stop()
    sys.stdout.flush()
    if status:
        outcome = "took too long" if status == 124 else f"ended with status {status}"
        print(f"{job.output()}\nnetbench: the command {outcome}.", file=sys.stderr)
    for host, name in enumerate(network.names):
        counted = zip(network.counters(host), before[host], strict=True)
        received, sent = (now - then for now, then in counted)
        print(f"netbench: {name} sent {sent:,} B and received {received:,} B", file=sys.stderr)
    bench.warn_of_overruns(network)
    for name, (packets, lost) in zip(network.names, network.close(), strict=False):
        print(f"netbench: {lost:,} of {packets:,} packets to {name} lost", file=sys.stderr)
    return status
