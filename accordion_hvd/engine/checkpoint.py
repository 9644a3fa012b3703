"""Saves and restores what optimizer checkpoints leave out: errors, levels, policy.

One file a rank (NumPy arrays, no pickles) and a manifest. On another number of ranks the sum of
the residuals over ranks is kept: each new rank gets an equal part of it; what becomes of the
errors of a compressed optimizer, its rule says (`Compressor.rescale`). Residuals of parts of
tensors (`TwoLevel`) are then, or on other machines, carried as those of whole tensors.
"""

from __future__ import annotations

import abc
import functools
import io
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import accordion_hvd
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
    """Interface of objects that are saved in place of an exchange, by their own rules."""

    communicator: Communicator

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the values that are equal on all ranks; "tensors" has names."""

    @abc.abstractmethod
    def export(self) -> dict[str, np.ndarray]:
        """Return this rank's arrays. Raises: ValueError when this is not the time to save."""

    @abc.abstractmethod
    def restore(self, row: dict[str, Any], load: Loader, ranks: int) -> None:
        """Restore from `describe` and from the arrays of all `ranks`.

        Raises:
            ValueError: it does not fit, and why.
        """


def register(owner: Any) -> None:
    """Count `owner.exchange` among what is saved, as long as `owner` is alive.

    If the exchange is not made before the first step, `owner.expect(names)` is called before it
    is restored: the names of the tensors that it exchanged when it was saved.
    """
    _live.append(weakref.ref(owner))


def owners() -> list[Any]:
    """Return the live owners of this process, in the order in which they were made."""
    _live[:] = [reference for reference in _live if reference() is not None]
    return [owner for reference in _live if (owner := reference()) is not None]


def save_state(directory: str | Path, only: Sequence[Any] = ()) -> None:
    """Write the state of all exchanges of this job; collective.

    Args:
        directory: made if it does not exist; the same, shared one on every rank.
        only: distributed optimizers to save, instead of all that are alive.

    Raises:
        RuntimeError: on every rank, if one could not write; there is nothing to save.
    """
    chosen = [owner.exchange for owner in _chosen(only)]
    directory = Path(directory)
    lead = chosen[0].communicator
    _together(lead, lambda: _write(directory, chosen), f"writing to {directory}")
    if lead.rank == 0:
        manifest = {
            "format": FORMAT,
            "version": accordion_hvd.__version__,
            "ranks": lead.size,
            "exchanges": [describe(exchange) for exchange in chosen],
        }
        _replace(directory / "manifest.json", json.dumps(manifest, indent=1).encode())
    _together(lead, lambda: None, "")


def load_state(directory: str | Path, only: Sequence[Any] = ()) -> None:
    """Restore what `save_state` wrote, on any number of ranks; collective.

    Args:
        directory: where it was written.
        only: distributed optimizers to restore, in the order in which they were saved.

    Raises:
        RuntimeError: on every rank, saying what is missing or does not fit.
    """
    chosen = _chosen(only)
    lead = chosen[0].communicator
    _together(lead, lambda: _read(Path(directory), chosen), f"reading from {directory}")


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
    """Return what this rank keeps of each bucket, in NumPy."""
    return [entry.saved().map(exchange.xp.to_numpy) for entry in exchange.bucket_states]


def named(saved: Sequence[SavedState], prefix: str = "") -> dict[str, Any]:
    """Return all tensors under the names in files, `{bucket}/{name}` (`SavedState.tensors`)."""
    return {f"{prefix}{i}/{k}": x for i, one in enumerate(saved) for k, x in one.tensors().items()}


def read_named(tensors: Mapping[str, Any], about: dict[str, Any]) -> list[SavedState]:
    """Return what such tensors were made of; `about` is from `describe`."""
    found: list[dict[str, Any]] = [{} for _ in about["buckets"]]
    for name, tensor in tensors.items():
        number, _, key = name.partition("/")
        found[int(number)][key] = tensor
    rows = zip(about["buckets"], found, strict=True)
    return [SavedState.read(row["level"], mine) for row, mine in rows]


def snapshot(exchange: Exchange) -> dict[str, Any]:
    """Return this rank's whole state as a dict of tensors, numbers, strings, lists and dicts."""
    tensors = named([entry.saved().map(exchange.xp.copy) for entry in exchange.bucket_states])
    link = exchange.communicator
    return {"rank": link.rank, "ranks": link.size, "about": describe(exchange), "tensors": tensors}


def adopt(exchange: Exchange, saved: dict[str, Any]) -> bool:
    """Restore a `snapshot`; return whether it was this rank's, of as many ranks.

    If not, what belonged to that rank alone is left out (`Compressor.rescale_from_one`).

    Raises:
        ValueError: it does not fit, and why.
    """
    _compare(exchange, saved["about"])
    arrays = {key: exchange.xp.to_numpy(value) for key, value in saved["tensors"].items()}
    mine, link = read_named(arrays, saved["about"]), exchange.communicator
    own = (saved["rank"], saved["ranks"]) == (link.rank, link.size)
    restore(exchange, mine if own else _foreign(exchange, mine), saved["about"])
    return own


def shared(exchange: Exchange) -> dict[str, Any]:
    """Return what a rank that joins takes over from this one, as NumPy arrays and plain values."""
    mine = [replace(one.scaled(0), evidence={}) for one in saved_of(exchange)]
    return {"ranks": exchange.communicator.size, "about": describe(exchange), "buckets": mine}


def join(exchange: Exchange, saved: dict[str, Any]) -> None:
    """Take over what another rank has `shared`; residuals are zero.

    Raises:
        ValueError: it does not fit, and why.
    """
    _compare(exchange, saved["about"])
    restore(exchange, _foreign(exchange, saved["buckets"]), saved["about"])


def move(exchange: Exchange, link: Communicator) -> None:
    """Go on over another communicator, whose ranks may be more or fewer.

    Residuals are multiplied by the ratio of the numbers of ranks, so that the mean of those which
    stay is what it was.
    """
    exchange.abort()
    before, about = exchange.communicator, describe(exchange)
    mine = _of_wholes(exchange, saved_of(exchange), _told(about, before.rank, before.size))
    exchange.communicator = link
    exchange.bucket_batches.forget()
    if (before.size, before.rank) == (link.size, link.rank) or not exchange.steps:
        return
    mine = [one.scaled(link.size / before.size) for one in mine]
    restore(exchange, _foreign(exchange, mine), about)


def agree_on_origin(exchange: Exchange, own: bool, device: Any = None) -> None:
    """If a rank has adopted what was another's, all forget what was theirs alone; collective.

    Args:
        exchange: whose state it is.
        own: whether this rank's was its own.
        device: where the exchange's tensors are.

    Raises:
        RuntimeError: on every rank, if some have gone further than others.
    """
    link = exchange.communicator
    mine = link.xp.asarray(np.array([own, exchange.steps], np.int64), device)
    told = link.run("accordion.adopted", gather(link, mine))
    whose, steps = np.stack(told).T.tolist()
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"ranks 0, 1, ... go on after {steps} steps: load the optimizer's state on all of them "
            "(or, in PyTorch, on one and call broadcast_optimizer_state)."
        )
    if all(whose):
        return
    if own:
        adopt(exchange, {**snapshot(exchange), "rank": -1})  # as if it were another's
    if link.rank == 0:
        text = "on some rank the state of another was loaded; what ranks had of their own"
        print(f"{exchange.policy!r}: {text} (errors, replicas) begins anew.", file=sys.stderr)


def restore(exchange: Exchange, mine: Sequence[SavedState], about: dict[str, Any]) -> None:
    """Go on from what was saved of each bucket, and from what was described."""
    pairs = zip(about["buckets"], exchange.bucket_states, strict=True)
    names = {row["name"]: entry.bucket.name for row, entry in pairs}
    exchange.policy.load_state_dict(_renamed(about["policy"], names))
    exchange.steps, exchange.skipped = about["steps"], about.get("skipped", 0)
    lead = exchange.communicator
    made = _told(about, lead.rank, lead.size)
    for row, entry, saved in zip(about["buckets"], exchange.bucket_states, mine, strict=True):
        entry.served_from, entry.served_by_level = exchange.counted, {}
        entry.name = row.get("seed", entry.name)
        if saved.states or not of_parts(entry.levels):
            entry.served_from -= row.get("served", 0)
            entry.served_by_level = dict(row.get("turns", ()))
        exchange.load_bucket_state(entry, saved, made)


def same_name(one: str, other: str) -> bool:
    """Return whether names are equal but for leading parts, some of which Keras drops."""
    return one == other or one.endswith("/" + other) or other.endswith("/" + one)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """`value` with buckets called as they are now."""
    if isinstance(value, dict):
        return {_renamed(k, names): _renamed(item, names) for k, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _chosen(only: Sequence[Any]) -> list[Any]:
    found = [getattr(item, "exchange_owner", item) for item in only]
    named = [owner for item in found for owner in (item if isinstance(item, tuple) else (item,))]
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
    """Write a file so that it is either the old one or the new one, never half."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _read(directory: Path, chosen: Sequence[Any]) -> None:
    manifest = _manifest(directory)
    saved, ranks = manifest["exchanges"], manifest["ranks"]
    if len(saved) != len(chosen):
        raise ValueError(
            f"{len(saved)} optimizers were saved, but {len(chosen)} are to be restored"
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
            _tell(owner.exchange, ranks)


def _tell(exchange: Exchange, ranks: int) -> None:
    rules = {
        entry.compressor
        for entry in exchange.bucket_states
        if isinstance(entry.compressor, UpdateRule)
    }
    kinds = {type(rule).__name__: rule.rescale_note for rule in rules if rule.per_rank_state}
    size = exchange.communicator.size
    for name, text in sorted(kinds.items()):
        waiting = "; what waited in another stage is dropped"
        print(f"{name}: saved on {ranks} ranks, goes on with {size}: {text}{waiting}.",
              file=sys.stderr, flush=True)  # fmt: skip


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is missing there")
    manifest = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')!r}, but must be {FORMAT}")
    return manifest


def _for_this_rank(exchange: Exchange, row: Any, load: Loader, ranks: int) -> list[SavedState]:
    """Return what this rank goes on with; on another number of ranks, what is made of all.

    Args:
        exchange: whose state it is.
        row: what the manifest says of it.
        load: gives what a rank has saved.
        ranks: how many have.
    """
    rank, size = exchange.communicator.rank, exchange.communicator.size
    if ranks == size:
        return read_named(load(rank), row)
    everyone = [
        _of_wholes(exchange, read_named(load(other), row), _told(row, other, ranks))
        for other in range(ranks)
    ]
    buckets = zip(exchange.bucket_states, *everyone, strict=True)
    return [rescaled(all_, *_kind(exchange, entry)) for entry, *all_ in buckets]


def _foreign(exchange: Exchange, mine: Sequence[SavedState]) -> list[SavedState]:
    pairs = zip(exchange.bucket_states, mine, strict=True)
    return [rescale_from_one(one, *_kind(exchange, entry)) for entry, one in pairs]


def _of_wholes(exchange: Exchange, mine: Sequence[SavedState], made: Info) -> list[SavedState]:
    pairs = zip(exchange.bucket_states, mine, strict=True)
    return [one.of_whole(*_kind(exchange, entry)[:2], made) for entry, one in pairs]


def _kind(exchange: Exchange, entry: BucketState) -> tuple[tuple[Compressor, ...], Spec, Info]:
    """Return a bucket's levels, its spec in NumPy, and what its compressor is told."""
    spec = Spec(entry.bucket.shape, entry.bucket.dtype, backend("numpy"))
    return entry.levels, spec, exchange.info(entry)


def _told(row: dict[str, Any], rank: int, ranks: int) -> Info:
    """Return the `Info` that a rank's algorithms had when its saved states were made."""
    machines = tuple(tuple(members) for members in row.get("machines", ()))
    return Info(rank=rank, size=ranks, hosts=machines)


def _load(directory: Path, ranks: int, prefix: str, rank: int) -> dict[str, np.ndarray]:
    with np.load(_file(directory, rank, ranks), allow_pickle=False) as file:
        return {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}


def _compare(exchange: Exchange, saved: dict[str, Any]) -> None:
    if "buckets" not in saved:
        was = saved.get("averaging")
        raise ValueError(f"the compression is {exchange.policy!r}, but was {was} when saved")
    ours = [(s.bucket.name, list(s.bucket.shape)) for s in exchange.bucket_states]
    theirs = [(row["name"], row["shape"]) for row in saved["buckets"]]
    for mine, other in zip(ours, theirs, strict=False):
        if mine[1] != other[1] or not same_name(mine[0], other[0]):
            raise ValueError(f"bucket {mine[0]!r} {mine[1]} was {other[0]!r} {other[1]} when saved")
    if len(ours) != len(theirs):
        raise ValueError(f"there are {len(ours)} buckets, but {len(theirs)} were saved")
    if repr(exchange.policy) != saved["compression"]:
        raise ValueError(
            f"the compression is {exchange.policy!r}, but was {saved['compression']} when saved"
        )


def _together(lead: Communicator, action: Any, doing: str) -> None:
    """Do `action` on every rank; if it fails on one, every rank raises."""
    problem = ""
    try:
        action()
    except (OSError, ValueError, KeyError) as error:
        problem = str(error)
    failed = lead.run("accordion.checkpoint", _failures(lead, bool(problem)))
    if problem:
        raise RuntimeError(f"state: {doing} failed on rank {lead.rank}: {problem}.")
    if failed:
        raise RuntimeError(f"state: {doing} failed on another rank; see its message.")


def _failures(lead: Communicator, failed: bool) -> ExchangeGenerator:
    anywhere = yield Allreduce(lead.xp.asarray(np.array([failed], np.int32)), op="max")
    return bool(lead.xp.to_numpy(anywhere)[0])  # type: ignore[return-value]
