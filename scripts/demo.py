"""First example: train on digits with four workers, in PyTorch and Keras.

Compares five configurations in each framework: no compression; low and high compression throughout;
Accordion and Displacement, which choose between low and high for each layer. Writes a table and a
picture to runs/demo. The settings are those of configs/demo.yaml; arguments override them:
`scripts/demo.py --seed 4 --epochs 12`. `--simulated true --seeds 8` simulates the workers, in
PyTorch, and compares two more configurations: middle compression throughout, and low compression
until the learning rate falls and high compression afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from accordion_hvd import Displacement, StepSchedule, check, parse  # noqa: E402
from examples import command_line, config, launcher, report, results, start, tables  # noqa: E402

RANKS = 4
CONFIG = ["--config", str(HERE.parent.parent / "configs" / "demo.yaml")]
MIDDLE = "powersgd:2"
"""Compression with about as many bytes as Accordion, but constant over layers and epochs."""

STUDY = ("middle", "schedule")
"""Configurations that only simulated workers train."""

Runs = dict[tuple[str, str], list[results.Row]]


@dataclass
class Settings(config.Settings):
    """The demo.

    Args:
        seeds: number of seeds in PyTorch, beginning with `seed`; Keras trains with one seed.
        simulated: whether to simulate the workers in one process per core, without Keras.
    """

    seeds: int = 1
    simulated: bool = False

    def __post_init__(self) -> None:
        """Validate the settings.

        Raises:
            ValueError: if a value is invalid.
        """
        super().__post_init__()
        check.integer("settings", "seeds", self.seeds, least=1)

    def all_seeds(self, framework: str) -> range:
        """Return the seeds of a framework's runs."""
        return range(self.seed, self.seed + (1 if framework == "keras" else self.seeds))

    def place(self, framework: str, seed: int) -> str:
        """Return the folder of the runs of a seed."""
        return f"{self.output}/{self.name}/{framework}/seed-{seed}"


def configurations(settings: config.Settings) -> dict[str, config.Settings]:
    """Return the settings of all runs of a seed by name."""
    levels = settings.compression
    if not isinstance(levels, dict):
        command_line.stop("demo: compression must be a mapping with low and high.")
    low, high = levels["low"], levels["high"]
    compressions = {
        "uncompressed": "none",
        "low": low,
        "middle": MIDDLE,
        "high": high,
        "schedule": schedule(settings, low, high),
        "accordion": levels,
        "displacement": repr(Displacement(parse(low), parse(high))),
    }
    return {
        name: dataclasses.replace(settings, name=name, compression=compression)
        for name, compression in compressions.items()
    }


def schedule(settings: config.Settings, low: str, high: str) -> str:
    """Return the schedule that switches from low to high when the learning rate first falls."""
    if not settings.drops:
        command_line.stop(
            f"demo: schedule is {settings.schedule!r}, but must be 'drops': one of the runs "
            "switches from low to high when the learning rate falls."
        )
    return repr(StepSchedule({0: parse(low), min(settings.drops): parse(high)}))


def read(arguments: list[str]) -> Settings:
    """Return the settings of the command line."""
    return config.read(__doc__ or "", CONFIG + arguments, Settings)


# ---------------------------------------------------------------------------------- real workers
def work(framework: str, arguments: list[str]) -> None:
    """Train one configuration after the other; every rank runs this function."""
    settings = read(arguments)
    for seed in settings.all_seeds(framework):
        for name, chosen in configurations(settings).items():
            if name not in STUDY:
                place = settings.place(framework, seed)
                start.run(framework, dataclasses.replace(chosen, output=place, seed=seed))


@contextlib.contextmanager
def horovod(folder: Path) -> Iterator[Callable[[], None]]:
    """Build Horovod in the background if it is missing; yield a function that waits for it."""
    if importlib.util.find_spec("horovod"):
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build_horovod.txt"
    print(f"Horovod, for Keras, is being built in the meantime; see {log}.", flush=True)
    # Ranks wait for each other, so that the compiler takes what they leave of the cores.
    command = ["nice", sys.executable, HERE.with_name("setup_env.py"), "horovod"]
    with log.open("w") as output:
        build = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def wait() -> None:
        if build.wait():
            print(log.read_text(), file=sys.stderr)
            command_line.stop("demo: Horovod was not built, so that Keras cannot train.")

    try:
        yield wait
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(build.pid, signal.SIGTERM)  # with its compilers


def launch(framework: str, arguments: list[str]) -> None:
    """Start the ranks; show their output without the launcher's prefixes."""
    print(f"{report.FRAMEWORKS[framework]}, {RANKS} workers ...", flush=True)
    start_ranks = launcher.torchrun if framework == "torch" else launcher.command
    try:
        command = start_ranks(RANKS, [HERE, "--work", framework, *arguments])
    except launcher.NoLauncher as error:
        command_line.stop(f"demo: {error}")
    process = subprocess.Popen(
        command,
        env=launcher.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(re.sub(r"^\[\d+\]<std(out|err)>:", "", line.rstrip()))
        if "test accuracy" in lines[-1]:
            print(f"  {lines[-1]}", flush=True)
    if process.wait():
        print("\n".join(lines[-40:]), file=sys.stderr)
        command_line.stop(f"demo: {framework} failed; run `make doctor` to find the cause.")


# ----------------------------------------------------------------------------- simulated workers
def simulate(settings: config.Settings) -> str:
    """Train one configuration on simulated workers; return a line about the result."""
    import torch

    from examples import simulated_training

    torch.set_num_threads(1)
    row = simulated_training.train(settings, start.load_for(settings), RANKS)
    return f"  seed {settings.seed}, {start.summary(row)}"


def simulate_all(settings: Settings) -> None:
    """Train all configurations of all seeds, one process per core."""
    from tqdm import tqdm

    print(f"PyTorch, {RANKS} simulated workers ...", flush=True)
    runs = [
        dataclasses.replace(chosen, output=settings.place("simulated", seed), seed=seed)
        for seed in settings.all_seeds("simulated")
        for chosen in configurations(settings).values()
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for line in tqdm(pool.imap_unordered(simulate, runs), total=len(runs), unit="training"):
            tqdm.write(line)


# ----------------------------------------------------------------------------------- the results
def collect(settings: Settings, framework: str) -> Runs:
    """Return the results of a framework."""
    names = [name for name in configurations(settings) if settings.simulated or name not in STUDY]
    folders = [Path(settings.place(framework, seed)) for seed in settings.all_seeds(framework)]
    return {
        (framework, name): [results.read_json(x / name / "result.json") for x in folders]
        for name in names
    }


def main(arguments: list[str]) -> None:
    """Run all configurations, then show the results."""
    began = time.perf_counter()
    settings = read(arguments)
    configurations(settings)  # ends the process if they are invalid
    folder = Path(settings.output) / settings.name
    runs: Runs = {}
    if settings.simulated:
        simulate_all(settings)
        runs |= collect(settings, "simulated")
    else:
        with horovod(folder) as is_built:
            launch("torch", arguments)
            is_built()
            launch("keras", arguments)
        runs |= collect(settings, "torch") | collect(settings, "keras")
    table = report.table(runs)
    (folder / "table.md").write_text(tables.as_markdown(table) + "\n")
    report.picture(runs, folder / "demo.png")
    print(f"\n{tables.as_text(table)}\n\nratio: bytes of uncompressed training / bytes sent")
    print(f"picture: {folder / 'demo.png'}   table: {folder / 'table.md'}")
    print(f"results: {folder}/*/*/*/result.json   {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
