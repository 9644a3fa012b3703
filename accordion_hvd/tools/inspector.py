"""The command `accordion-hvd inspect`: what a job has recorded."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accordion_hvd.tools.text import Misuse, number_of, short, size, table

if TYPE_CHECKING:
    from accordion_hvd.policies import Policy

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

    places = ledgers.ledgers(path) if path.is_dir() else [path]
    places.sort(key=lambda place: (len(place.name), place.name))  # ledger.json, ledger-1.json, ...
    found = find(path, quick) if path.is_dir() else []
    complete = next((each for each in found if not each.problem), None)
    if found:
        click.echo(described(found, complete, quick))
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
        raise click.ClickException(verdict(found, complete))


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


# -------------------------------------------------------------------------------------- checkpoints
MOST_RANKS = 16
"""Largest number of ranks with a row each."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a directory.

    Attributes:
        manifest: its manifest; empty if that cannot be read.
        problem: why it cannot be used; empty if it is complete.
    """

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())

    def row(self) -> list[str]:
        steps = [str(row.get("steps")) for row in self.manifest.get("exchanges", ())]
        ranks = number_of(self.manifest["ranks"], "rank") if self.manifest else ""
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.folder.stat().st_mtime))
        state = f"damaged: {self.problem}" if self.problem else "complete"
        step = f"step {', '.join(dict.fromkeys(steps))}" if steps else ""
        return [self.folder.name, step, ranks, size(self.bytes), written, state]


def described(found: Sequence[Checkpoint], complete: Checkpoint | None, quick: bool) -> str:
    """Return a list of checkpoints, and what the complete one holds.

    If `quick`, the ranks' files are not read.
    """
    listed = table([each.row() for each in found], left=(0, 2, 4, 5))
    return listed if complete is None else f"{listed}\n\n{_details(complete, quick)}"


def find(directory: Path, quick: bool) -> list[Checkpoint]:
    """Return the checkpoints of a `save_state` directory, newest first, or the one in a folder.

    If `quick`, only the sizes of the ranks' files are compared, not their checksums.
    """
    from accordion_hvd.engine import checkpoint_files as files

    folders = files.folders(directory)
    if not folders and any(directory.glob("rank-*-of-*.npz*")):
        folders = [directory]
    return [_examined(folder, quick) for folder in folders]


def _examined(folder: Path, quick: bool) -> Checkpoint:
    from accordion_hvd.engine import checkpoint_files as files

    if not (folder / files.MANIFEST).exists():
        return Checkpoint(folder, problem="it was not written to its end")
    try:
        manifest, problem = files.examine(folder)
    except ValueError as error:  # of another format
        return Checkpoint(folder, problem=str(error))
    if not problem and not quick:
        problem = files.problem_of(folder, manifest, range(manifest["ranks"]))
    return Checkpoint(folder, manifest, problem)


def verdict(found: Sequence[Checkpoint], complete: Checkpoint | None) -> str:
    """Return a sentence about the damaged checkpoints, and about what `load_state` does."""
    damaged = [each for each in found if each.problem]
    text = "; ".join(f"{each.folder.name} is damaged: {each.problem}" for each in damaged)
    if complete is None:
        return f"{text}. No checkpoint is complete."
    if any("privacy" in row.get("policy", ()) for row in complete.manifest["exchanges"]):
        after = "load_state restores no older one, which would miss releases of the privacy budget"
        return f"{text}; {after}."
    return f"{text}. load_state restores {complete.folder.name}."


# ----------------------------------------------------------------------------------------- details
@dataclass(frozen=True)
class Kept:
    """The state of one layer on one rank.

    Attributes:
        bytes: bytes of all tensors.
        square: squared norm of the residuals; None if there are none.
        levels: the levels that have a state.
    """

    bytes: int
    square: float | None
    levels: frozenset[int]


def _details(found: Checkpoint, quick: bool) -> str:
    rows, ranks = found.manifest["exchanges"], found.manifest["ranks"]
    parts = [f"{found.folder.name}, written by accordion_hvd {found.manifest['version']}"]
    for number, about in enumerate(rows):
        title = f"optimizer {number + 1} of {len(rows)}: " if len(rows) > 1 else ""
        parts.append(title + _facts(about))
        read = () if quick else range(ranks)
        kept = [_measure(about, _load(found.folder, ranks, number, rank)) for rank in read]
        if "buckets" in about:
            parts.append(_layers(about, kept))
        if kept:
            parts.append(_per_rank(kept))
    return "\n\n".join(parts)


def _facts(about: dict[str, Any]) -> str:
    name = about.get("compression") or about.get("averaging") or about.get("kind") or "unknown"
    policy = about.get("policy") or {}
    facts = [f"after step {about.get('steps')}"]
    if about.get("skipped"):
        facts.append(f"{number_of(about['skipped'], 'step')} skipped")
    facts.append(number_of(len(about.get("tensors", ())), "tensor"))
    if about.get("residual_dtype", "float32") != "float32":
        facts.append(f"residuals in {about['residual_dtype']}")
    if hosts := about.get("machines"):
        facts.append(number_of(len(hosts), "host"))
    if history := policy.get("history"):
        facts.append(f"{number_of(len(history), 'decision')} (--decisions shows them)")
    if privacy := policy.get("privacy"):
        releases = sum(row["count"] for row in privacy["releases"])
        spent = f"{number_of(releases, 'release')} of a privacy budget"
        facts.append(f"{spent} (epsilon {privacy['epsilon']:g}, delta {privacy['delta']:g})")
    return f"{name}\n{', '.join(facts)}"


def _layers(about: dict[str, Any], kept: Sequence[Sequence[Kept]]) -> str:
    policy, served = policy_of(about["compression"]), about["policy"]["current"]
    rows = [["layer", "compressor", "also kept", "shape", "steps", "state", "residual"]]
    for bucket, *states in zip(about["buckets"], *kept, strict=True):
        name, level = bucket["name"], bucket["level"]
        others = sorted(frozenset[int]().union(*(state.levels for state in states)) - {level})
        now, *inactive = (
            compressor_at(policy, name, number) or f"level {number}" for number in (level, *others)
        )
        shape = " x ".join(map(str, bucket["shape"])) or "scalar"
        cells = [name, now if name in served else "exempt", ", ".join(inactive), shape]
        rows.append([*cells, str(bucket["served"]), *_sums(states)])
    return table(rows, left=(0, 1, 2), sparse=True)


def _sums(states: Sequence[Kept]) -> list[str]:
    """Return the bytes of a layer's states on all ranks, and the mean norm of its residuals."""
    norms = [math.sqrt(state.square) for state in states if state.square is not None]
    kept = size(sum(state.bytes for state in states)) if states else ""
    return [kept, short(statistics.fmean(norms)) if norms else ""]


def _per_rank(kept: Sequence[Sequence[Kept]]) -> str:
    sizes = [sum(state.bytes for state in states) for states in kept]
    squares = [[x.square for x in states if x.square is not None] for states in kept]
    norms = [math.sqrt(sum(each)) for each in squares]
    if len(kept) <= MOST_RANKS:
        numbers = enumerate(zip(sizes, norms, strict=True))
        rows = [[str(rank), size(count), short(norm)] for rank, (count, norm) in numbers]
    else:
        some: dict[str, Any] = {"least": min, "median": statistics.median, "most": max}
        rows = [[name, size(of(sizes)), short(of(norms))] for name, of in some.items()]
    rows = [["rank", "state", "residual"], *rows]
    return table(rows if any(squares) else [row[:2] for row in rows])


def _measure(about: dict[str, Any], arrays: dict[str, Any]) -> list[Kept]:
    """Return the state of each layer; of other objects than gradient exchanges, one row."""
    import numpy as np

    from accordion_hvd.engine.checkpoint import read_named

    def norm2(residuals: Sequence[Any]) -> float | None:
        squares = (np.square(x, dtype=np.float64).sum() for x in residuals)
        return float(sum(squares)) if residuals else None

    if "buckets" not in about:
        return [Kept(sum(x.nbytes for x in arrays.values()), None, frozenset())]
    return [
        Kept(
            sum(tensor.nbytes for tensor in state.tensors().values()),
            norm2(state.residuals()),
            frozenset(state.states),
        )
        for state in read_named(arrays, about)
    ]


def _load(folder: Path, ranks: int, number: int, rank: int) -> dict[str, Any]:
    """Return the arrays that a rank has saved for an optimizer, by their names."""
    from accordion_hvd.engine import checkpoint_files as files

    return files.read_arrays(files.rank_file(folder, rank, ranks), f"{number}/")


# ---------------------------------------------------- policies as ledgers and checkpoints name them
def policy_of(text: str) -> Policy | None:
    """Return a new policy like the one whose repr is `text`; None if it cannot be made of it."""
    from accordion_hvd import optimizers, policies, resolve
    from accordion_hvd.core import spec_strings

    names = {name.lower(): getattr(optimizers, name) for name in optimizers.NATIVE}
    names |= resolve.names()
    del names["replay"]  # may read files
    try:
        found: Any = spec_strings.parse(text, names)
    except ValueError:
        return None
    return found if isinstance(found, policies.Policy) else None


def compressor_at(policy: Policy | None, name: str, level: int) -> str:
    """Return the compressor of a layer at a level as text; empty if it is unknown."""
    if policy is None:
        return ""
    try:
        levels: tuple[Any, ...] = policy.levels(name)
    except ValueError:  # of a policy that knows its layers by name
        return ""
    if policy.gate is not None:
        levels += policy.gate.fallbacks
    return repr(levels[level]) if level < len(levels) else ""


def start_of(policy: Policy | None, name: str) -> str:
    """Return the compressor of a layer before the first decision; empty if it is unknown."""
    return "" if policy is None else compressor_at(policy, name, policy.start(name))
