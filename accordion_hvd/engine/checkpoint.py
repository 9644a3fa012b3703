"""Saves and restores what optimizer checkpoints leave out: errors, levels, policy.

One file a rank (NumPy arrays, no pickles) and a manifest. On another number of ranks the sum of
the residuals over ranks is kept: each new rank gets an equal part of it; what becomes of the
errors of an optimizer of ours, that one says (`Rule.regroup`). Residuals of parts of
tensors (`TwoLevel`) are then, or on other machines, owed as those of whole tensors.
"""

from __future__ import annotations

import abc
import functools
import io
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import accordion_hvd
from accordion_hvd.comm.agreement import gather
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allreduce, Conversation, Info
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.slots import Slot
from accordion_hvd.ops import backend, namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import Rule

FORMAT = 1
Loader = Callable[[int], dict[str, np.ndarray]]
_live: list[weakref.ref[Any]] = []


class Keeper(abc.ABC):
    """What is saved in the place of an exchange, by rules of its own; not collective."""

    communicator: Communicator

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What is equal on all ranks; "tensors" has names."""

    @abc.abstractmethod
    def export(self) -> dict[str, np.ndarray]:
        """This rank's arrays. Raises: ValueError when this is not the time to save."""

    @abc.abstractmethod
    def restore(self, row: dict[str, Any], load: Loader, ranks: int) -> None:
        """The inverse, from what was described, and exported on so many ranks.

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
    """Those of this process that are alive, in the order in which they were made."""
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
    """What is equal on all ranks."""
    if isinstance(exchange, Keeper):
        return exchange.describe()
    return {
        "policy": exchange.policy.state_dict(),
        "compression": repr(exchange.policy),
        "steps": exchange.steps,
        "skipped": exchange.skipped,
        "machines": exchange.communicator.machines,
        "tensors": [tensor.name for tensor in exchange.tensors],
        "buckets": [
            {
                "name": s.bucket.name,
                "seed": s.name,
                "shape": list(s.bucket.shape),
                "level": s.level,
                "served": exchange.counted - s.since,
                "turns": [list(turn) for turn in s.turns.items()],
            }
            for s in exchange.slots
        ],
    }


def export(exchange: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """This rank's tensors.

    Keys are `{bucket}/{name}`, with the names of `Slot.tensors`.
    """
    if isinstance(exchange, Keeper):
        return {prefix + key: value for key, value in exchange.export().items()}
    arrays: dict[str, np.ndarray] = {}
    for i, slot in enumerate(exchange.slots):
        for key, value in slot.tensors().items():
            arrays[f"{prefix}{i}/{key}"] = exchange.xp.to_numpy(value)
    return arrays


def snapshot(exchange: Exchange) -> dict[str, Any]:
    """All that this rank knows, in one dict of tensors, numbers, strings, lists and dicts."""
    tensors = {
        f"{i}/{key}": exchange.xp.copy(value)
        for i, slot in enumerate(exchange.slots)
        for key, value in slot.tensors().items()
    }
    link = exchange.communicator
    return {"rank": link.rank, "ranks": link.size, "about": describe(exchange), "tensors": tensors}


def adopt(exchange: Exchange, saved: dict[str, Any]) -> bool:
    """The inverse of `snapshot`; whether it was this rank's of as many ranks.

    If not, what belonged to that rank alone is left out (`Rule.foreign`).

    Raises:
        ValueError: it does not fit, and why.
    """
    _compare(exchange, saved["about"])
    arrays = {key: exchange.xp.to_numpy(value) for key, value in saved["tensors"].items()}
    link = exchange.communicator
    own = (saved["rank"], saved["ranks"]) == (link.rank, link.size)
    if not own:
        arrays = _regrouped(exchange, arrays, [arrays], saved["about"])
    restore(exchange, arrays, saved["about"])
    return own


def shared(exchange: Exchange) -> dict[str, Any]:
    """Return what a rank that joins takes over from this one, as NumPy arrays and plain values."""
    arrays = export(exchange)
    arrays = {key: np.zeros_like(x) if _owes(key) else x for key, x in arrays.items()}
    return {"ranks": exchange.communicator.size, "about": describe(exchange), "arrays": arrays}


def join(exchange: Exchange, saved: dict[str, Any]) -> None:
    """Take over what another rank has `shared`; residuals are zero.

    Raises:
        ValueError: it does not fit, and why.
    """
    _compare(exchange, saved["about"])
    arrays = {k: x for k, x in saved["arrays"].items() if not k.endswith("/seen")}
    arrays = _regrouped(exchange, arrays, [arrays], saved["about"])
    restore(exchange, arrays, saved["about"])


def move(exchange: Exchange, link: Communicator) -> None:
    """Go on over another communicator, whose ranks may be more or fewer.

    Residuals are multiplied by the ratio of the numbers of ranks, so that the mean of those which
    stay is what it was.
    """
    exchange.abort()
    before, about = exchange.communicator, describe(exchange)
    arrays = _of_wholes(exchange, export(exchange), about, _told(about, before.rank, before.size))
    exchange.communicator = link
    exchange.forget_plan()
    if (before.size, before.rank) == (link.size, link.rank) or not exchange.steps:
        return
    factor = link.size / before.size
    arrays = {key: (x * factor).astype(x.dtype) if _owes(key) else x for key, x in arrays.items()}
    restore(exchange, _regrouped(exchange, arrays, [arrays], about), about)


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


def restore(exchange: Exchange, arrays: dict[str, np.ndarray], saved: dict[str, Any]) -> None:
    """The inverse of `export` and `describe`."""
    names = {
        row["name"]: slot.bucket.name
        for row, slot in zip(saved["buckets"], exchange.slots, strict=True)
    }
    exchange.policy.load_state_dict(_renamed(saved["policy"], names))
    exchange.steps, exchange.skipped = saved["steps"], saved.get("skipped", 0)
    lead = exchange.communicator
    made = _told(saved, lead.rank, lead.size)
    for i, slot in enumerate(exchange.slots):
        mine = {k.partition("/")[2]: v for k, v in arrays.items() if k.partition("/")[0] == str(i)}
        slot.since, slot.turns = exchange.counted, {}
        slot.name = saved["buckets"][i].get("seed", slot.name)
        if not _of_parts(slot) or any(key.startswith("state/") for key in mine):
            slot.since -= saved["buckets"][i].get("served", 0)
            slot.turns = dict(saved["buckets"][i].get("turns", ()))
        exchange.load_slot(slot, saved["buckets"][i]["level"], mine, made)


def same_name(one: str, other: str) -> bool:
    """Whether names are equal but for leading parts: Keras drops some when it loads a model."""
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
        arrays |= export(exchange, f"{number}/")
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    lead = chosen[0].communicator
    _replace(_file(directory, lead.rank, lead.size), buffer.getvalue())


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
        restore(owner.exchange, _arrays(owner.exchange, row, load, ranks), row)
        if ranks != owner.exchange.communicator.size and owner.exchange.communicator.rank == 0:
            _tell(owner.exchange, ranks)


def _tell(exchange: Exchange, ranks: int) -> None:
    """Say what becomes of optimizers' errors on another number of ranks."""
    rules = {slot.compressor for slot in exchange.slots if isinstance(slot.compressor, Rule)}
    kinds = {type(rule).__name__: rule.REGROUPED for rule in rules if rule.local}
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


def _arrays(exchange: Exchange, row: Any, load: Loader, ranks: int) -> dict[str, np.ndarray]:
    """This rank's arrays; on another number of ranks, an equal part of what all owe together.

    Args:
        exchange: whose they are.
        row: what the manifest says of it.
        load: gives what a rank has saved.
        ranks: how many have.
    """
    rank, size = exchange.communicator.rank, exchange.communicator.size
    if ranks == size:
        return load(rank)
    arrays = _of_wholes(exchange, load(0), row, _told(row, 0, ranks))
    for other in range(1, ranks):
        part = _of_wholes(exchange, load(other), row, _told(row, other, ranks))
        for key, value in part.items():
            if _owes(key):
                arrays[key] = arrays[key] + value
    arrays = {key: value / size if _owes(key) else value for key, value in arrays.items()}
    kept = {k: v for k, v in arrays.items() if rank == 0 or not k.endswith("/seen")}
    return _regrouped(exchange, kept, [load(other) for other in range(ranks)], row)


def _regrouped(
    exchange: Exchange, arrays: dict[str, np.ndarray], all_: list[dict[str, np.ndarray]], row: Any
) -> dict[str, np.ndarray]:
    """`arrays` with states as their levels make them of what other ranks had (`all_`)."""
    found = dict(arrays)
    for i, slot in enumerate(exchange.slots):
        present = row["buckets"][i]["level"]
        for number, level in enumerate(slot.levels):
            prefix = f"{i}/state/" if number == present else f"{i}/parked/{number}/"
            states = [_part(prefix, theirs) for theirs in all_]
            if not states[0] or not any(key.startswith(prefix) for key in found):
                continue
            spec = Spec(slot.bucket.shape, slot.bucket.dtype, backend("numpy"))
            info = exchange.info(slot)
            if len(states) == 1:
                state = level.foreign(states[0], spec, info)
            else:
                state = level.regroup(states, spec, info)
            if isinstance(level, Rule) and number != present:
                state = {}  # errors that wait are dropped
            kept = {} if isinstance(level, Rule) else _part(prefix, found)
            found = {key: value for key, value in found.items() if not key.startswith(prefix)}
            mine = {**state, **{key: x for key, x in kept.items() if key == "error"}}
            found |= {prefix + key: value for key, value in mine.items()}
    return found


def _part(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def _owes(key: str) -> bool:
    return key.endswith(("/state/error", "/owed"))


def _of_wholes(
    exchange: Exchange, arrays: dict[str, np.ndarray], row: dict[str, Any], made: Info
) -> dict[str, np.ndarray]:
    """What a rank has saved; of states of parts of tensors only what they owe of the whole."""
    if not made.machines:
        return arrays
    kept = {k: v for k, v in arrays.items() if k.endswith(("/owed", "/seen"))}
    for i, slot in enumerate(exchange.slots):
        if not _of_parts(slot):
            kept |= {k: v for k, v in arrays.items() if k.startswith(f"{i}/")}
            continue
        prefix = f"{i}/state/"
        state = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        level = slot.levels[row["buckets"][i]["level"]]
        residual = level.residual(state)
        if residual is not None:
            spec = Spec(slot.bucket.shape, slot.bucket.dtype, namespace(residual))
            kept[f"{i}/owed"] = level.whole(residual, spec, made) + kept.get(f"{i}/owed", 0.0)
    return kept


def _of_parts(slot: Slot) -> bool:
    """Whether its states may belong to parts of its tensor."""
    return any(level.in_parts for level in slot.levels)


def _told(row: dict[str, Any], rank: int, ranks: int) -> Info:
    """What the algorithms of a rank were told when the states were made that it has saved."""
    machines = tuple(tuple(members) for members in row.get("machines", ()))
    return Info(rank=rank, size=ranks, machines=machines)


def _load(directory: Path, ranks: int, prefix: str, rank: int) -> dict[str, np.ndarray]:
    with np.load(_file(directory, rank, ranks), allow_pickle=False) as file:
        return {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}


def _compare(exchange: Exchange, saved: dict[str, Any]) -> None:
    if "buckets" not in saved:
        was = saved.get("averaging")
        raise ValueError(f"the compression is {exchange.policy!r}, but was {was} when saved")
    ours = [(s.bucket.name, list(s.bucket.shape)) for s in exchange.slots]
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


def _failures(lead: Communicator, failed: bool) -> Conversation:
    anywhere = yield Allreduce(lead.xp.asarray(np.array([failed], np.int32)), op="max")
    return bool(lead.xp.to_numpy(anywhere)[0])  # type: ignore[return-value]
