"""Command line of `scripts/netbench.py`.

netbench.py run [options] -- COMMAND   run a Horovod command on limited links
netbench.py bench [options]            compare methods to exchange gradients
netbench.py accuracy [options]         compare the seconds to a test accuracy
netbench.py report FILES [options]     write a page and a picture of the results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.netbench import accuracy, accuracy_page, bench, links, page, picture, sandbox, trace
from benchmarks.netbench.launch import BACKENDS, Job
from benchmarks.netbench.network import MOST_HOSTS
from benchmarks.report import write_page
from examples import results


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested action; exit with its status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    try:
        if options.action == "report":
            raise SystemExit(report(options))
        check(options)
        if not sandbox.inside():
            raise SystemExit(sandbox.enter(arguments))
        work = {"run": run, "bench": bench.run, "accuracy": accuracy.run}[options.action]
        raise SystemExit(sandbox.run(lambda folder, tag: work(options, folder, tag)))
    except sandbox.Refusal as refusal:
        sandbox.stop(str(refusal))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; the arguments after `--` are the command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("netbench.py", description=__doc__, formatter_class=raw)
    actions = parser.add_subparsers(dest="action", required=True)
    runs = actions.add_parser(
        "run", help="run a Horovod command on limited links",
        description="Run a Horovod command on hosts that can reach only each other.",
    )  # fmt: skip
    runs.add_argument(
        "--rate", default="none",
        help="rate of each link, such as 200mbit; one for each host, such as 200mbit,50mbit; or a "
        "CSV file with the columns seconds, rate and optionally host (0, 1, ...)",
    )  # fmt: skip
    runs.add_argument(
        "--timeout", type=float, help="seconds after which the command ends with status 124"
    )
    runs.add_argument("command", nargs="+", help="program and its arguments, after --")
    benches = actions.add_parser("bench", help="compare methods to exchange gradients")
    bench.add_options(benches)
    trainings = actions.add_parser("accuracy", help="compare the seconds to a test accuracy")
    accuracy.add_options(trainings)
    reports = actions.add_parser("report", help="write a page and a picture of results")
    reports.add_argument(
        "files", nargs="+", help="results of bench, one file per framework, or of accuracy"
    )
    reports.add_argument("--output", default="docs", help="folder for pages and pictures")
    for action in (runs, benches, trainings):
        action.add_argument("--hosts", type=int, default=4)
        action.add_argument("--per-host", type=int, default=1, help="processes on each host")
        links.add_options(action)
    runs.add_argument(
        "--backend", choices=BACKENDS, default="gloo",
        help="backend of Horovod, or torch: without Horovod, for torch.distributed",
    )  # fmt: skip
    for action in (benches, trainings):
        action.add_argument("--backend", choices=BACKENDS[:2], default="gloo")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raise `Refusal` for invalid options, before anything starts."""
    if not 1 <= options.hosts <= MOST_HOSTS:
        raise sandbox.Refusal(f"--hosts is {options.hosts}, but must be in 1..{MOST_HOSTS}.")
    if options.per_host < 1:
        raise sandbox.Refusal(f"--per-host is {options.per_host}, but must be at least 1.")
    try:
        links.parse_rtt(options.rtt)
        links.parse_loss(options.loss)
        if options.action == "bench":
            bench.check(options)
        elif options.action == "accuracy":
            accuracy.check(options)
        else:
            trace.changes(options.rate, options.hosts)
    except ValueError as error:
        raise sandbox.Refusal(str(error)) from None


def report(options: argparse.Namespace) -> int:
    """Write the page and the picture of `netbench.py report`."""
    try:
        found = [results.read_json(Path(name)) for name in options.files]
    except (OSError, ValueError) as error:
        raise sandbox.Refusal(f"results cannot be read: {error}") from None
    folder = Path(options.output)
    trained = [result for result in found if result.get("benchmark") == "accuracy"]
    if trained and len(found) > 1:
        raise sandbox.Refusal("results of accuracy make a page of their own; name one file.")
    if trained:
        print("page: {}   picture: {}".format(*accuracy_page.write(trained[0], folder)))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    picture.draw(found, folder / "performance.png")
    write_page(folder / "performance.md", page.text(found))
    print(f"page: {folder / 'performance.md'}   picture: {folder / 'performance.png'}")
    return 0


def run(options: argparse.Namespace, folder: Path, tag: str) -> int:
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
