"""The file of results: a row per training, which `make results` does not repeat."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.regimes.training import Outcome

Key = tuple[str, str, int, int]
"""Study, method, seed, epochs."""

Outcomes = dict[Key, Outcome]
CONVERT = {"str": str, "int": int, "float": float}


def key(outcome: Outcome) -> Key:
    """Return the key of a result."""
    return outcome.study, outcome.method, outcome.seed, outcome.epochs


def read(path: Path) -> Outcomes:
    """Return the results in a file; none if there is no file."""
    if not path.exists():
        return {}
    kinds = {field.name: CONVERT[str(field.type)] for field in fields(Outcome)}
    with path.open(newline="") as file:
        rows = [{name: kinds[name](row[name]) for name in kinds} for row in csv.DictReader(file)]
    found = [Outcome(**row) for row in rows]  # type: ignore[arg-type]
    return {key(outcome): outcome for outcome in found}


def write(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write results, sorted, such that readers find the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Outcome)], lineterminator="\n")
        table.writeheader()
        for outcome in sorted(outcomes, key=key):
            row = asdict(outcome)
            table.writerow(row | {name: _short(value) for name, value in row.items()})
    part.replace(path)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
