"""Describe what the checkpoints of `save_state` hold, as text."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accordion_hvd.tools.text import number_of, short, size, table

if TYPE_CHECKING:
    from accordion_hvd.policies import Policy

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
