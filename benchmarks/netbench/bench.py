"""Benchmark that runs all contestants on the same links, alternating, at each rate."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from benchmarks.netbench import contestants, links, tables, trace
from benchmarks.netbench.group import Group
from benchmarks.netbench.network import Network
from benchmarks.netbench.options import Rig, need_links
from examples import results
from examples.command_line import as_settings, option

FORMAT = 1
MODELS = {"torch": ("vgg", "resnet", "gpt"), "keras": ("vgg",)}
WARM_UP = 12
"""Steps of each method on unlimited links before measurements. Each step ends a window, and
Accordion decides again after 10 windows."""

VERDICT = 200
"""Largest number of steps until a gate has a verdict on a link."""

LEAST, MOST = 2, 20
"""Bounds on the steps of a repetition, which lasts about `--turn` seconds."""

BEFORE = 2
"""Unmeasured steps before each repetition, in which links and caches adapt to the method."""

SLOW = 1.0
"""Seconds of a step above which one unmeasured step is enough."""

USUAL = {"rates": ["50mbit", "200mbit", "1gbit"], "repetitions": 5, "turn": 2.0}
QUICK = {"rates": ["200mbit"], "repetitions": 1, "turn": 0.5}
"""Default options."""


@dataclass(kw_only=True)
class Options(Rig):
    """Compare methods to exchange gradients on the same links.

    Args:
        framework: framework of all methods.
        model: vgg, resnet or gpt; in Keras, vgg.
        batch: examples per rank and step.
        backend: backend of Horovod.
        rates: rates of links, as that of `run` (50mbit 200mbit 1gbit); a trace starts with each
            turn.
        methods: names or regular expressions; 'ours SPEC' accepts any compression.
        repetitions: repetitions of each method at each rate (5).
        turn: seconds of a repetition (2).
        quick: 200mbit, one repetition of half a second.
        output: file for the results (in runs/netbench).
    """

    framework: Literal["torch", "keras"] = "torch"
    model: str = "vgg"
    batch: int = 16
    backend: Literal["gloo", "mpi"] = "gloo"
    rates: list[str] = option(None)
    methods: list[str] = field(default_factory=list)
    repetitions: int = option(None)
    turn: float = option(None)
    quick: bool = False
    output: Path | None = None

    def __post_init__(self) -> None:
        """Set defaults and check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        super().__post_init__()
        for name, value in (QUICK if self.quick else USUAL).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.model not in MODELS[self.framework]:
            allowed = ", ".join(MODELS[self.framework])
            raise ValueError(f"--model is {self.model!r}; {self.framework} has {allowed}.")
        for name in ("batch", "repetitions", "turn"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} is {getattr(self, name)}, but must be positive.")
        need_links(self.hosts)
        for rate in self.rates:
            trace.changes(rate, self.hosts)
        contestants.choose(self.framework, self.methods)


def run(options: Options, folder: Path, tag: str) -> int:
    """Measure, write the results as JSON and print them; return 0."""
    methods = contestants.choose(options.framework, options.methods)
    network = connect(options, folder, tag)
    bandwidth = {rate: goodput(network, rate, options.turn) for rate in options.rates}
    network.limit("none")
    groups = start(options, network, folder, methods)
    try:
        for method in methods:
            with running(groups[method]):
                groups[method].ask("warm", method, WARM_UP)
        count = options.repetitions * len(options.rates) * len(methods)
        rows = list(tqdm(measure(options, network, groups), total=count, unit="turn"))
        equal = {method: compare(groups[method], method) for method in methods}
    finally:
        for group in set(groups.values()):
            group.close()
    warn_of_overruns(network)
    found = {
        "format": FORMAT,
        "settings": as_settings(options),
        "machine": machine(),
        "model": groups[methods[0]].facts,
        "bandwidth": bandwidth,
        "equal": equal,
        "turns": rows,
    }
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"runs/netbench/{options.framework}-{options.model}-{stamp}.json"
    path = options.output or Path(name)
    results.write_json(path, found)
    say(f"\n{tables.all_as_text(found)}\n\nresults: {path}")
    return 0


def connect(options: Rig, folder: Path, tag: str) -> Network:
    """Create the hosts of the options `hosts`, `rtt` and `loss`."""
    rtt, loss = links.parse_rtt(options.rtt), links.parse_loss(options.loss)
    return Network(options.hosts, tag, folder, rtt, loss)


def warn_of_overruns(network: Network) -> None:
    """Print a warning if the relay was too slow for the links."""
    if lost := network.overruns():
        say(f"warning: {lost} packets were lost because this machine was too slow for the links")


def goodput(network: Network, rate: str, turn: float = 0.0) -> float:
    """Return the goodput at a rate in bytes per second; that of a trace over its first `turn`."""
    network.limit(rate)
    measured = statistics.median(_goodputs(network, turn if rate.endswith(trace.SUFFIX) else 0.6))
    say(f"{rate}: {measured * 8 / 1e6:.0f} Mbit/s of TCP goodput")
    return measured


def _goodputs(network: Network, seconds: float) -> Iterator[float]:
    for _ in range(3):
        network.restart_trace()
        yield network.goodput(seconds)


@contextlib.contextmanager
def running(group: Group) -> Iterator[None]:
    """Resume a group within the context."""
    group.resume()
    yield
    group.pause()


def start(
    options: Options, network: Network, folder: Path, methods: Sequence[str]
) -> dict[str, Group]:
    """Start the launches; return the stopped launch that holds each method."""
    groups: dict[str, Group] = {}
    for name in (contestants.PLAIN, contestants.HOROVOD):
        held = [method for method in methods if contestants.group(method) == name]
        if held:
            say(f"starting {len(held)} method(s) in the launch {name!r}")
            settings: results.Row = {"framework": options.framework, "methods": held}
            settings |= {"model": options.model, "batch": options.batch}
            backend = options.backend if name == contestants.HOROVOD else "torch"
            group = Group(name, network, folder, settings, backend, options.per_host)
            group.pause()
            groups |= dict.fromkeys(held, group)
    return {method: groups[method] for method in methods}


def measure(
    options: Options, network: Network, groups: Mapping[str, Group]
) -> Iterator[results.Row]:
    """Yield a row per method, rate and repetition; the first method alternates."""
    methods = list(groups)
    for repetition in range(options.repetitions):
        for place, rate in enumerate(options.rates):
            network.limit(rate)
            first = (repetition * len(options.rates) + place) * 5 % len(methods)
            for method in methods[first:] + methods[:first]:
                row: results.Row = {"method": method, "rate": rate, "repetition": repetition}
                if contestants.gated(method):
                    row["verdict"] = restart_gate(groups[method], method)
                if contestants.reduces_fp16(method):
                    ask(groups[method], "judge", method, 0)  # as in a job that starts on this link
                row |= measure_steps(network, groups[method], method, options.turn)
                say(
                    f"{rate:>8} {method:<32} "
                    f"{max(row['ms']):8.1f} ms  {max(row['sent']) / 1e6:8.3f} MB sent  "
                    f"{max(row['cpu_ms']):7.1f} ms CPU  {row['foreign']:5.2f} cores elsewhere"
                )
                yield row


def restart_gate(group: Group, method: str) -> str:
    """Let a gate measure the link anew, as in a job that starts on this link."""
    verdict = ask(group, "restart_gate", method, VERDICT)
    say(verdict)
    return verdict


def ask(group: Group, action: str, method: str, count: int) -> Any:
    """Return the answer of the first worker."""
    with running(group):
        return group.ask(action, method, count)[0]


def measure_steps(network: Network, group: Group, method: str, seconds: float) -> results.Row:
    """Measure some steps of one method; lists are per rank or per host, values per step."""
    readings: list[Reading] = []

    def begin() -> None:
        network.restart_trace()
        readings.append(Reading(network))

    with running(group):
        for _ in range(BEFORE):
            step_seconds = max(answer["ms"] for answer in group.steps(method, 1)) / 1000
            if step_seconds > SLOW:
                break
        count = min(MOST, max(LEAST, round(seconds / step_seconds)))
        answers = group.steps(method, count, begin)
        before, after = readings[0], Reading(network)
    cpu_seconds = sum(answer["cpu_ms"] for answer in answers) * count / 1000
    pairs = list(zip(before.bytes, after.bytes, strict=True))
    return {
        "steps": count,
        **{key: [answer[key] for answer in answers] for key in ("ms", "cpu_ms", "loss")},
        "received": [(now[0] - then[0]) / count for then, now in pairs],
        "sent": [(now[1] - then[1]) / count for then, now in pairs],
        "foreign": (after.busy - before.busy - cpu_seconds) / (after.clock - before.clock),
    }


class Reading:
    """Counters at one moment: bytes of each host, CPU seconds of the machine, the clock."""

    def __init__(self, network: Network) -> None:
        self.bytes = [network.counters(host) for host in range(len(network.names))]
        self.busy, self.clock = busy_seconds(), time.monotonic()


def compare(group: Group, method: str) -> bool:
    """Return whether all ranks have the same weights."""
    with running(group):
        return len(set(group.ask("digest", method))) == 1


def busy_seconds() -> float:
    """Return the CPU seconds of all processes on this machine, including the kernel's work."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return (sum(numbers) - idle) / os.sysconf("SC_CLK_TCK")


def machine() -> results.Row:
    """Return a description of the machine and the installed versions."""
    import importlib.metadata

    names = ("torch", "tensorflow-cpu", "tensorflow", "keras", "horovod", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": os.cpu_count(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "kernel": platform.release(),
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def say(text: str) -> None:
    """Print a line immediately, above the progress bar if there is one."""
    tqdm.write(text)
    sys.stdout.flush()
