"""The fault matrix: `make faults` and docs/reliability.md.

Each case is a small training in which one rank meets a fault, over each launcher and in each
framework where it applies. Results are kept in a JSON file after each launch, so that an
interrupted run continues where it ended; cases that are named are tried again.
"""

from __future__ import annotations

import io
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from accordion_hvd import check
from accordion_hvd.engine import checkpoint_files
from benchmarks.faults import launch, page, verdict
from benchmarks.faults.cases import CASES, Case
from benchmarks.netbench.bench import machine, say
from examples.command_line import words
from examples.results import read_json, write_json

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Try what ranks do when one of them fails, and write the page of the results.

    Args:
        cases: cases to try, even if they have a result; by default those that have none.
        launchers: launchers to use; by default all.
        frameworks: frameworks to use; by default both.
        output: file of the results.
        page: page to write.
    """

    cases: list[str] = words()
    launchers: list[Literal["horovodrun", "mpirun", "torchrun"]] | None = None
    frameworks: list[Literal["PyTorch", "Keras"]] | None = None
    output: Path = Path("runs/faults/faults.json")
    page: Path = Path("docs/reliability.md")

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        for name in self.cases:
            check.one_of("reliability.py", "case", name, tuple(CASES))


def run(chosen: Options) -> None:
    """Try the requested cases and write the page once every case has a result."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs would ignore it
    found = read_json(chosen.output) if chosen.output.is_file() else {"rows": {}}
    found["machine"] = machine()
    for case, framework, launcher in tqdm(_missing(chosen, found["rows"]), unit="launch"):
        row = attempt(case, framework, launcher, found["rows"])
        key = _key(case, framework, launcher)
        found["rows"][key] = row
        write_json(chosen.output, found)
        say(f"faults: {key}: {row['happened']}. {row['problem']}")
    page.write(found, chosen.page)


def _missing(chosen: Options, rows: dict[str, Row]) -> list[tuple[Case, str, str]]:
    """Return the requested cases with their frameworks and launchers."""
    cases = [CASES[name] for name in chosen.cases] or list(CASES.values())
    return [
        (case, framework, launcher)
        for case in cases
        for framework, launcher in case.runs()
        if chosen.launchers is None or launcher in chosen.launchers
        if chosen.frameworks is None or framework in chosen.frameworks
        if chosen.cases or _key(case, framework, launcher) not in rows
    ]


def _key(case: Case, framework: str, launcher: str) -> str:
    return f"{case.name}/{framework}/{launcher}"


def attempt(case: Case, framework: str, launcher: str, rows: dict[str, Row]) -> Row:
    """Launch the ranks of a case, twice if they resume, and judge what happened."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        launches = [launch.run(case, framework, launcher, folder)]
        if case.resumed_on:
            damage(case.action, folder / "checkpoints")
            launches.append(launch.run(case, framework, launcher, folder, phase=1))
    without = rows.get(f"none/{framework}/{launcher}", {}).get("checksums", {})
    row = verdict.judge(case, launches, without.get(str(case.ranks), []))
    if not case.place and not row["problem"]:
        row["checksums"] = {str(case.ranks): verdict.checksums(launches[-1])}
    if row["problem"]:
        row["output"] = "\n".join(found.output[-6000:] for found in launches)
    return {**row, "took": round(time.monotonic() - began, 1)}


# ---------------------------------------------------------------------------- damage to checkpoints
def damage(kind: str, checkpoints: Path) -> None:
    """Damage the newest checkpoint, or all of them."""
    folders = sorted(checkpoints.glob("state-*"), reverse=True)
    for folder in folders if kind == "all" else folders[:1]:
        files = sorted(folder.glob("rank-*.npz"))
        DAMAGES.get(kind, _none)(files)


def _none(files: list[Path]) -> None:
    pass


def _cut(files: list[Path]) -> None:
    content = files[1].read_bytes()
    files[1].write_bytes(content[: len(content) // 2])


def _swap(files: list[Path]) -> None:
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def _rewritten(change: Callable[[Row], Any], files: list[Path]) -> None:
    """Change a manifest, whose checksum fits then."""
    manifest = checkpoint_files.read_manifest(files[0].parent)
    change(manifest)
    checkpoint_files.write_manifest(files[0].parent, manifest)


def _claims_much(files: list[Path]) -> None:
    """Replace a rank's file by a small one that claims an array of 12 GB; the checksums fit."""
    header, content = io.BytesIO(), io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (3 << 30,)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("0/0/state/error.npy", header.getvalue())
    row = checkpoint_files.write_file(files[1], content.getvalue())
    _rewritten(lambda manifest: manifest["files"].__setitem__(1, row), files)


def _saved(manifest: Row) -> Row:
    return manifest["exchanges"][0]


DAMAGES: dict[str, Callable[[list[Path]], Any]] = {
    "lacking": partial(_rewritten, lambda manifest: _saved(manifest)["policy"].pop("history")),
    "compressor": partial(_rewritten, lambda m: _saved(m).update(compression="Fixed(QSGD(4))")),
    "shape": partial(_rewritten, lambda m: _saved(m)["buckets"][0].update(shape=[3, 5])),
    "nested": lambda files: (files[0].parent / "manifest.json").write_text("[" * 100_000),
    "format": lambda files: (files[0].parent / "manifest.json").write_text('{"format": 7}'),
    "claims much": _claims_much,
    "cut": _cut,
    "all": _cut,
    "swapped": _swap,
    "missing": lambda files: files[1].unlink(),
}
"""Damages of a checkpoint, as functions of the ranks' files."""
