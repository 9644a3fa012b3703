"""First example: train on digits with four workers, in PyTorch and Keras.

Compares six configurations in each framework: no compression; low, middle and high compression
throughout; low compression until the learning rate falls and high compression afterwards; and
Accordion, which chooses between low and high for each layer. Writes a table and a picture to
runs/demo. The settings are those of configs/demo.yaml; arguments override them:
`scripts/demo.py --seed 2 --epochs 12`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from accordion_hvd import StepSchedule, parse  # noqa: E402
from examples import config, report, results, start  # noqa: E402

RANKS = 4
CONFIG = ["--config", str(HERE.parent.parent / "configs" / "demo.yaml")]
MIDDLE = "powersgd:2"
"""Compression with about as many bytes as Accordion, but constant over layers and epochs."""


def configurations(settings: config.Settings) -> dict[str, config.Settings]:
    """Return the settings of the six runs by name."""
    levels = settings.compression
    if not isinstance(levels, dict):
        config.stop("demo: compression must be a mapping with low and high.")
    compressions = {
        "uncompressed": "none",
        "low": levels["low"],
        "middle": MIDDLE,
        "high": levels["high"],
        "schedule": schedule(settings, levels["low"], levels["high"]),
        "accordion": levels,
    }
    return {
        name: dataclasses.replace(settings, name=name, compression=compression)
        for name, compression in compressions.items()
    }


def schedule(settings: config.Settings, low: str, high: str) -> str:
    """Return the schedule that switches from low to high when the learning rate first falls."""
    if not settings.drops:
        config.stop(
            f"demo: schedule is {settings.schedule!r}, but must be 'drops': one of the runs "
            "switches from low to high when the learning rate falls."
        )
    return repr(StepSchedule({0: parse(low), min(settings.drops): parse(high)}))


def work(framework: str, arguments: list[str]) -> None:
    """Train one configuration after the other; every rank runs this function."""
    settings = config.read(__doc__ or "", CONFIG + arguments)
    for chosen in configurations(settings).values():
        output = f"{settings.output}/{settings.name}/{framework}"
        start.run(framework, dataclasses.replace(chosen, output=output))


def launch(framework: str, arguments: list[str]) -> None:
    """Start the ranks; show their output without the launcher's prefixes."""
    launcher = Path(sys.executable).parent / "horovodrun"
    if not launcher.exists():
        config.stop(f"demo: {launcher.name} was not found beside {sys.executable}; run make setup.")
    print(f"{report.FRAMEWORKS[framework]}, {RANKS} workers ...", flush=True)
    process = subprocess.Popen(
        [
            launcher,
            "--gloo",
            "-np",
            str(RANKS),
            sys.executable,
            HERE,
            "--work",
            framework,
            *arguments,
        ],
        env={**DEFAULTS, **os.environ, **PATHS},
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
        config.stop(f"demo: {framework} failed; run `make doctor` to find the cause.")


DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Environment of ranks, which share the cores of this machine."""

PATHS = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "PYTHONPATH": f"{HERE.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
}


def main(arguments: list[str]) -> None:
    """Run all configurations, then show the results."""
    began = time.perf_counter()
    settings = config.read(__doc__ or "", CONFIG + arguments)
    chosen = configurations(settings)
    folder, runs = Path(settings.output) / settings.name, {}
    for framework in report.FRAMEWORKS:
        launch(framework, arguments)
        for name in chosen:
            path = folder / framework / name / "result.json"
            runs[framework, name] = results.read_json(path)
    rows = report.table(runs)
    (folder / "table.md").write_text(report.as_markdown(rows) + "\n")
    report.picture(runs, folder / "demo.png")
    print(f"\n{report.as_text(rows)}\n\nratio: bytes of uncompressed training / bytes sent")
    print(f"picture: {folder / 'demo.png'}   table: {folder / 'table.md'}")
    print(f"results: {folder}/*/*/result.json   {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
