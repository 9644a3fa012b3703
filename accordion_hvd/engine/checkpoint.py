"""Checkpoints of the state that optimizers' own checkpoints omit: residuals, levels, policy.

A checkpoint has one file per rank (NumPy arrays, no pickles) and a manifest. On another number of
ranks, the sum of the residuals over the ranks stays the same: each new rank gets an equal part.
For compressed optimizers, the update rule defines the conversion (`Compressor.rescale`). On another
number of ranks or other hosts, sharded residuals (`TwoLevel`) are carried as residuals of full
tensors.
"""

from __future__ import annotations

import abc
import functools
import io
import json
import numbers
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import accordion_hvd
from accordion_hvd import check
from accordion_hvd._renamed import current
from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info
from accordion_hvd.engine.bucket_state import BucketState
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.saved_state import SavedState, of_parts, rescale_from_one, rescaled
from accordion_hvd.ops import backend
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule

FORMAT = 1
Loader = Callable[[int], dict[str, np.ndarray]]
_live: list[weakref.ref[Any]] = []


class Keeper(abc.ABC):
    """Interface of objects other than exchanges that save and restore their own state."""

    communicator: Communicator

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the values that are equal on all ranks; "tensors" lists the tensors' names."""

    @abc.abstractmethod
    def export(self) -> dict[str, np.ndarray]:
        """Return this rank's arrays.

        Raises:
            ValueError: if the state cannot be saved now.
        """

    @abc.abstractmethod
    def restore(self, row: dict[str, Any], load: Loader, ranks: int) -> None:
        """Restore a saved state.

        Args:
            row: the saved result of `describe`.
            load: function that returns the saved arrays of a rank.
            ranks: number of ranks that saved.

        Raises:
            ValueError: if the saved state does not fit; the message has the reason.
        """


def register(owner: Any) -> None:
    """Register `owner.exchange` to be saved and restored while `owner` is alive.

    Before the exchange is restored, `owner.expect(names)` is called with the names of the tensors
    of the saved exchange, because the exchange may not exist before the first step.
    """
    _live.append(weakref.ref(owner))


def owners() -> list[Any]:
    """Return the live owners of this process, in the order of their registration."""
    _live[:] = [reference for reference in _live if reference() is not None]
    return [owner for reference in _live if (owner := reference()) is not None]


def save_state(directory: str | Path, only: Sequence[Any] = ()) -> None:
    """Write the state of all exchanges of this job; collective.

    Args:
        directory: directory on a file system that all ranks share; created if it does not exist.
        only: distributed optimizers to save; default: all of this process.

    Raises:
        RuntimeError: on every rank, if a rank cannot write, or if there is nothing to save.
    """
    chosen = [owner.exchange for owner in _chosen(only)]
    directory = Path(directory)
    lead = chosen[0].communicator
    _on_all_ranks(lead, lambda: _write(directory, chosen), f"writing to {directory}")
    if lead.rank == 0:
        manifest = {
            "format": FORMAT,
            "version": accordion_hvd.__version__,
            "ranks": lead.size,
            "exchanges": [describe(exchange) for exchange in chosen],
        }
        _replace(directory / "manifest.json", json.dumps(manifest, indent=1).encode())
    _on_all_ranks(lead, lambda: None, "")


def load_state(directory: str | Path, only: Sequence[Any] = ()) -> None:
    """Restore a state written by `save_state`, on any number of ranks; collective.

    Args:
        directory: directory of the saved state.
        only: distributed optimizers to restore, in the order in which they were saved; default: all
            of this process.

    Raises:
        RuntimeError: on every rank, if files are missing or do not fit; the message has the reason.
    """
    chosen = _chosen(only)
    lead = chosen[0].communicator
    _on_all_ranks(lead, lambda: _read(Path(directory), chosen), f"reading from {directory}")


def describe(exchange: Any) -> dict[str, Any]:
    """Return the values that are equal on all ranks."""
    if isinstance(exchange, Keeper):
        return exchange.describe()
    return {
        "policy": exchange.policy.state_dict(),
        "compression": repr(exchange.policy),
        "steps": exchange.steps,
        "skipped": exchange.skipped,
        "machines": exchange.communicator.hosts,
        "tensors": [tensor.name for tensor in exchange.tensors],
        "buckets": [
            {
                "name": s.bucket.name,
                "seed": s.name,
                "shape": list(s.bucket.shape),
                "level": s.level,
                "served": exchange.counted - s.served_from,
                "turns": [list(turn) for turn in s.served_by_level.items()],
            }
            for s in exchange.bucket_states
        ],
    }


def saved_of(exchange: Exchange) -> list[SavedState]:
    """Return this rank's state of each bucket, in NumPy."""
    return [entry.saved().map(exchange.xp.to_numpy) for entry in exchange.bucket_states]


def named(saved: Sequence[SavedState], prefix: str = "") -> dict[str, Any]:
    """Return all tensors by their names in files, `{bucket}/{name}` (`SavedState.tensors`)."""
    return {f"{prefix}{i}/{k}": x for i, row in enumerate(saved) for k, x in row.tensors().items()}


def read_named(tensors: Mapping[str, Any], about: dict[str, Any]) -> list[SavedState]:
    """Return the saved states with these tensors, as from `named`; `about` is from `describe`."""
    by_bucket: list[dict[str, Any]] = [{} for _ in about["buckets"]]
    for name, tensor in tensors.items():
        number, _, key = name.partition("/")
        by_bucket[int(number)][key] = tensor
    rows = zip(about["buckets"], by_bucket, strict=True)
    return [SavedState.read(row["level"], arrays) for row, arrays in rows]


def snapshot(exchange: Exchange) -> dict[str, Any]:
    """Return this rank's entire state as a dict of tensors, numbers, strings, lists and dicts."""
    tensors = named([entry.saved().map(exchange.xp.copy) for entry in exchange.bucket_states])
    link = exchange.communicator
    return {"rank": link.rank, "ranks": link.size, "about": describe(exchange), "tensors": tensors}


def adopt(exchange: Exchange, saved: dict[str, Any]) -> bool:
    """Restore a `snapshot`.

    A snapshot of another rank, or of another number of ranks, is restored without per-rank state
    (`Compressor.rescale_from_one`).

    Returns:
        Whether the snapshot was made by this rank in a job of this size.

    Raises:
        ValueError: if the snapshot does not fit; the message has the reason.
    """
    _compare(exchange, saved["about"])
    arrays = {key: exchange.xp.to_numpy(value) for key, value in saved["tensors"].items()}
    mine, link = read_named(arrays, saved["about"]), exchange.communicator
    own = (saved["rank"], saved["ranks"]) == (link.rank, link.size)
    restore(exchange, mine if own else _from_one(exchange, mine), saved["about"])
    return own


def shared(exchange: Exchange) -> dict[str, Any]:
    """Return this rank's state for a rank that joins, as NumPy arrays and plain values."""
    buckets = [replace(saved.scaled(0), evidence={}) for saved in saved_of(exchange)]
    return {"ranks": exchange.communicator.size, "about": describe(exchange), "buckets": buckets}


def join(exchange: Exchange, saved: dict[str, Any]) -> None:
    """Take over the state that another rank returned from `shared`; residuals are zero.

    Raises:
        ValueError: if the state does not fit; the message has the reason.
    """
    _compare(exchange, saved["about"])
    restore(exchange, _from_one(exchange, saved["buckets"]), saved["about"])


def move(exchange: Exchange, link: Communicator) -> None:
    """Continue over another communicator, which may have more or fewer ranks.

    Residuals are multiplied by the ratio of the new to the old number of ranks, so that the
    residuals of the remaining ranks contribute to the mean over all ranks as before.
    """
    exchange.abort()
    before, about = exchange.communicator, describe(exchange)
    mine = _expanded(
        exchange, saved_of(exchange), _info_when_saved(about, before.rank, before.size)
    )
    exchange.communicator = link
    exchange.bucket_batches.forget()
    if (before.size, before.rank) == (link.size, link.rank) or not exchange.steps:
        return
    mine = [saved.scaled(link.size / before.size) for saved in mine]
    restore(exchange, _from_one(exchange, mine), about)


def agree_on_origin(exchange: Exchange, own: bool, device: Any = None) -> None:
    """Discard per-rank state on all ranks if a rank adopted the state of another; collective.

    Args:
        exchange: exchange with the adopted state.
        own: whether this rank adopted a state of its own.
        device: device of the exchange's tensors.

    Raises:
        RuntimeError: on every rank, if the numbers of steps of the ranks differ.
    """
    link = exchange.communicator
    local = link.xp.asarray(np.array([own, exchange.steps], np.int64), device)
    rows = link.run("accordion.adopted", gather(link, local))
    owned, steps = np.stack(rows).T.tolist()
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"ranks 0, 1, ... continue after {steps} steps, but must continue after the same step: "
            "load the optimizer's state on all ranks (or, in PyTorch, load it on one rank and call "
            "broadcast_optimizer_state)."
        )
    if all(owned):
        return
    if own:
        adopt(exchange, {**snapshot(exchange), "rank": -1})  # as a state of another rank
    if link.rank == 0:
        text = "a rank loaded the state of another rank, so all ranks reset their per-rank state"
        print(f"{exchange.policy!r}: {text} (residuals, replicas).", file=sys.stderr)


def restore(exchange: Exchange, mine: Sequence[SavedState], about: dict[str, Any]) -> None:
    """Restore the exchange from the saved state of each bucket and a result of `describe`.

    Raises:
        ValueError: if a value is not of the kind that `describe` returns.
    """
    _check_kinds(exchange, about)
    pairs = zip(about["buckets"], exchange.bucket_states, strict=True)
    names = {row["name"]: entry.bucket.name for row, entry in pairs}
    exchange.policy.load_state_dict(_renamed(about["policy"], names))
    exchange.steps, exchange.skipped = about["steps"], about.get("skipped", 0)
    lead = exchange.communicator
    made = _info_when_saved(about, lead.rank, lead.size)
    for row, entry, saved in zip(about["buckets"], exchange.bucket_states, mine, strict=True):
        entry.served_from, entry.served_by_level = exchange.counted, {}
        entry.name = row.get("seed", entry.name)
        if saved.states or not of_parts(entry.levels):
            entry.served_from -= row.get("served", 0)
            entry.served_by_level = dict(row.get("turns", ()))
        exchange.load_bucket_state(entry, saved, made)


def _check_kinds(exchange: Exchange, about: dict[str, Any]) -> None:
    """Check that saved values are of the kinds of present ones, and that levels exist."""
    ours = describe(exchange)
    rows = [(about, ours), (about["policy"], ours["policy"])]
    rows += zip(about["buckets"], ours["buckets"], strict=True)
    for saved, mine in rows:
        for key in mine.keys() & saved.keys():
            if mine[key] is not None and _kind_of(saved[key]) is not _kind_of(mine[key]):
                check.refuse("state", key, saved[key], f"of the kind of {mine[key]!r}")
            if key in ("steps", "skipped", "served"):
                check.integer("state", key, saved[key], least=0)
    current = about["policy"]["current"]
    for row, entry in zip(about["buckets"], exchange.bucket_states, strict=True):
        level = current.get(row["name"], 0)
        check.integer(
            "state", f"level of {row['name']}", level, least=0, most=len(entry.levels) - 1
        )


def _kind_of(value: Any) -> type:
    """Return one of JSON's kinds of values."""
    kinds: tuple[type, ...] = (bool, numbers.Real, str, Mapping, Sequence)
    return next((kind for kind in kinds if isinstance(value, kind)), object)


def same_name(name: str, other: str) -> bool:
    """Return whether names are equal except for leading parts, some of which Keras drops."""
    return name == other or name.endswith("/" + other) or other.endswith("/" + name)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Return `value` with the saved names of buckets replaced by the present names."""
    if isinstance(value, dict):
        return {_renamed(k, names): _renamed(item, names) for k, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _chosen(only: Sequence[Any]) -> list[Any]:
    values = [getattr(item, "exchange_owner", item) for item in only]
    named = [owner for item in values for owner in (item if isinstance(item, tuple) else (item,))]
    chosen = named or owners()
    if not chosen:
        raise RuntimeError("state: there is no distributed optimizer in this process.")
    return chosen


def _file(directory: Path, rank: int, ranks: int) -> Path:
    return directory / f"rank-{rank:05d}-of-{ranks:05d}.npz"


def _write(directory: Path, chosen: Sequence[Exchange]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for number, exchange in enumerate(chosen):
        arrays |= _arrays(exchange, f"{number}/")
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    lead = chosen[0].communicator
    _replace(_file(directory, lead.rank, lead.size), buffer.getvalue())


def _arrays(exchange: Any, prefix: str) -> dict[str, np.ndarray]:
    if isinstance(exchange, Keeper):
        return {prefix + key: value for key, value in exchange.export().items()}
    return named(saved_of(exchange), prefix)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _read(directory: Path, chosen: Sequence[Any]) -> None:
    manifest = _manifest(directory)
    saved, ranks = manifest["exchanges"], manifest["ranks"]
    if len(saved) != len(chosen):
        raise ValueError(
            f"{len(saved)} optimizers were saved, but there are {len(chosen)} to restore"
        )
    missing = [r for r in range(ranks) if not _file(directory, r, ranks).exists()]
    if missing:
        raise FileNotFoundError(f"the files of ranks {missing} of {ranks} are missing")
    for number, (owner, row) in enumerate(zip(chosen, saved, strict=True)):
        owner.expect(row["tensors"])
        load = functools.partial(_load, directory, ranks, f"{number}/")
        if isinstance(owner.exchange, Keeper):
            owner.exchange.restore(row, load, ranks)
            continue
        _compare(owner.exchange, row)
        restore(owner.exchange, _for_this_rank(owner.exchange, row, load, ranks), row)
        if ranks != owner.exchange.communicator.size and owner.exchange.communicator.rank == 0:
            _report_rescaling(owner.exchange, ranks)


def _report_rescaling(exchange: Exchange, ranks: int) -> None:
    rules = {
        entry.compressor
        for entry in exchange.bucket_states
        if isinstance(entry.compressor, UpdateRule)
    }
    kinds = {type(rule).__name__: rule.rescale_note for rule in rules if rule.per_rank_state}
    size = exchange.communicator.size
    for name, text in sorted(kinds.items()):
        inactive = "; the states of inactive stages are discarded"
        print(f"{name}: saved on {ranks} ranks, continues on {size}: {text}{inactive}.",
              file=sys.stderr, flush=True)  # fmt: skip


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is missing")
    manifest = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"the manifest's format is {manifest.get('format')!r}, but must be {FORMAT}"
        )
    return manifest


def _for_this_rank(exchange: Exchange, row: Any, load: Loader, ranks: int) -> list[SavedState]:
    """Return this rank's saved states; on another number of ranks, made from those of all ranks.

    Args:
        exchange: exchange to restore.
        row: description of the exchange in the manifest.
        load: function that returns the saved arrays of a rank.
        ranks: number of ranks that saved.
    """
    rank, size = exchange.communicator.rank, exchange.communicator.size
    if ranks == size:
        return read_named(load(rank), row)
    all_saved = [
        _expanded(exchange, read_named(load(other), row), _info_when_saved(row, other, ranks))
        for other in range(ranks)
    ]
    buckets = zip(exchange.bucket_states, *all_saved, strict=True)
    return [rescaled(all_, *_kind(exchange, entry)) for entry, *all_ in buckets]


def _from_one(exchange: Exchange, mine: Sequence[SavedState]) -> list[SavedState]:
    pairs = zip(exchange.bucket_states, mine, strict=True)
    return [rescale_from_one(saved, *_kind(exchange, entry)) for entry, saved in pairs]


def _expanded(exchange: Exchange, mine: Sequence[SavedState], made: Info) -> list[SavedState]:
    pairs = zip(exchange.bucket_states, mine, strict=True)
    return [saved.of_whole(*_kind(exchange, entry)[:2], made) for entry, saved in pairs]


def _kind(exchange: Exchange, entry: BucketState) -> tuple[tuple[Compressor, ...], Spec, Info]:
    """Return a bucket's levels, its spec in NumPy, and the `Info` for its compressor."""
    spec = Spec(entry.bucket.shape, entry.bucket.dtype, backend("numpy"))
    return entry.levels, spec, exchange.info(entry)


def _info_when_saved(row: dict[str, Any], rank: int, ranks: int) -> Info:
    """Return the `Info` with which a rank's saved states were made."""
    hosts = tuple(tuple(members) for members in row.get("machines", ()))
    return Info(rank=rank, size=ranks, hosts=hosts)


def _load(directory: Path, ranks: int, prefix: str, rank: int) -> dict[str, np.ndarray]:
    with np.load(_file(directory, rank, ranks), allow_pickle=False) as file:
        return {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}


def _compare(exchange: Exchange, saved: dict[str, Any]) -> None:
    if "buckets" not in saved:
        method = saved.get("averaging")
        raise ValueError(f"the compression is {exchange.policy!r}, but was {method} when saved")
    ours = [(s.bucket.name, list(s.bucket.shape)) for s in exchange.bucket_states]
    theirs = [(row["name"], row["shape"]) for row in saved["buckets"]]
    for mine, other in zip(ours, theirs, strict=False):
        if mine[1] != other[1] or not same_name(mine[0], other[0]):
            raise ValueError(f"bucket {mine[0]!r} {mine[1]} was {other[0]!r} {other[1]} when saved")
    if len(ours) != len(theirs):
        raise ValueError(f"there are {len(ours)} buckets, but {len(theirs)} were saved")
    if repr(exchange.policy) != current(saved["compression"]):
        raise ValueError(
            f"the compression is {exchange.policy!r}, but was {saved['compression']} when saved"
        )


def _on_all_ranks(lead: Communicator, action: Any, doing: str) -> None:
    """Run `action` on every rank; raise on every rank if it fails on one."""
    problem = ""
    try:
        action()
    except Exception as error:  # of any kind, because the other ranks wait for this one
        clear = isinstance(error, (OSError, ValueError)) and str(error)
        problem = clear or f"{type(error).__name__}: {error}"
    any_failed = lead.run("accordion.checkpoint", _failures(lead, bool(problem)))
    if problem:
        raise RuntimeError(f"state: {doing} failed on rank {lead.rank}: {problem}.")
    if any_failed:
        raise RuntimeError(f"state: {doing} failed on another rank; see that rank's message.")


def _failures(lead: Communicator, failed: bool) -> ExchangeGenerator:
    anywhere = yield Allreduce(lead.xp.asarray(np.array([failed], np.int32)), op="max")
    return bool(lead.xp.to_numpy(anywhere)[0])  # type: ignore[return-value]
