"""Seconds that each method needs to reach a test accuracy on limited links."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tqdm import tqdm

from benchmarks.netbench import (
    accuracy_page,
    accuracy_tasks,
    bench,
    contestants,
    goodput_page,
    trace,
)
from benchmarks.netbench.accuracy_tasks import (
    CHANGING,
    GOODPUT_METHODS,
    GOODPUT_RATES,
    METHODS,
    QUICK_METHODS,
    TASKS,
    TaskName,
)
from benchmarks.netbench.group import Group
from benchmarks.netbench.network import Network
from benchmarks.netbench.options import Rig, need_links
from benchmarks.netbench.sandbox import Refusal
from examples import results
from examples.command_line import as_settings, option
from examples.data import DataError

FORMAT = 1
PAGES: dict[str, Any] = {"accuracy": accuracy_page, "goodput": goodput_page}
REHEARSAL = 5
"""Steps of each method before measurements, so that initialization is not measured."""


@dataclass(kw_only=True)
class Options(Rig):
    """Compare the seconds that methods need to a test accuracy on the same links.

    Args:
        page: page of the results; it determines the default methods and rates.
        tasks: tasks to train (all).
        backend: backend of Horovod.
        rate: rates of links, or names of traces (those of the page).
        seeds: trainings of each method (3).
        methods: names of methods; 'ours SPEC' accepts any compression.
        quick: digits, 200mbit, one seed, three methods.
        output: file for the results (in runs/netbench).
    """

    page: Literal["accuracy", "goodput"] = "accuracy"
    tasks: list[TaskName] = option(None)
    backend: Literal["gloo", "mpi"] = "gloo"
    rate: list[str] = option(None)
    seeds: int = option(None)
    methods: list[str] = field(default_factory=list)
    quick: bool = False
    output: Path | None = None

    def __post_init__(self) -> None:
        """Set defaults and check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        super().__post_init__()
        if self.quick:
            self.tasks = self.tasks or ["digits"]
            self.rate = self.rate or ["200mbit"]
            self.seeds = 1 if self.seeds is None else self.seeds
            self.methods = self.methods or list(QUICK_METHODS)
        self.tasks = self.tasks or list(get_args(TaskName))
        self.seeds = 3 if self.seeds is None else self.seeds
        default = GOODPUT_METHODS if self.page == "goodput" else METHODS
        self.methods = accuracy_tasks.choose(self.methods, default)
        if self.seeds < 1:
            raise ValueError(f"--seeds is {self.seeds}, but must be positive.")
        need_links(self.hosts)
        for rate in self.rate or ():
            trace.changes(rate, self.hosts)

    def rates(self, task: str) -> list[str]:
        """Return the rates at which to train a task."""
        if self.rate or self.page == "accuracy":
            return self.rate or list(TASKS[task].rates)
        return [*GOODPUT_RATES, *([CHANGING] if task == "cifar10" else [])]


def fetch(options: Options) -> None:
    """Fetch the images of all tasks while the network is still reachable.

    Raises:
        Refusal: if images are missing.
    """
    for task in options.tasks:
        try:
            accuracy_tasks.images(task)
        except DataError as error:
            raise Refusal(str(error)) from None


def run(options: Options, folder: Path, tag: str) -> int:
    """Train, write the results as JSON after each training and print them; return 0.

    Trainings that the file has with the same settings are not repeated.
    """
    began = time.monotonic()
    network = bench.connect(options, folder, tag)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = options.output or Path(f"runs/netbench/accuracy-{stamp}.json")
    rates = {task: options.rates(task) for task in options.tasks}
    all_rates = dict.fromkeys(rate for each in rates.values() for rate in each)
    fixed = [rate for rate in all_rates if not rate.endswith(trace.SUFFIX)]
    found: results.Row = {
        "format": FORMAT,
        "benchmark": "accuracy",
        "settings": as_settings(options),
        "machine": bench.machine(),
        "bandwidth": {rate: bench.goodput(network, rate) for rate in fixed},
        "tasks": {},
        "runs": [],
    }
    if path.is_file() and (earlier := results.read_json(path))["settings"] == found["settings"]:
        found = earlier
    for task in options.tasks:
        jobs = missing(options, task, rates[task], found["runs"])
        rows = trainings(options, network, folder, task, jobs) if jobs else []
        for facts, row in tqdm(rows, desc=task, total=len(jobs), unit="training"):
            found["tasks"][task] = facts
            found["runs"].append(row)
            results.write_json(path, found)
    minutes = (time.monotonic() - began) / 60
    shown = PAGES[options.page].all_as_text(found)
    bench.say(f"\n{shown}\n\nresults: {path}   {minutes:.0f} minutes in all")
    return 0


def missing(
    options: Options, task: str, rates: Sequence[str], runs: Sequence[results.Row]
) -> list[results.Row]:
    """Return the trainings of a task without results, seed by seed, in a new order at each rate."""
    jobs = []
    for seed in range(1, options.seeds + 1):
        for place, rate in enumerate(rates):
            first = ((seed - 1) * len(rates) + place) * 4 % len(options.methods)
            for method in options.methods[first:] + options.methods[:first]:
                jobs.append({"task": task, "rate": rate, "method": method, "seed": seed})
    return [job for job in jobs if not any(job.items() <= run.items() for run in runs)]


def trainings(
    options: Options, network: Network, folder: Path, task: str, jobs: Sequence[results.Row]
) -> Iterator[tuple[results.Row, results.Row]]:
    """Yield facts about a task and the row of a training, for each of `jobs`."""
    network.limit("none")
    groups = start(options, network, folder, task)
    try:
        for method, group in groups.items():
            with bench.running(group):
                group.ask("warm", method, 0)
                group.steps(method, REHEARSAL)
        facts = describe(task, groups[options.methods[0]])
        for job in jobs:
            network.limit(job["rate"])  # a trace begins anew with each training
            row = job | train(groups[job["method"]], job["method"], task, job["seed"])
            say_result(row)
            yield facts, row
    finally:
        for group in set(groups.values()):
            group.close()


def start(options: Options, network: Network, folder: Path, task: str) -> dict[str, Group]:
    """Start the launches; return the stopped launch that holds each method."""
    groups: dict[str, Group] = {}
    for name in (contestants.PLAIN, contestants.HOROVOD):
        held = [method for method in options.methods if contestants.group(method) == name]
        if held:
            bench.say(f"{task}: starting {len(held)} method(s) in the launch {name!r}")
            settings: results.Row = {"framework": "accuracy", "methods": held}
            settings |= {"model": task, "batch": TASKS[task].batch}
            backend = options.backend if name == contestants.HOROVOD else "torch"
            label = f"{task}-{name}"
            group = Group(label, network, folder, settings, backend, options.per_host)
            group.pause()
            groups |= dict.fromkeys(held, group)
    return {method: groups[method] for method in options.methods}


def describe(task: str, group: Group) -> results.Row:
    """Return the facts about a task that make its results understandable on their own."""
    fields = dataclasses.asdict(TASKS[task])
    return {key: value for key, value in fields.items() if key != "rates"} | group.facts


def train(group: Group, method: str, task: str, seed: int) -> results.Row:
    """Train until the target or the limit.

    Returns:
        After each evaluation: `steps`, training `seconds` (of the slowest rank), bytes `sent` (by
        the host with the most), and `accuracy` on all test images. At the end: whether all ranks
        have `equal` weights, the share of layers at Accordion's `high` level, the gate's `verdict`,
        the numbers of steps and seconds of its `trials`, and the number of cores that other
        processes used (`foreign`).
    """
    goal, readings = TASKS[task], []
    row: results.Row = {"steps": [], "seconds": [], "sent": [], "accuracy": []}
    done, total = 0, {"seconds": 0.0, "sent": 0.0}
    with bench.running(group):
        group.ask("warm", method, seed)
        while done < goal.limit and (not done or row["accuracy"][-1] < goal.target):
            count = min(goal.every, goal.limit - done)
            answers, reading = advance(group, method, count)
            readings.append(reading)
            done += count
            for key in total:
                total[key] += max(answer[key] for answer in answers)
                row[key].append(total[key])
            row["steps"].append(done)
            correct, tested = (
                sum(answer[key] for answer in answers) for key in ("right", "tested")
            )
            row["accuracy"].append(correct / tested)
        notes = group.ask("digest", method)
    others, clock = (sum(values) for values in zip(*readings, strict=True))
    equal = len({note["weights"] for note in notes}) == 1
    final = {key: notes[0][key] for key in ("high", "verdict", "trials")}
    return row | final | {"equal": equal, "foreign": others / clock}


def advance(
    group: Group, method: str, count: int
) -> tuple[list[dict[str, float]], tuple[float, float]]:
    """Take some steps and evaluate; return the workers' answers, others' CPU seconds, seconds."""
    before: list[float] = []
    answers = group.steps(
        method, count, lambda: before.extend((bench.busy_seconds(), time.monotonic()))
    )
    busy = bench.busy_seconds() - before[0] - sum(answer["busy"] for answer in answers)
    return answers, (busy, time.monotonic() - before[1])


def say_result(row: results.Row) -> None:
    """Print a line about a training."""
    steps, seconds = row["steps"][-1], row["seconds"][-1]
    bench.say(
        f"{row['task']} seed {row['seed']} {row['rate']:>8} {row['method']:<22} {seconds:7.1f} s "
        f"{steps:4d} steps {1000 * seconds / steps:7.1f} ms/step {row['sent'][-1] / 1e6:8.2f} MB "
        f"{row['accuracy'][-1]:6.1%} {row['foreign']:5.2f} cores elsewhere"
    )
