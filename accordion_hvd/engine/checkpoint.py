"""Checkpoints of the state that optimizers' own checkpoints omit: residuals, levels, policy.

A checkpoint has one file per rank (NumPy arrays, no pickles) and a manifest, written whole or not
at all (`checkpoint_files`). A state is restored in two parts: all ranks read and check all of it,
and only then does any of them change something (`Restore`). Residuals are saved as they are stored,
in fp32 or as words of bfloat16 (int16), and converted if the exchange that continues stores them
otherwise. On another number of ranks, each new rank gets the mean of the saved residuals, which is
what the weights are owed. For compressed optimizers, the update rule defines the conversion
(`Compressor.rescale`). On another number of ranks or other hosts, sharded residuals (`TwoLevel`)
are carried as residuals of full tensors.
"""

from __future__ import annotations

import abc
import copy
import functools
import io
import json
import logging
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import accordion_hvd
from accordion_hvd import check
from accordion_hvd.comm.agreement import gather, gather_texts
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Compressor, Info
from accordion_hvd.engine import checkpoint_files as files
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import BucketState
from accordion_hvd.engine.saved_state import SavedState, of_parts, rescale_from_one, rescaled
from accordion_hvd.ops import backend
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule

logger = logging.getLogger(__name__)

Loader = Callable[[int], dict[str, np.ndarray]]
Restore = Callable[[], None]
"""Function that restores a state that was checked before, and so changes all of it or nothing."""
_live: list[weakref.ref[Any]] = []


class Keeper(abc.ABC):
    """Interface of objects other than exchanges that save and restore their own state.

    Attributes:
        steps: number of steps so far.
    """

    communicator: Communicator
    steps: int

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
    def restoring(self, row: dict[str, Any], load: Loader, ranks: int) -> Restore:
        """Check a saved state, and return the function that restores it.

        Args:
            row: the saved result of `describe`.
            load: function that returns the saved arrays of a rank.
            ranks: number of ranks that saved.

        Raises:
            ValueError: if the saved state does not fit; the message has the reason.
        """


def register(owner: Any) -> None:
    """Register `owner.exchange` to be saved and restored while `owner` is alive, if it is not yet.

    Before the exchange is restored, `owner.expect(names)` is called with the names of the tensors
    of the saved exchange, because the exchange may not exist before the first step. It returns a
    function that undoes the call, or None if there is nothing to undo.
    """
    if all(known is not owner for known in owners()):
        _live.append(weakref.ref(owner))


def owners() -> list[Any]:
    """Return the live owners of this process, in the order of their registration."""
    _live[:] = [reference for reference in _live if reference() is not None]
    return [owner for reference in _live if (owner := reference()) is not None]


def save_state(directory: str | Path, only: Sequence[Any] = (), *, step: int | None = None) -> int:
    """Write the state of all exchanges of this job, whole or not at all; collective.

    The directory keeps the last two checkpoints. If this one cannot be written, they are unchanged.
    A directory belongs to one job at a time: until the job ends or saves elsewhere, others are
    refused.

    Args:
        directory: directory on a file system that all ranks share; created if it does not exist.
        only: distributed optimizers to save; default: all of this process.
        step: number by which a script finds the model that it saves with this state; default: the
            number of steps of the first optimizer.

    Returns:
        The step, which `load_state` returns, too.

    Raises:
        RuntimeError: on every rank, if a rank cannot write, if another job saves to the directory,
            if `step` is not equal on all ranks, or if there is nothing to save.
    """
    chosen = [owner.exchange for owner in _chosen(only)]
    directory, lead = Path(directory), chosen[0].communicator
    doing = f"writing to {directory}"
    rows = _on_all_ranks(lead, lambda: _begin(directory, lead, step), doing)
    if len({row[0] for row in rows}) > 1:
        steps = [row[0] for row in rows]
        raise RuntimeError(f"state: {doing} failed: step is {steps} on ranks 0, 1, ..., but must "
                           "be equal on all.")  # fmt: skip
    step = chosen[0].steps if step is None else int(step)
    # After a change of the ranks, another rank than the new rank 0 may know the job's claim.
    known = next((name for _, name in rows if name is not None), None)
    owner = _on_rank_0(lead, lambda: files.claim(directory, known), doing)
    if lead.rank:  # rank 0 holds the lock for all
        files.follow(directory, owner)
    folder = directory / _on_rank_0(lead, lambda: files.new_folder(directory).name, doing)
    try:
        rows = _on_all_ranks(lead, lambda: _write(folder, chosen), doing)
        # Only after the files of all ranks: the manifest makes the checkpoint count.
        return _on_rank_0(lead, lambda: _complete(folder, chosen, rows, step, owner), doing)
    except RuntimeError:
        # With its manifest, the checkpoint is whole, although what followed has failed.
        if lead.rank == 0 and not (folder / files.MANIFEST).exists():
            files.remove(folder)  # of a full disk, perhaps
        raise


def load_state(directory: str | Path, only: Sequence[Any] = ()) -> int:
    """Restore a state written by `save_state`, on any number of ranks; collective.

    A checkpoint that is incomplete or has changed is skipped, and rank 0 logs why: the one before
    it is restored. If an error is raised, nothing has changed on any rank.

    Args:
        directory: directory of the saved state.
        only: distributed optimizers to restore, in the order in which they were saved; default: all
            of this process.

    Returns:
        The step with which the state was saved: load the model of the same step.

    Raises:
        RuntimeError: on every rank, if no checkpoint is complete, if the newest complete one does
            not fit, or if a privacy budget would miss releases; the message has the reason.
    """
    chosen = _chosen(only)
    directory, lead = Path(directory), chosen[0].communicator
    doing = f"reading from {directory}"
    folder, manifest = _newest(lead, directory, doing)
    undo: list[Restore] = []
    ready: list[Restore] = []
    try:
        _on_all_ranks(lead, lambda: _prepare(manifest, chosen, undo), doing)
        _on_all_ranks(lead, lambda: ready.extend(_restoring(folder, manifest, chosen)), doing)
    except RuntimeError:
        for take_back in undo:
            take_back()
        raise
    # By now every rank has read and checked all of it, and knows that the others have.
    _on_all_ranks(lead, lambda: [restore() for restore in ready], doing)
    return manifest["step"]


def describe(exchange: Exchange) -> dict[str, Any]:
    """Return the values that are equal on all ranks."""
    if isinstance(exchange, Keeper):
        return exchange.describe()
    return {
        "policy": exchange.policy.state_dict(),
        "compression": repr(exchange.policy),
        "residual_dtype": exchange.residual_dtype,
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
                "state": sorted(s.stored or ()),
            }
            for s in exchange.bucket_states
        ],
    }


def saved_of(exchange: Exchange) -> list[SavedState]:
    return [entry.saved().map(exchange.xp.to_numpy) for entry in exchange.bucket_states]


def named(saved: Sequence[SavedState], prefix: str = "") -> dict[str, Any]:
    """Return all tensors by their names in files, `{bucket}/{name}` (`SavedState.tensors`)."""
    return {f"{prefix}{i}/{k}": x for i, row in enumerate(saved) for k, x in row.tensors().items()}


def read_named(tensors: Mapping[str, Any], about: dict[str, Any]) -> list[SavedState]:
    """Return the saved states with these tensors, as from `named`; `about` is from `describe`."""
    by_bucket: dict[str, dict[str, Any]] = {str(i): {} for i in range(len(about["buckets"]))}
    for name, tensor in tensors.items():
        number, _, key = name.partition("/")
        if number not in by_bucket:
            check.refuse("state", "name of a tensor", name, f"one of {len(by_bucket)} buckets")
        by_bucket[number][key] = tensor
    for row, found in zip(about["buckets"], by_bucket.values(), strict=True):
        check.has("state", f"state of {row['name']}", found, [f"state/{k}" for k in row["state"]])
    rows = zip(about["buckets"], by_bucket.values(), strict=True)
    return [SavedState.read(row["level"], arrays) for row, arrays in rows]


def snapshot(exchange: Exchange) -> dict[str, Any]:
    """Return this rank's entire state as a dict of tensors, numbers, strings, lists and dicts."""
    tensors = named([entry.saved().map(exchange.xp.copy) for entry in exchange.bucket_states])
    link = exchange.communicator
    return {"rank": link.rank, "ranks": link.size, "about": describe(exchange), "tensors": tensors}


def adopt(exchange: Exchange, saved: dict[str, Any]) -> bool:
    """Restore a `snapshot`; as `adopting` does, but now."""
    own, restore_it = adopting(exchange, saved)
    restore_it()
    return own


def adopting(exchange: Exchange, saved: Any) -> tuple[bool, Restore]:
    """Check a `snapshot`, and return the function that restores it.

    A snapshot of another rank, or of another number of ranks, is restored without per-rank state
    (`Compressor.rescale_from_one`).

    Returns:
        Whether the snapshot was made by this rank in a job of this size; the function.

    Raises:
        ValueError: if the snapshot does not fit; the message has the reason.
    """
    check.has("state", "state_dict", saved, ("rank", "ranks", "about", "tensors"))
    about = saved["about"]
    compare(exchange, about)
    arrays = {key: exchange.xp.to_numpy(value) for key, value in saved["tensors"].items()}
    mine, link = read_named(arrays, about), exchange.communicator
    own = (saved["rank"], saved["ranks"]) == (link.rank, link.size)
    return own, restoring(exchange, mine if own else _from_one(exchange, mine), about)


def move(exchange: Exchange, link: Communicator) -> None:
    """Continue over another communicator, which may have more or fewer ranks.

    Residuals are multiplied by the ratio of the new to the old number of ranks, so that those of
    the remaining ranks contribute to the mean over all ranks as before (to the sum, without it).
    """
    exchange.abort()
    before, about = exchange.communicator, describe(exchange)
    mine = expanded(exchange, about)
    exchange.communicator = link
    exchange.forget()
    if (before.size, before.rank) == (link.size, link.rank) or not exchange.steps:
        return
    if not exchange.total:
        mine = [saved.scaled(link.size / before.size) for saved in mine]
    restoring(exchange, _from_one(exchange, mine), about)()


def agree_on_origin(exchange: Exchange, own: bool, device: Any = None) -> None:
    """Discard per-rank state on all ranks if a rank adopted the state of another; collective.

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
        logger.warning("%r: %s (residuals, replicas).", exchange.policy, text)


def restoring(exchange: Exchange, mine: Sequence[SavedState], about: dict[str, Any]) -> Restore:
    """Return the function that restores an exchange.

    Args:
        mine: the saved state of each bucket.
        about: a result of `describe`.

    Raises:
        ValueError: if a value does not fit; the exchange has not changed then.
    """
    _check_like(about["policy"], exchange.policy.state_dict())
    lead = exchange.communicator
    made = _info_when_saved(about, lead.rank, lead.size)
    loaded = []
    for row, entry, saved in zip(about["buckets"], exchange.bucket_states, mine, strict=True):
        new = exchange.load_bucket_state(entry, saved, made)
        new.name, new.served_by_level = row["seed"], {}
        new.served_from = about["steps"] - about["skipped"]
        # Else the state was sharded and has been discarded, so that its level starts anew.
        if saved.states or not of_parts(entry.levels, made):
            new.served_from -= row["served"]
            new.served_by_level = dict(row["turns"])
        loaded.append(new)
    pairs = zip(about["buckets"], exchange.bucket_states, strict=True)
    policy = _renamed(about["policy"], {row["name"]: entry.bucket.name for row, entry in pairs})
    # On a copy, because nothing may change if the state does not fit.
    trial = copy.deepcopy(exchange.policy)
    trial.load_state_dict(copy.deepcopy(policy))
    for entry in exchange.bucket_states:
        level = trial.choice(entry.bucket)
        most = len(entry.levels) - 1
        check.integer("state", f"level of {entry.bucket.name}", level, least=0, most=most)

    def restore_it() -> None:
        exchange.policy.load_state_dict(policy)
        exchange.steps, exchange.skipped = about["steps"], about["skipped"]
        exchange.replace_bucket_states(loaded)

    return restore_it


def _check_like(saved: Any, ours: Mapping[str, Any]) -> None:
    check.has("state", "saved state", saved, ours)
    for key, mine in ours.items():
        if mine is not None and _kind_of(saved[key]) is not _kind_of(mine):
            check.refuse("state", key, saved[key], f"of the kind of {mine!r}")
        if key in ("steps", "skipped", "served"):
            check.integer("state", key, saved[key], least=0)


def _kind_of(value: Any) -> type:
    kinds: tuple[type, ...] = (bool, numbers.Real, str, Mapping, Sequence)
    return next((kind for kind in kinds if isinstance(value, kind)), object)


def same_name(name: str, other: str) -> bool:
    """Return whether names are equal except for leading parts, some of which Keras drops."""
    return name == other or name.endswith("/" + other) or other.endswith("/" + name)


def _renamed(value: Any, names: dict[str, str]) -> Any:
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


def _begin(directory: Path, lead: Communicator, step: int | None) -> tuple[int | None, str | None]:
    """Return this rank's step, and the name under which its job has claimed the directory."""
    if step is not None:
        check.integer("save_state", "step", step, least=0)
        step = int(step)  # NumPy's integers are none of JSON
    return step, files.claimed(directory, lead.rank == 0)


def _write(folder: Path, chosen: Sequence[Any]) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder} of rank 0 is not there, but all ranks must share a file system")
    arrays: dict[str, np.ndarray] = {}
    for number, exchange in enumerate(chosen):
        arrays |= _arrays(exchange, f"{number}/")
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    lead = chosen[0].communicator
    return files.write_file(files.rank_file(folder, lead.rank, lead.size), buffer.getbuffer())


def _complete(
    folder: Path, chosen: Sequence[Any], rows: list[dict[str, Any]], step: int, owner: str
) -> int:
    manifest = {
        "version": accordion_hvd.__version__,
        "owner": owner,
        "step": step,
        "ranks": len(rows),
        "files": rows,
        "exchanges": [describe(exchange) for exchange in chosen],
    }
    files.write_manifest(folder, manifest)
    files.remove_old(folder.parent)  # not before the new one is on the disk
    return step


def _arrays(exchange: Exchange, prefix: str) -> dict[str, np.ndarray]:
    if isinstance(exchange, Keeper):
        return {prefix + key: value for key, value in exchange.export().items()}
    return named(saved_of(exchange), prefix)


def _newest(lead: Communicator, directory: Path, doing: str) -> tuple[Path, dict[str, Any]]:
    skipped: list[str] = []
    lost = False
    for name, finished in _on_rank_0(lead, lambda: files.survey(directory), doing):
        folder = directory / name
        manifest, problem = _usable(lead, folder, finished, doing)
        if not problem:
            if skipped:
                _fall_back(lead, folder, manifest, skipped, lost)
            return folder, manifest
        skipped.append(f"{folder.name}: {problem}")
        lost |= finished
    nothing = f"{files.MANIFEST} is missing, and there is no folder such as state-00001"
    reason = "; ".join(skipped) or nothing
    raise RuntimeError(f"state: {doing} failed: {reason}.")


def _usable(
    lead: Communicator, folder: Path, finished: bool, doing: str
) -> tuple[dict[str, Any], str]:
    if not finished:
        return {}, "was not written to its end"
    manifest, problem = _on_rank_0(lead, lambda: files.examine(folder), doing)
    if problem:
        return manifest, problem
    # Each rank compares the checksums of some of the files.
    mine = range(lead.rank, manifest["ranks"], lead.size)
    problems = _on_all_ranks(lead, lambda: files.problem_of(folder, manifest, mine), doing)
    return manifest, next(filter(None, problems), "")


def _fall_back(
    lead: Communicator, folder: Path, manifest: dict[str, Any], skipped: Sequence[str], lost: bool
) -> None:
    rows, reasons = manifest["exchanges"], "; ".join(skipped)
    text = f"{folder}, saved after step {rows[0].get('steps')}"
    # The record of what was spent since is lost with it: the budget could be exceeded.
    if lost and any("privacy" in row.get("policy", ()) for row in rows):
        raise RuntimeError(
            f"state: the newest checkpoint cannot be used ({reasons}), and the one before it, "
            f"{text}, lacks the privacy spent since; to continue from it nevertheless, remove the "
            "newer one."
        )
    if lead.rank == 0:
        message = f"continuing from {text}, because newer checkpoints cannot be used: {reasons}"
        logger.warning("accordion_hvd: %s.", message)


def _prepare(manifest: dict[str, Any], chosen: Sequence[Any], undo: list[Restore]) -> None:
    """Check that the saved exchanges fit; functions that undo preparations come to `undo`."""
    saved = manifest["exchanges"]
    if len(saved) != len(chosen):
        raise ValueError(
            f"{len(saved)} optimizers were saved, but there are {len(chosen)} to restore"
        )
    for owner, row in zip(chosen, saved, strict=True):
        check.has("state", "saved state", row, ("steps", "tensors"))
        undo += filter(None, [owner.expect(row["tensors"])])
    for owner, row in zip(chosen, saved, strict=True):
        if not isinstance(owner.exchange, Keeper):
            compare(owner.exchange, row)


def _restoring(folder: Path, manifest: dict[str, Any], chosen: Sequence[Any]) -> list[Restore]:
    ranks, ready = manifest["ranks"], []
    for number, (owner, row) in enumerate(zip(chosen, manifest["exchanges"], strict=True)):
        exchange, load = owner.exchange, functools.partial(_load, folder, ranks, f"{number}/")
        if isinstance(exchange, Keeper):
            ready.append(exchange.restoring(row, load, ranks))
            continue
        ready.append(restoring(exchange, _for_this_rank(exchange, row, load, ranks), row))
        if ranks != exchange.communicator.size and exchange.communicator.rank == 0:
            ready.append(functools.partial(_report_rescaling, exchange, ranks))
    return ready


def _report_rescaling(exchange: Exchange, ranks: int) -> None:
    serving = [entry.compressor for entry in exchange.bucket_states]
    rules = {compressor for compressor in serving if isinstance(compressor, UpdateRule)}
    kinds = {type(rule).__name__: rule.rescale_note for rule in rules if rule.per_rank_state}
    size = exchange.communicator.size
    for name, text in sorted(kinds.items()):
        inactive = "; the states of inactive stages are discarded"
        sizes = f"saved on {ranks} ranks, continues on {size}"
        logger.info("%s: %s: %s%s.", name, sizes, text, inactive)


def _for_this_rank(exchange: Exchange, row: Any, load: Loader, ranks: int) -> list[SavedState]:
    rank, size = exchange.communicator.rank, exchange.communicator.size
    if ranks == size:
        return read_named(load(rank), row)
    # Every rank reads the files of all ranks.
    all_saved = [
        _expanded(exchange, read_named(load(other), row), _info_when_saved(row, other, ranks))
        for other in range(ranks)
    ]
    buckets = zip(exchange.bucket_states, *all_saved, strict=True)
    return [merged(exchange, entry, all_) for entry, *all_ in buckets]


def merged(exchange: Exchange, entry: BucketState, saved: Sequence[SavedState]) -> SavedState:
    """Return this rank's state of a bucket, made from the states of all previous ranks.

    The mean residual over the ranks is that of `saved`; with `total` their sum.
    """
    new = rescaled(saved, *_kind(exchange, entry))
    return new.scaled(len(saved) / exchange.communicator.size) if exchange.total else new


def expanded(exchange: Exchange, about: dict[str, Any]) -> list[SavedState]:
    """Return this rank's state of each bucket in NumPy, with residuals of full tensors."""
    link = exchange.communicator
    made = _info_when_saved(about, link.rank, link.size)
    return _expanded(exchange, saved_of(exchange), made)


def _from_one(exchange: Exchange, mine: Sequence[SavedState]) -> list[SavedState]:
    pairs = zip(exchange.bucket_states, mine, strict=True)
    return [rescale_from_one(saved.widened(), *_kind(exchange, entry)) for entry, saved in pairs]


def _expanded(exchange: Exchange, mine: Sequence[SavedState], made: Info) -> list[SavedState]:
    pairs = zip(exchange.bucket_states, mine, strict=True)
    return [saved.widened().of_whole(*_kind(exchange, entry)[:2], made) for entry, saved in pairs]


def _kind(exchange: Exchange, entry: BucketState) -> tuple[tuple[Compressor, ...], Spec, Info]:
    spec = Spec(entry.bucket.shape, entry.bucket.dtype, backend("numpy"))
    return entry.levels, spec, exchange.info(entry)


def _info_when_saved(row: dict[str, Any], rank: int, ranks: int) -> Info:
    hosts = tuple(tuple(members) for members in row["machines"])
    return Info(rank=rank, size=ranks, hosts=hosts)


def _load(folder: Path, ranks: int, prefix: str, rank: int) -> dict[str, np.ndarray]:
    return files.read_arrays(files.rank_file(folder, rank, ranks), prefix)


def compare(exchange: Exchange, saved: dict[str, Any]) -> None:
    """Raise ValueError unless a result of `describe` fits the exchange."""
    if "buckets" not in saved:
        method = saved.get("averaging")
        raise ValueError(f"the compression is {exchange.policy!r}, but was {method} when saved")
    here = describe(exchange)
    for theirs, mine in [(saved, here), *zip(saved["buckets"], here["buckets"], strict=False)]:
        _check_like(theirs, mine)
    ours = [(s.bucket.name, list(s.bucket.shape)) for s in exchange.bucket_states]
    for mine, row in zip(ours, saved["buckets"], strict=False):
        name, shape = row["name"], row["shape"]
        if mine[1] != shape or not same_name(mine[0], name):
            raise ValueError(f"bucket {mine[0]!r} {mine[1]} was {name!r} {shape} when saved")
    if len(ours) != len(saved["buckets"]):
        raise ValueError(f"there are {len(ours)} buckets, but {len(saved['buckets'])} were saved")
    if repr(exchange.policy) != saved["compression"]:
        raise ValueError(
            f"the compression is {exchange.policy!r}, but was {saved['compression']} when saved"
        )


def _on_rank_0(lead: Communicator, action: Callable[[], Any], doing: str) -> Any:
    return _on_all_ranks(lead, lambda: action() if lead.rank == 0 else None, doing)[0]


def _on_all_ranks(lead: Communicator, action: Callable[[], Any], doing: str) -> list[Any]:
    result, problem, cause = None, "", None
    try:
        result = action()
    except Exception as error:  # of any kind, because the other ranks wait for this one
        clear = isinstance(error, (OSError, ValueError)) and str(error).removesuffix(".")
        problem = clear or f"{type(error).__name__}: {error}"
        cause = error
    # Ranks that have succeeded learn here that another one has not.
    texts = lead.run("accordion.checkpoint", gather_texts(lead, json.dumps([result, problem])))
    answers = [json.loads(text) for text in texts]
    for rank, (_, problem) in enumerate(answers):
        if problem:
            raise RuntimeError(f"state: {doing} failed on rank {rank}: {problem}.") from cause
    return [result for result, _ in answers]
