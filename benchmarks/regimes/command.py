"""Command line of `scripts/results.py` (`make results`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from accordion_hvd import check
from benchmarks.regimes import bounds, page, real, table
from benchmarks.regimes.methods import BATCHES, METHODS, methods_of
from benchmarks.regimes.studies import STUDIES
from benchmarks.regimes.table import Outcomes
from benchmarks.regimes.training import Outcome, Training
from examples.command_line import read_options, stop
from examples.data import DataError, load
from examples.data.text import load_tinyshakespeare

OWNER = "results.py"
SHORT = 4
"""Factor by which `--short` shortens trainings."""


@dataclass(kw_only=True)
class Options:
    """Train with Accordion and its competitors; write docs/results.md.

    Trainings whose results are in the file are not repeated.

    Args:
        studies: names of studies; by default all that need no GPU.
        methods: names of methods; by default all.
        seeds: seeds of weights and batches.
        short: one seed and a quarter of the epochs, with results in runs/results.
        processes: number of simultaneous trainings.
        device: device of the networks.
        table: file of the results.
        output: page to write.
    """

    studies: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    short: bool = False
    processes: int = 2
    device: str = "cpu"
    table: Path = Path("docs/results.csv")
    output: Path = Path("docs/results.md")

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        for name in self.studies:
            check.one_of(OWNER, "--studies", name, (*STUDIES, *bounds.STUDIES, *real.STUDIES))
        for name in self.methods:
            allowed = dict.fromkeys((*METHODS, *BATCHES, *bounds.METHODS, *real.METHODS))
            check.one_of(OWNER, "--methods", name, tuple(allowed))
        check.integer(OWNER, "--processes", self.processes, least=1)
        if self.short:
            self.seeds = self.seeds[:1]
            folder = Path("runs/results")
            self.table, self.output = folder / "short.csv", folder / "short.md"

    def epochs(self, study: str) -> int:
        """Return the number of epochs of a study."""
        full = (STUDIES | bounds.STUDIES | real.STUDIES)[study].epochs
        return max(4, full // SHORT) if self.short else full

    def jobs(self) -> Iterator[Job]:
        """Yield the trainings, seed by seed."""
        for seed in self.seeds:
            for name, methods in self._studies():
                for method in methods:
                    if method in (self.methods or [method]):
                        yield Job(name, method, seed, self.epochs(name))

    def _studies(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield the chosen studies with their methods."""
        for name, study in STUDIES.items():
            if name in self.studies or not (self.studies or study.gpu):
                yield name, methods_of(study)
        for name in bounds.STUDIES:
            if name in (self.studies or [name]):
                yield name, bounds.METHODS
        for name, real_study in real.STUDIES.items():
            if name in (self.studies or [name]):
                yield name, real_study.methods


@dataclass(frozen=True)
class Job:
    """One training."""

    study: str
    method: str
    seed: int
    epochs: int

    @property
    def real(self) -> bool:
        """Return whether ranks are processes, which need the machine for themselves."""
        return self.study in real.STUDIES

    def like(self, method: str) -> table.Key:
        """Return the key of the training with another method."""
        return self.study, method, self.seed, self.epochs

    def needs(self) -> list[table.Key]:
        """Return the results that determine the bytes of this training."""
        like = METHODS[self.method].like if self.method in METHODS else ""
        return [self.like(name) for name in ("low", "high", like)] if like else []

    def share(self, outcomes: Outcomes) -> float:
        """Return the fraction of low compression with which bytes are those of `like`."""
        if not self.needs():
            return 0.0
        low, high, like = (outcomes[key].megabytes for key in self.needs())
        return (like - high) / (low - high)


def run(job: Job, share: float, device: str) -> Outcome:
    """Train once; called in a process of its own."""
    torch.set_num_threads(1)
    if job.study in bounds.STUDIES:
        return bounds.train(job.study, job.method, job.seed, job.epochs)
    return Training(job.study, job.method, job.seed, job.epochs, share, device).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainings that have no result yet, and write the page."""
    options: Options = read_options(
        Options, list(sys.argv[1:] if arguments is None else arguments), owner=OWNER
    )
    outcomes = table.read(options.table)
    jobs = [job for job in options.jobs() if job.like(job.method) not in outcomes]
    try:
        _fetch(jobs)
    except DataError as error:
        stop(f"{OWNER}: {error}")
    with tqdm(total=len(jobs), unit="training", disable=None) as bar:
        for outcome in _results(jobs, outcomes, options):
            outcomes[table.key(outcome)] = outcome
            table.write(options.table, outcomes.values())
            bar.update()
    page.write(options.output, list(outcomes.values()))
    print(f"page: {options.output}   table: {options.table}")


def _fetch(jobs: Sequence[Job]) -> None:
    """Download data that is missing, once, before processes need it."""
    studies = {job.study for job in jobs} & STUDIES.keys()
    if studies - {"characters"}:
        load("cifar10")
    if "characters" in studies:
        load_tinyshakespeare()


def _results(jobs: Sequence[Job], outcomes: Outcomes, options: Options) -> Iterator[Outcome]:
    """Yield results as they come; `outcomes` must contain those that were yielded before."""
    waiting = [job for job in jobs if not job.real]
    running: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        while waiting or running:
            ready = [job for job in waiting if all(key in outcomes for key in job.needs())]
            for job in ready[: options.processes - len(running)]:
                waiting.remove(job)
                running.add(pool.submit(run, job, job.share(outcomes), options.device))
            if not running:
                names = ", ".join(sorted({METHODS[job.method].like for job in waiting}))
                stop(f"{OWNER}: --methods must contain low, high and {names}, too.")
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    for job in jobs:
        if job.real:
            yield real.train(job.study, job.method, job.seed, job.epochs)


if __name__ == "__main__":
    main()
