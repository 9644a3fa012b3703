"""A first look: train on digits with 4 workers, in PyTorch and in Keras, four ways each.

Without compression, always with low, always with high compression, and with Accordion, which
chooses between the two. Ends with a table and a picture in runs/demo. Settings are those of
configs/demo.yaml; the command line may say others: `scripts/demo.py --seed 2 --epochs 12`.
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

from examples import config, report, results, start  # noqa: E402

RANKS = 4
CONFIG = ["--config", str(HERE.parent.parent / "configs" / "demo.yaml")]


def ways(settings: config.Settings) -> dict[str, config.Settings]:
    """The four runs."""
    levels = settings.compression
    if not isinstance(levels, dict):
        config.stop("demo: compression must be a mapping with low and high.")
    found = {"uncompressed": "none", "low": levels["low"], "high": levels["high"]}
    return {
        way: dataclasses.replace(settings, name=way, compression=compression)
        for way, compression in [*found.items(), ("accordion", levels)]
    }


def work(framework: str, arguments: list[str]) -> None:
    """What each rank does: all ways, one after the other."""
    settings = config.read(__doc__ or "", CONFIG + arguments)
    for way in ways(settings).values():
        output = f"{settings.output}/{settings.name}/{framework}"
        start.run(framework, dataclasses.replace(way, output=output))


def launch(framework: str, arguments: list[str]) -> None:
    """Start the ranks; their words are shown without the launcher's marks."""
    launcher = Path(sys.executable).parent / "horovodrun"
    if not launcher.exists():
        config.stop(f"demo: there is no {launcher.name} beside {sys.executable}; run make setup.")
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
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(re.sub(r"^\[\d+\]<std(out|err)>:", "", line.rstrip()))
        if "test accuracy" in said[-1]:
            print(f"  {said[-1]}", flush=True)
    if process.wait():
        print("\n".join(said[-40:]), file=sys.stderr)
        config.stop(f"demo: {framework} failed; `make doctor` looks for what is missing.")


DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Ranks share the cores of this machine."""

PATHS = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "PYTHONPATH": f"{HERE.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
}


def main(arguments: list[str]) -> None:
    """Run everything, then show it."""
    began = time.perf_counter()
    settings = config.read(__doc__ or "", CONFIG + arguments)
    folder, runs = Path(settings.output) / settings.name, {}
    for framework in report.FRAMEWORKS:
        launch(framework, arguments)
        for way in ways(settings):
            path = folder / framework / way / "result.json"
            runs[framework, way] = results.read_json(path)
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
