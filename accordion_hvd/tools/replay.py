"""The command `accordion-hvd replay`: the decisions of a recorded run."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from accordion_hvd.tools.text import Misuse, number_of, short, table

HistoryRow = dict[str, Any]
COLUMNS = ("step", "window", "layer", "compressor", "norm", "change", "lr", "reason")
WHOLE = ("(batch size)", "(model)")
"""Names of decisions about the entire model, which `Replay` cannot repeat."""


@dataclass(frozen=True)
class History:
    """The decisions of one optimizer.

    Attributes:
        place: the file that has them.
        rows: the decisions, oldest first.
        policy: the policy as text; empty if it is unknown.
        layers: names of the layers that the policy serves, if they are known.
    """

    place: Path
    rows: list[HistoryRow]
    policy: str = ""
    layers: tuple[str, ...] = ()

    @functools.cached_property
    def starts(self) -> dict[str, str]:
        """Return the compressor of each layer before its first decision, if the policy tells it."""
        from accordion_hvd.tools.checkpoints import policy_of, start_of

        policy = policy_of(self.policy) if self.policy else None
        names = dict.fromkeys([*self.layers, *(row["name"] for row in self.rows)])
        found = {name: start_of(policy, name) for name in names if name not in WHOLE}
        return {name: start for name, start in found.items() if start}

    def switches(self) -> list[HistoryRow]:
        """Return the decisions that changed a compressor."""
        before, found = dict(self.starts), []
        for row in self.rows:
            if before.setdefault(row["name"], row["compressor"]) != row["compressor"]:
                found.append(row)
            before[row["name"]] = row["compressor"]
        return found


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--layer", metavar="PATTERN", help="Show layers with such names only, as '*conv*'.")
@click.option("--switches", is_flag=True, help="Show changes of the compressor only.")
@click.option(
    "--optimizer", type=click.IntRange(1), default=1, metavar="N",
    help="Number of the optimizer, if PATH has several.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write all decisions to FILE, for Replay('FILE').",
)  # fmt: skip
def replay(
    path: Path, layer: str | None, switches: bool, optimizer: int, output: Path | None
) -> None:
    """Show the decisions that a policy made in a run.

    PATH is a ledger.json, a result.json of the example scripts, a directory of hvd.save_state,
    a file of this command, or a folder with a ledger.json.

    With --output, another run can repeat the decisions at the same steps:
    compression="Replay('FILE')".
    """
    histories = read(path)
    if optimizer > len(histories):
        raise Misuse(f"--optimizer is {optimizer}, but {path} has {len(histories)} of them.")
    history = histories[optimizer - 1]
    if not history.rows:
        raise click.ClickException(f"{history.place} has no decisions{_of(history)}.")
    shown = history.switches() if switches else history.rows
    names = dict.fromkeys(row["name"] for row in history.rows)
    fitting = fnmatch.filter(names, layer or "*")
    shown = [row for row in shown if row["name"] in fitting]
    click.echo(_summary(history, optimizer, len(histories)))
    if shown:
        click.echo()
        click.echo(_table(shown))
    elif not fitting:
        raise Misuse(f"--layer is {layer!r}, which fits none of {', '.join(names)}.")
    if output is not None:
        click.echo()
        click.echo(_write(history, output))


# ---------------------------------------------------------------------------------------- reading
def read(path: Path) -> list[History]:
    """Return each optimizer's decisions in a file or folder; ClickException if there are none."""
    from accordion_hvd.engine.ledger import files as ledgers

    places = ledgers.ledgers(path) if path.is_dir() else [path]
    places.sort(key=lambda place: (len(place.name), place.name))  # ledger.json, ledger-1.json, ...
    if not places:
        places = [_manifest(path)]
    found: list[History] = []
    for place in places:
        try:
            found += _histories(place, json.loads(place.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise click.ClickException(
                f"{place} has no decisions of a policy ({reason})."
            ) from None
    return found


def _manifest(directory: Path) -> Path:
    from accordion_hvd.engine import checkpoint_files
    from accordion_hvd.tools import checkpoints

    for checkpoint in checkpoints.find(directory, quick=True):
        if not checkpoint.problem:
            return checkpoint.folder / checkpoint_files.MANIFEST
    raise click.ClickException(f"{directory} has neither a ledger.json nor a complete checkpoint.")


def _histories(place: Path, content: Any) -> list[History]:
    if isinstance(content, list):
        return [_history(place, content)]
    if "exchanges" in content:  # a manifest
        policies = [row for row in content["exchanges"] if "history" in row.get("policy", ())]
        if not policies:
            raise ValueError("models are averaged without a policy")
        return [
            _history(place, row["policy"]["history"], row["compression"], row["policy"]["current"])
            for row in policies
        ]
    if "decisions" in content:  # a ledger
        job = content["job"]
        layers = [name for name, facts in job["buckets"].items() if facts["compress"]]
        return [_history(place, content["decisions"], job["policy"], layers)]
    return [_history(place, content["history"], content["compression"] or "")]


def _history(place: Path, rows: Any, policy: str = "", layers: Any = ()) -> History:
    for row in rows:
        for key in ("step", "name", "compressor"):
            if key not in row:
                raise ValueError(f"a row has no {key!r}")
    return History(place, [dict(row) for row in rows], policy, tuple(layers))


# ----------------------------------------------------------------------------------------- showing
def _of(history: History) -> str:
    return f" of {history.policy}" if history.policy else ""


def _summary(history: History, number: int, count: int) -> str:
    rows = history.rows
    place = f"{history.place}, optimizer {number} of {count}" if count > 1 else str(history.place)
    layers = len({row["name"] for row in rows} - set(WHOLE))
    switched = len(history.switches())
    text = f"{number_of(len(rows), 'decision')} about {number_of(layers, 'layer')}"
    first, last = rows[0]["step"], rows[-1]["step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    changes = f"{number_of(switched, 'change')} of a compressor"
    return "\n".join(filter(None, [place, history.policy, f"{text}, {steps}, {changes}"]))


def _table(rows: Sequence[HistoryRow]) -> str:
    cells = [[_cell(row, column) for column in COLUMNS] for row in rows]
    left = [i for i, name in enumerate(COLUMNS) if name in ("layer", "compressor", "reason")]
    return table([COLUMNS, *cells], left, sparse=True)


def _cell(row: HistoryRow, column: str) -> str:
    value: Any = row.get("name" if column == "layer" else column)
    if not _finite(value):
        return ""
    if column == "change":
        return f"{100 * value:.0f} %"
    return short(value) if column in ("norm", "lr") else str(value)


# ----------------------------------------------------------------------------------------- writing
def _write(history: History, path: Path) -> str:
    """Write the decisions about layers for `Replay`; return a sentence.

    The compressor of a layer before its first decision is part of the file if the policy's text
    tells it.

    Raises:
        ClickException: if `Replay` cannot repeat them, or the file cannot be written.
    """
    from accordion_hvd.policies import Replay

    rows = [row for row in history.rows if row["name"] not in WHOLE]
    first = {row["name"]: row["compressor"] for row in reversed(rows)}
    starts = [
        {"step": 0, "name": name, "compressor": start, "reason": "start"}
        for name, start in history.starts.items()
        if first.get(name) != start
    ]
    kept = [{k: x for k, x in row.items() if _finite(x)} for row in [*starts, *rows]]
    try:
        Replay(kept)
        path.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except (ValueError, TypeError) as error:
        raise click.ClickException(f"these decisions cannot be repeated: {error}") from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error}") from None
    left = len(history.rows) - len(rows)
    omitted = f"; {number_of(left, 'decision')} about the entire model cannot be repeated"
    spec = f"Replay({str(path)!r})"
    return f"written: {path}{omitted if left else ''}. To repeat them: compression={spec!r}"


def _finite(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
