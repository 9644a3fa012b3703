"""The command `accordion-hvd inspect`: what a job has recorded."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        advice: sentences about the job, if its ledger is at hand.
    """

    place: Path
    rows: list[HistoryRow]
    policy: str = ""
    layers: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

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


@click.command("inspect", short_help="Show what a ledger, checkpoints or decisions hold.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--quick", is_flag=True, help="Read manifests and sizes, but not the ranks' files.")
@click.option("--decisions", is_flag=True, help="Show the decisions of checkpoints, too.")
@click.option("--switches", is_flag=True, help="Show decisions that changed a compressor only.")
@click.option("--layer", metavar="PATTERN", help="Show layers with such names only, as '*conv*'.")
@click.option(
    "--optimizer", type=click.IntRange(1), default=1, metavar="N",
    help="Show decisions of the Nth optimizer, if there are several.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write all decisions to FILE, for Replay('FILE').",
)  # fmt: skip
def inspect(
    path: Path, quick: bool, decisions: bool, switches: bool, layer: str | None, optimizer: int,
    output: Path | None,
) -> None:  # fmt: skip
    """Show what a job has recorded in PATH, without a framework and on one rank.

    PATH is a directory of hvd.save_state or one checkpoint in it, a ledger.json or a folder with
    one, a result.json of the example scripts, or a file that --output has written.

    The details of checkpoints are those of the newest complete one, which hvd.load_state would
    restore; all ranks' files are compared with their checksums. Another run can repeat decisions
    that --output has written: compression="Replay('FILE')".

    The exit status is 1 if a checkpoint is damaged, or if nothing is found.
    """
    from accordion_hvd.engine.checkpoint_files import MANIFEST
    from accordion_hvd.engine.ledger import files as ledgers
    from accordion_hvd.tools import checkpoints

    places = ledgers.ledgers(path) if path.is_dir() else [path]
    places.sort(key=lambda place: (len(place.name), place.name))  # ledger.json, ledger-1.json, ...
    found = checkpoints.find(path, quick) if path.is_dir() else []
    complete = next((each for each in found if not each.problem), None)
    if found:
        click.echo(checkpoints.described(found, complete, quick))
    elif not places:
        raise click.ClickException(
            f"{path} has nothing to inspect: neither a ledger.json, nor manifest.json, nor a "
            "folder such as state-00001."
        )
    elif quick:
        raise Misuse(f"--quick is for checkpoints, of which {path} has none.")
    if complete and not places and (decisions or switches or layer or output):
        places = [complete.folder / MANIFEST]
    if places:
        if found:
            click.echo()
        histories = read(places)
        if optimizer > len(histories):
            raise Misuse(f"--optimizer is {optimizer}, but {path} has {len(histories)} of them.")
        history = histories[optimizer - 1]
        _show(history, optimizer, len(histories), layer, switches)
        if output is not None:
            click.echo(f"\n{_write(history, output)}")
    if any(each.problem for each in found):
        raise click.ClickException(checkpoints.verdict(found, complete))


def _show(history: History, number: int, count: int, layer: str | None, switches: bool) -> None:
    """Print the decisions of one of `count` optimizers."""
    if not history.rows and not history.advice:
        of = f" of {history.policy}" if history.policy else ""
        raise click.ClickException(f"{history.place} has no decisions{of}.")
    names = dict.fromkeys(row["name"] for row in history.rows)
    fitting = fnmatch.filter(names, layer or "*")
    shown = history.switches() if switches else history.rows
    shown = [row for row in shown if row["name"] in fitting]
    click.echo(_summary(history, number, count))
    if shown:
        click.echo(f"\n{_table(shown)}")
    elif layer and not fitting:
        raise Misuse(f"--layer is {layer!r}, which fits none of {', '.join(names)}.")


# ---------------------------------------------------------------------------------------- reading
def read(places: Sequence[Path]) -> list[History]:
    """Return each optimizer's decisions in these files; ClickException if one has none."""
    found: list[History] = []
    for place in places:
        try:
            found += _histories(place, json.loads(place.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            told = f"{place} has no decisions of a policy ({type(error).__name__}: {error})."
            raise click.ClickException(told) from None
    return found


def _histories(place: Path, content: Any) -> list[History]:
    from accordion_hvd.engine.ledger import files, summary

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
        job = files.load(place)["job"]
        layers = [name for name, facts in job["buckets"].items() if facts["compress"]]
        history = _history(place, content["decisions"], job["policy"], layers)
        return [replace(history, advice=tuple(summary.advice(summary.summarize(content))))]
    return [_history(place, content["history"], content["compression"] or "")]


def _history(place: Path, rows: Any, policy: str = "", layers: Any = ()) -> History:
    for row in rows:
        for key in ("step", "name", "compressor"):
            if key not in row:
                raise ValueError(f"a row has no {key!r}")
    return History(place, [dict(row) for row in rows], policy, tuple(layers))


# ----------------------------------------------------------------------------------------- showing
def _summary(history: History, number: int, count: int) -> str:
    """Return the file, the policy, what a ledger advises, and how many decisions there are."""
    rows = history.rows
    place = f"{history.place}, optimizer {number} of {count}" if count > 1 else str(history.place)
    layers = len({row["name"] for row in rows} - set(WHOLE))
    text = f"{number_of(len(rows), 'decision')} about {number_of(layers, 'layer')}"
    if rows:
        first, last = rows[0]["step"], rows[-1]["step"]
        text += f", step {first}" if first == last else f", steps {first} to {last}"
    text += f", {number_of(len(history.switches()), 'change')} of a compressor"
    return "\n".join(filter(None, [place, history.policy, *history.advice, text]))


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
