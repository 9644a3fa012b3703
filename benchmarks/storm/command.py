"""Storms: the trainings of `reliability.py storm`; results that exist are not measured again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.netbench import sandbox
from benchmarks.optbench.tasks import TaskName
from benchmarks.storm import job, page
from examples.command_line import words
from examples.data.text import load_tinyshakespeare
from examples.results import write_json


@dataclass(kw_only=True)
class Options:
    """Train with each compression, calmly and in a storm (root).

    Args:
        methods: spec strings over Horovod, `torchft` for its dense DDP, or `torchft SPEC`.
        task: task of the benchmark of optimizers.
        ranks: number of ranks at the beginning, and the largest.
        steps: number of steps.
        pace: least duration of a step in seconds.
        every: number of steps between commits.
        interval: seconds between changes of the ranks; 0 for none.
        lr: highest learning rate of Adam.
        seed: seed of weights, batches and victims.
        limit: seconds of a training that hangs.
        output: folder for results; trainings with results there are not repeated.
    """

    methods: list[str] = words("powersgd:4", "topk:0.01", "wagma:4,10")
    task: TaskName = "characters"
    ranks: int = job.Settings.ranks
    steps: int = job.Settings.steps
    pace: float = job.Settings.pace
    every: int = job.Settings.every
    interval: float = job.Settings.interval
    lr: float = job.Settings.lr
    seed: int = job.Settings.seed
    limit: float = 3600.0
    output: Path = Path("docs/data/storm")

    def settings(self, method: str) -> job.Settings:
        """Return the settings of a stormy training with a method."""
        shared = {field.name: getattr(self, field.name) for field in fields(job.Settings)[1:]}
        return job.Settings(method, **shared)


def run(chosen: Options, arguments: Sequence[str], module: str) -> int:
    """Measure in a sandbox, in which `module` runs with the same arguments; return its status.

    Raises:
        sandbox.Refusal: if this machine has no sandboxes.
        DataError: if the task's text cannot be fetched.
    """
    if not sandbox.inside():
        if chosen.task == "characters":
            load_tinyshakespeare()  # fetched here: the sandbox has no network
        return sandbox.enter(arguments, module)
    return sandbox.run(lambda folder, tag: _measure(chosen, folder))


def _measure(chosen: Options, folder: Path) -> int:
    """Train with all methods, calmly and in a storm; return the exit status."""
    job.prepare(folder)
    failures = 0
    for method in chosen.methods:
        stormy = chosen.settings(method)
        calm = replace(stormy, pace=0.0, interval=0.0)
        for kind, settings in {"storm": stormy, "calm": calm}.items():  # the likelier failure first
            name = f"{re.sub('[ :,]', '-', method)}-{kind}"
            file = chosen.output / f"{name}.json"
            if file.exists():
                continue
            storm = job.Storm(settings, folder / name, chosen.limit)
            found = storm.run()
            print(f"storm: {name}: {page.summary(found)}", flush=True)
            if found["status"] == 0:
                write_json(file, found)
            else:
                failures += 1
                print((storm.folder / "output").read_text()[-4000:], flush=True)
    return 1 if failures else 0
