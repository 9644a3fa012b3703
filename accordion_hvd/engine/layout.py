"""The layout of an exchange: buckets of tensors, batches of buckets, and fusion groups.

A tensor with two or more dimensions that is large enough forms a *bucket* by itself and keeps its
shape: matrix methods need the shape, and Accordion decides per layer. All other tensors (biases,
norms, small or exempt tensors) are packed into flat buckets and sent uncompressed. Compressors do
not depend on this rule.

Like buckets that the same compressor serves form a *batch*, which shares one call of `exchange` and
stores the buckets' state, so that a thousand layers cost little more than ten layers of the same
total size. Batches whose first requests are launched together, as soon as all their gradients are
ready, form a *fusion group*. Readiness order cannot define the groups: it differs between ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from accordion_hvd.check import first_match, matches
from accordion_hvd.core.base import Compressor, Info, Scope, State, Tensor, narrowed, widened
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.ops import namespace, on_cpu, random
from accordion_hvd.ops.spec import ITEMSIZE, Spec
from accordion_hvd.optimizers.base import UpdateRule, needs_weights
from accordion_hvd.policies.evidence import SKETCHED, Evidence

MIN_ELEMENTS = 1024
"""Minimum number of elements of compressed tensors: below, compression costs more than it saves."""

FLAT_BYTES = 8 << 20
"""Uncompressed bytes at which a flat bucket is closed, so that it can be sent during backward."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be exchanged.

    Attributes:
        name: unique name, equal on all ranks.
        kind: kind of the tensor, such as its device. Tensors of different kinds are never packed
            together.
        group: parameter group, if compressors depend on its settings. Tensors of different groups
            are never packed together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    group: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that a compressor treats as one.

    Attributes:
        name: name of the tensor; for several tensors, the first name and the number of the others.
        members: positions of the tensors in the list of all tensors.
        shape: shape that the compressor receives: that of the tensor, or (elements,) if packed.
        sizes: number of elements of each member.
        compress: whether the policy chooses the compressor; otherwise the bucket is sent
            uncompressed.
        packed: whether the members are flattened and concatenated.
    """

    name: str
    members: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    compress: bool
    packed: bool
    group: str = ""

    @functools.cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def dense_bytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]


def make_buckets(
    tensors: Sequence[TensorInfo],
    *,
    scope: Scope = "tensor",
    skip: Sequence[str] = (),
    min_elements: int = MIN_ELEMENTS,
    scopes: Mapping[str, Scope] | None = None,
) -> list[Bucket]:
    """Divide `tensors` into buckets; a pure function, so that all ranks get the same buckets.

    Args:
        tensors: tensors in the order in which their gradients are expected.
        scope: scope that the compressors need (`Compressor.scope`). "each" makes a bucket of every
            tensor, small ones included, as Horovod's compression objects expect.
        skip: patterns (as for file names) of the names of tensors to send uncompressed.
        min_elements: tensors with fewer elements are sent uncompressed.
        scopes: name pattern -> scope of the matching tensors, which share no bucket with other
            tensors. The first pattern that matches counts. Ignored for scopes "each", "model" and
            "samples".
    """
    if scope == "each":
        return [_bucket(tensors, [i], compress=True, packed=False) for i in range(len(tensors))]
    if scope in ("model", "samples"):
        return _packed(tensors, range(len(tensors)), compress=True, limit=math.inf)
    chosen = [i for i, t in enumerate(tensors) if _compressible(t, skip, min_elements)]
    others = [i for i in range(len(tensors)) if i not in set(chosen)]
    parts: dict[str, list[int]] = {}  # pattern ("" for none) -> tensors
    for i in chosen:
        parts.setdefault(first_match(tensors[i].name, scopes or {}) or "", []).append(i)
    own = [
        bucket
        for pattern, which in parts.items()
        for bucket in _compressed(tensors, which, (scopes or {}).get(pattern, scope))
    ]
    packed = _packed(tensors, others, compress=False, limit=FLAT_BYTES)
    # A bucket is ready when the last of its gradients is.
    return sorted(own + packed, key=lambda bucket: bucket.members[-1])


def _compressed(tensors: Sequence[TensorInfo], which: Sequence[int], scope: Scope) -> list[Bucket]:
    if scope in ("flat", "joint"):
        limit = FLAT_BYTES if scope == "flat" else math.inf
        return _packed(tensors, which, compress=True, limit=limit)
    return [_bucket(tensors, [i], compress=True, packed=False) for i in which]


def fingerprint(*parts: object) -> int:
    """Return a hash of `parts` from 0 to 4092; it most likely differs if `parts` differ."""
    text = repr(parts).encode()
    # Small: ranks compare the number with its mean in fp32, which must tell one rank's apart.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % 4093


def _compressible(tensor: TensorInfo, skip: Sequence[str], min_elements: int) -> bool:
    large = len(tensor.shape) >= 2 and tensor.size >= min_elements
    return large and tensor.dtype.startswith(("float", "bfloat")) and not matches(tensor.name, skip)


def _packed(
    tensors: Sequence[TensorInfo], which: Sequence[int], *, compress: bool, limit: float
) -> list[Bucket]:
    open_: dict[tuple[str, str, str], list[int]] = {}
    closed: list[list[int]] = []
    for i in which:
        key = (tensors[i].dtype, tensors[i].kind, tensors[i].group)
        if key in open_ and 4 * sum(tensors[j].size for j in (*open_[key], i)) > limit:
            closed.append(open_.pop(key))
        open_.setdefault(key, []).append(i)
    flat = (*closed, *open_.values())
    return [_bucket(tensors, members, compress=compress, packed=True) for members in flat]


def _bucket(
    tensors: Sequence[TensorInfo], members: Sequence[int], *, compress: bool, packed: bool
) -> Bucket:
    first, sizes = tensors[members[0]], tuple(tensors[i].size for i in members)
    shape = (sum(sizes),) if packed else first.shape
    name = first.name + (f"+{len(members) - 1}" if len(members) > 1 else "")
    members = tuple(members)
    return Bucket(name, members, shape, sizes, first.dtype, compress, packed, first.group)


# ------------------------------------------------------------------------- the state of one bucket
class BucketState:
    """The levels and the state of one bucket.

    Attributes:
        level, compressor: number of the level that serves the bucket now, and the level itself.
        phased: whether phases of this level differ.
        needs_weights: whether this level is an `UpdateRule` that needs the weights.
        sharded: whether ranks store parts of a level's state.
        narrow: whether residuals are stored as words of bfloat16 (`core.base.narrowed`).
        inactive: states of other levels, by level.
        carried: residual of earlier levels that is not part of the present level's state and is
            added to the next gradient; None if there is none.
        created_with: the `Info` with which `state` was made; None before that, and if `state` was
            loaded without it.
        served_by_level: number of exchanges that other levels have served, by level.
        name: name in the compressors' `Info`, from which their random numbers derive. Checkpoints
            save it, because Keras may rename the variables of a loaded model.
        served_from: number of exchanges that were not skipped when the present level began, minus
            the number of exchanges that this level had served before.
    """

    def __init__(
        self, bucket: Bucket, levels: tuple[Compressor, ...], spec: Spec, level: int = 0,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        self.bucket, self.levels, self.spec, self.narrow = bucket, levels, spec, narrow
        self.sharded = any(level.sharded for level in levels)
        self.serve(level)
        self.name = bucket.name
        self.inactive: dict[int, State] = {}
        self.carried: Tensor | None = None
        self.served_by_level: dict[int, int] = {}
        self.served_from = 0
        self._stored: State | None = None
        self._evidence: dict[str, Tensor] = {}
        self._stack: Batch | None = None  # storage of state and evidence, if stacked
        self._place = 0  # in the stack: number of the bucket, or offset if flat
        self.created_with: Info | None = None

    def serve(self, level: int) -> None:
        self.level, self.compressor = level, self.levels[level]
        self.phased = self.compressor.period != 1
        self.needs_weights = needs_weights(self.compressor)

    @property
    def stored(self) -> State | None:
        """Return the state of the present level as it is stored; None before the first exchange.

        The tensors may be views of memory that the next step overwrites.
        """
        if self._stack is None:
            return self._stored
        return {k: self._stack.part(v, self._place, self) for k, v in self._stack.stored.items()}

    @stored.setter
    def stored(self, state: State | None) -> None:
        self._unstack()
        self._stored = state

    @property
    def state(self) -> State | None:
        """Return the state that the compressor takes: `stored`, with its residual in fp32."""
        stored = self.stored
        return stored and widened(stored)

    def store(self, state: State | None, info: Info) -> None:
        """Store a state with its residual in fp32."""
        if self.narrow and state is not None:
            seed = random.key("stored", info.rank, info.step)
            state = narrowed(self.compressor, state, [self.name], seed)
        self.stored = state

    @property
    def evidence(self) -> dict[str, Tensor]:
        """Return the tensors for the policy's evidence by key; do not modify them."""
        if self._stack is None:
            return self._evidence
        stacked = self._stack.evidence.items()
        return self._evidence | {k: self._stack.part(v, self._place, self) for k, v in stacked}

    @evidence.setter
    def evidence(self, evidence: dict[str, Tensor]) -> None:
        self._unstack()
        self._evidence = evidence

    def join(self, stack: Batch, place: int) -> None:
        """Store state and evidence at `place` of `stack`: a number, or an offset if it is flat."""
        self._evidence = {k: v for k, v in self.evidence.items() if k not in stack.evidence}
        self._stack, self._place, self._stored = stack, place, None

    def _unstack(self) -> None:
        if self._stack is not None:
            self._stored, self._evidence, self._stack = self.stored, self.evidence, None

    def prepare(self, info: Info) -> None:
        """Make the state if there is none, or if rank or hosts of sharded states have changed."""
        self._follow(info)
        if self._stack is None and self._stored is None:
            self.store(self.compressor.init(self.spec, info), info)
        if self.created_with is None:
            self.created_with = info

    def moved(self, info: Info) -> bool:
        """Return whether a sharded state covers another part of the tensor than the rank's."""
        made = self.created_with or info
        places = ((x.hosts, x.rank, x.size) for x in (made, info))
        return self.sharded and len(set(places)) > 1

    def _follow(self, info: Info) -> None:
        before = self.created_with
        if before is not None and self.moved(info):
            self.carried = self._total_residual(self.compressor, self.state or {}, before)
            self.stored, self.inactive, self.created_with = None, {}, None

    def _total_residual(self, compressor: Compressor, state: State, info: Info) -> Tensor | None:
        residual = compressor.residual(state)
        if residual is None:
            return self.carried
        xp, shape = self.spec.xp, self.spec.shape
        residual = xp.reshape(compressor.expand_residual(residual, self.spec, info), shape)
        return residual if self.carried is None else residual + xp.reshape(self.carried, shape)

    def residual(self, info: Info) -> Tensor | None:
        return self._total_residual(self.compressor, self.state or {}, self.created_with or info)

    def record_switch(self, level: int, counted: int) -> None:
        """Update `served_from` before a switch, after `counted` exchanges without skipped ones."""
        self.served_by_level[self.level] = counted - self.served_from
        self.served_from = counted - self.served_by_level.pop(level, 0)

    def switch(self, level: int, info: Info) -> None:
        """Switch to another level, which takes over the residual of the old one."""
        if level == self.level:
            return
        self._follow(info)  # the old part is not that of `info` after a resume on other hosts
        old, old_level, old_state = self.compressor, self.level, self.state
        self.serve(level)
        if old_state is None:
            return
        new = self.compressor
        state = new.init(self.spec, info) | self.inactive.pop(level, {})
        state = new.warm_start(state, old, old_state)
        if isinstance(new, UpdateRule):
            new.check_start(state, old, info)
        self.store(self._take_residual(state, old, old_state, info), info)
        self.inactive[old_level] = old.deactivate(old_state)

    def _take_residual(self, state: State, old: Compressor, old_state: State, info: Info) -> State:
        new, part = self.compressor, old.residual(old_state)
        feeds_back = new.residual(state) is not None
        if new.sharded and new.same_part(old) and feeds_back and part is not None:
            return new.with_residual(state, part)  # momentum must not receive it as a gradient
        residual, self.carried = self._total_residual(old, old_state, info), None
        if residual is None:
            return state
        # A sharded state has room for a part of the residual only.
        if feeds_back and not new.sharded:
            return new.with_residual(state, residual)
        self.carried = residual
        return state

    def saved(self) -> SavedState:
        """Return the state to save; residuals that consist of several tensors are added up.

        The tensors may be views of memory that the next step overwrites.
        """
        states = dict(self.inactive)
        state = self.stored
        if state:
            residual = None if self.narrow else self.compressor.residual(state)
            combined = state if residual is None else self.compressor.with_residual(state, residual)
            states[self.level] = combined
        return SavedState(self.level, states, self.carried, dict(self.evidence))

    def load(self, saved: SavedState, info: Info) -> None:
        states = dict(saved.states)
        self.serve(saved.level)
        self.carried, self.created_with = saved.carried, None
        self.store(states.pop(saved.level, None), info)
        self.evidence, self.inactive = dict(saved.evidence), states


def drifting(entries: Sequence[BucketState]) -> list[BucketState]:
    """Return the bucket states with compressors that let weights differ between ranks."""
    plain = Compressor.synchronous
    return [entry for entry in entries if type(entry.compressor).synchronous is not plain]


def span(entries: Sequence[BucketState], counted: int) -> int:
    """Return how many exchanges ago the weights were equal before; 0 if they differ now.

    Skipped exchanges do not count. The number is 1 if no compressor lets weights differ. It depends
    only on the numbers of exchanges, so it is equal on all ranks.
    """
    states = drifting(entries)

    def equal(back: int) -> bool:
        served = ((s.compressor, counted - s.served_from - back) for s in states)
        return all(compressor.synchronous(max(count, 0)) for compressor, count in served)

    if not states:
        return 1
    return next(n for n in itertools.count(1) if equal(n)) if equal(0) else 0


def reports(entries: Sequence[BucketState]) -> dict[str, dict[str, float]]:
    """Return the reports of the compressors (`Compressor.report`) by bucket, without empty ones."""
    found = {x.bucket.name: in_numbers(x.compressor.report(x.state or {})) for x in entries}
    return {name: report for name, report in found.items() if report}


def in_numbers(report: Mapping[str, Tensor]) -> dict[str, float]:
    """Return a compressor's report with numbers in place of its scalar tensors."""
    return {key: float(namespace(x).to_numpy(x).reshape(-1)[0]) for key, x in report.items()}


# ---------------------------------------------------------------------------------------- batches
class Batch:
    """Buckets that share one call of `exchange`, with their states in the compressor's layout.

    Args:
        evidence: the policy's evidence that follows steps.
        tensors: the buckets' tensors, in order; () if nothing is unpacked.

    Attributes:
        entries: states of the buckets.
        members: positions of their tensors in the exchange's list, bucket by bucket.
        stacked: "alike" if the tensors are stacked along a new first dimension, "any" if they are
            flattened into one vector, "" for a single bucket in its own shape.
        shares: whether the means are views of one array.
        before: the policy's evidence before the current step, to undo the step.
        buffer: packed gradients of the last step, whose memory serves again.
        aside: a copy of `stored` before the current step, of which parts may be restored.
        mean: mean of the last closed step.
    """

    def __init__(
        self, entries: Sequence[BucketState], stacked: str, xp: ModuleType,
        evidence: Sequence[Evidence], tensors: Sequence[TensorInfo] = (),
    ) -> None:  # fmt: skip
        self.entries, self.stacked, self.declared, self._xp = entries, stacked, evidence, xp
        self.members = tuple(member for entry in entries for member in entry.bucket.members)
        self.first, self.flat = entries[0], stacked == "any" or entries[0].bucket.packed
        self.shares = bool(stacked) or self.flat
        self.before: dict[str, Tensor] | None = None
        self.buffer: Tensor | None = None
        self.aside: State | None = None
        self.mean: Tensor | None = None
        self._tensors, self._on_cpu = tensors, on_cpu(entries[0].spec.device)
        self._stored: State | None = None  # of a stack; a single bucket stores its own
        self._evidence: dict[str, Tensor] = {}

    # --------------------------------------------------------------------------- tensors in and out
    def pack(self, parts: Sequence[Tensor], keep: bool = False) -> Tensor:
        """Return one tensor per member in the layout of the compressor.

        Args:
            keep: whether a CPU may write into the memory of the last call. (On accelerators, new
                memory costs nothing, and kept memory does.)
        """
        if self.first.compressor.scope == "samples":
            return self._xp.concat([_rows(self._xp, part) for part in parts], 1)
        if self.stacked == "alike":
            if not (keep and self._on_cpu):
                return self._xp.stack(parts)
            self.buffer = self._xp.stack(parts, self.buffer)
            return self.buffer
        if self.flat:
            return self._xp.concat([self._xp.reshape(part, (-1,)) for part in parts])
        return parts[0]

    def unpack(self) -> list[Tensor]:
        """Return the means of the members, in their shapes and dtype."""
        xp = self._xp
        mean = xp.cast(self.mean, self.first.bucket.dtype)
        if self.stacked == "alike":
            return list(xp.unstack(mean))
        pieces = xp.split(mean, [x.size for x in self._tensors]) if self.flat else [mean]
        return [xp.reshape(p, x.shape) for p, x in zip(pieces, self._tensors, strict=True)]

    def parts(self, tensor: Tensor) -> Iterator[tuple[BucketState, Tensor]]:
        """Yield the buckets with their parts of a tensor in the layout of the compressor."""
        xp = self._xp
        if not self.stacked:
            yield self.first, tensor
        elif self.stacked == "alike":
            yield from zip(self.entries, xp.unstack(tensor), strict=True)
        else:
            pieces = xp.split(tensor, [entry.bucket.size for entry in self.entries])
            for entry, piece in zip(self.entries, pieces, strict=True):
                yield entry, xp.reshape(piece, entry.bucket.shape)

    def part(self, tensor: Tensor, place: int, entry: BucketState) -> Tensor:
        """Return a bucket's part of a stacked tensor: a view, if the framework has views."""
        if self.stacked == "alike":
            return tensor[place]
        return self._xp.reshape(tensor[place : place + entry.bucket.size], entry.bucket.shape)

    def open(self, info: Info, wanted: Sequence[Evidence]) -> None:
        """Make missing states and evidence, and stack the states of the buckets."""
        if not self._is_stacked() or self.first.moved(info):
            for entry in self.entries:
                entry.prepare(replace(info, name=entry.name) if self.stacked else info)
            if self.stacked and not self._is_stacked():
                self._stack_states()
        if wanted:
            nothing: list[dict[str, Tensor]] = [{} for _ in self.entries]
            missing = [x for x in wanted if x.key not in self.evidence]
            if missing:
                self.evidence = self.evidence | {x.key: self._joined(x, nothing) for x in missing}

    @property
    def serves(self) -> bool:
        """Return whether no bucket has left the batch since the last step."""
        return not self.stacked or self._is_stacked()

    def _is_stacked(self) -> bool:
        if self._stored is None:
            return False
        for entry in self.entries:  # a loop costs less than a generator, in each step
            if entry._stack is not self:
                return False
        return True

    def _stack_states(self) -> None:
        states = [entry.stored or {} for entry in self.entries]
        tensors = [entry.evidence for entry in self.entries]
        state = {key: self._xp.stack([s[key] for s in states]) for key in states[0]}
        suiting = [x for x in self.declared if x.suits(self.first.compressor)]
        present = [x for x in suiting if any(x.key in row for row in tensors)]
        joined = {x.key: self._joined(x, tensors) for x in present}
        self._stored, self._evidence = state, joined

    def _joined(self, evidence: Evidence, tensors: Sequence[dict[str, Tensor]]) -> Tensor:
        pairs, key = zip(tensors, self.entries, strict=True), evidence.key
        return self.combine([x[key] if key in x else evidence.zeros(entry) for x, entry in pairs])

    def combine(self, parts: Sequence[Tensor]) -> Tensor:
        if self.stacked == "any":
            return self._xp.concat([self._xp.reshape(x, (-1,)) for x in parts])
        return self._xp.stack(parts) if self.stacked else parts[0]

    @property
    def stored(self) -> State:
        return self.first.stored or {} if self._stored is None else self._stored

    @property
    def state(self) -> State:
        return widened(self.stored)

    def narrowed(self, state: State, info: Info) -> State:
        seed = random.key("residual", info.rank, info.step)
        names = [entry.name for entry in self.entries]
        return narrowed(self.first.compressor, state, names, seed)

    @property
    def evidence(self) -> dict[str, Tensor]:
        return self.first.evidence if self._stored is None else self._evidence

    @evidence.setter
    def evidence(self, evidence: dict[str, Tensor]) -> None:
        if self._stored is None:
            self.first.evidence = evidence
        else:
            self._evidence = evidence

    @property
    def carries(self) -> bool:
        for entry in self.entries:
            if entry.carried is not None:
                return True
        return False

    def carried(self) -> Tensor | None:
        """Return the residuals of earlier levels to add to the gradient; None if there are none."""
        if not self.carries:
            return None
        return self.combine(
            [
                entry.spec.zeros(entry.bucket.shape)
                if entry.carried is None
                else self._xp.reshape(entry.carried, entry.bucket.shape)
                for entry in self.entries
            ]
        )

    def set_aside(self) -> None:
        self.aside = {key: self._xp.copy(value) for key, value in self.stored.items()}

    def keep(self, state: State, absent: Sequence[Any] = ()) -> None:
        """Store the state of a finished step; the carried residuals are used up.

        Args:
            state: the state, in the form in which it is stored.
            absent: whether the mean of each tensor is not applied, so that its state and carried
                residual stay as they were; () if all are applied. May be symbolic.
        """
        aside, self.aside = self.aside, None
        if aside is not None and any(flag is not False for flag in absent):
            state = {key: self._chosen(aside[key], value, absent) for key, value in state.items()}
        flags = iter(absent)
        for entry in self.entries if self.carries else ():
            own = [flag for _, flag in zip(entry.bucket.members, flags, strict=False)]
            entry.carried = self._still_carried(entry, own)
        if self._stored is None:
            self.first.stored = state
            return
        self._stored = state
        if self._is_stacked():
            return
        place = 0
        for entry in self.entries:
            entry.join(self, place)
            place += entry.bucket.size if self.stacked == "any" else 1

    def _chosen(self, old: Tensor, new: Tensor, absent: Sequence[Any]) -> Tensor:
        xp, bucket = self._xp, self.first.bucket
        # The old parts of tensors that no rank has, and the new ones of all others.
        if self.stacked:
            pairs = zip(xp.unstack(old), xp.unstack(new), strict=True)
            return xp.stack([_either(xp, f, *p) for f, p in zip(absent, pairs, strict=True)])
        if len(absent) == 1:
            return _either(xp, absent[0], old, new)
        # No part of such a tensor belongs to one member of a packed bucket.
        if math.prod(xp.shape(new)) != bucket.size:
            return new
        halves = [xp.split(xp.reshape(x, (-1,)), list(bucket.sizes)) for x in (old, new)]
        parts = [_either(xp, f, *p) for f, *p in zip(absent, *halves, strict=True)]
        return xp.reshape(xp.concat(parts), xp.shape(new))

    def _still_carried(self, entry: BucketState, absent: Sequence[Any]) -> Tensor | None:
        if entry.carried is None or not any(flag is not False for flag in absent):
            return None
        xp, sizes = self._xp, list(entry.bucket.sizes)
        parts = xp.split(xp.reshape(entry.carried, (-1,)), sizes)
        pairs = zip(absent, parts, strict=True)
        kept = xp.concat([_either(xp, flag, part, part * 0) for flag, part in pairs])
        return xp.reshape(kept, xp.shape(entry.carried))

    def take_back(self) -> None:
        if self.before is not None:
            self.evidence, self.before = self.before, None


def _either(xp: ModuleType, flag: Any, old: Tensor, new: Tensor) -> Tensor:
    if isinstance(flag, bool):
        return old if flag else new
    return xp.where(flag, old, new)


def _rows(xp: ModuleType, part: Tensor) -> Tensor:
    count, *shape = xp.shape(part)
    return xp.reshape(part, (count, math.prod(shape)))


# ------------------------------------------------------------------------------------- the layout
@dataclass(frozen=True)
class Limits:
    """Sizes that bound batches and fusion groups.

    Attributes:
        stacked: largest bucket in a batch of several, in elements: up to this size, copying costs
            less than another call.
        least, most: bounds of a fusion group in bytes; between them, it has 1 / `PARTS` of a step.
    """

    stacked: float
    least: float
    most: float


PARTS = 4
CPU = Limits(1 << 16, 1 << 18, 8 << 20)
ACCELERATOR = Limits(math.inf, 1 << 20, 1 << 28)
"""A kernel's launch costs as much as copying a megabyte."""


def limits_of(device: Any) -> Limits:
    return CPU if on_cpu(device) else ACCELERATOR


Kind = tuple[str, Hashable]
"""Layout of a bucket in a batch (`Compressor.batching`), and a key that is equal within a batch."""

Division = list[list[tuple[str, list[int]]]]
"""Fusion groups of batches; a batch has its layout and the positions of its buckets."""


def divide(
    buckets: Sequence[Bucket], kinds: Sequence[Kind], payloads: Sequence[float],
    limit: float | None = None, device: Any = None,
) -> Division:  # fmt: skip
    """Divide buckets into fusion groups and batches.

    Args:
        buckets: all buckets, in the order in which their gradients are expected.
        payloads: approximate bytes of each bucket's first requests.
        limit: size in bytes at which a fusion group is closed. Default: 1 / `PARTS` of all
            payloads, between `Limits.least` and `Limits.most`.
        device: device of the tensors.
    """
    limits = limits_of(device)
    if limit is None:
        limit = min(max(sum(payloads) / PARTS, limits.least), limits.most)
    return [_batches(buckets, kinds, x, limits.stacked) for x in make_groups(payloads, limit)]


def make_groups(payloads: Sequence[float], limit: float) -> list[list[int]]:
    """Divide the positions of `payloads`, in order, into groups of at most about `limit` bytes."""
    groups: list[list[int]] = [[]]
    filled = 0.0
    for position, payload in enumerate(payloads):
        if groups[-1] and filled + payload > limit:
            groups.append([])
            filled = 0.0
        groups[-1].append(position)
        filled += payload
    return [group for group in groups if group]


def _batches(
    buckets: Sequence[Bucket], kinds: Sequence[Kind], group: Sequence[int], largest: float
) -> list[tuple[str, list[int]]]:
    shared: dict[Hashable, list[int]] = {}
    for i in group:
        stacked, common = kinds[i]
        key: Hashable = (i,)
        if stacked and buckets[i].size <= largest:
            key = (stacked, common, buckets[i].shape if stacked == "alike" else None)
        shared.setdefault(key, []).append(i)
    return [(kinds[x[0]][0] if len(x) > 1 else "", x) for x in shared.values()]


class Layout:
    """The batches and fusion groups of an exchange at the present levels; equal on all ranks.

    Args:
        phase_of: function that returns the phase of a bucket's compressor that a layout is for.
        payloads: bytes of the first requests by (bucket, level), as far as they are known.
        limit: as in `divide`.
        earlier: the layout before, whose batches serve on where they are equal.

    Attributes:
        batches: all batches; each bucket belongs to one.
        groups: fusion groups, each as positions of batches.
        batch_of: position of the batch of each tensor, by the tensor's number.
        group_of: position of the fusion group of each batch, by the batch's position.
        labels: name and first compressor of each fusion group, for people.
        number: hash of the layout, equal on ranks whose layouts and levels are equal.
        period: number of steps after which all phases that repeat do so together.
        complete: whether all payloads were known.
        on_cpu: whether the host reads tensors without a wait.
        compares_early: whether to compare the ranks' layouts at the first messages of each group;
            on an accelerator, until a step has shown that they are equal.
        keeps_state: whether a compressor keeps state, or may.
    """

    def __init__(
        self, entries: Sequence[BucketState], tensors: Sequence[TensorInfo], xp: ModuleType,
        evidence: Sequence[Evidence], phase_of: Callable[[BucketState], int],
        payloads: Mapping[tuple[str, int], float], limit: float | None = None,
        earlier: Layout | None = None,
    ) -> None:  # fmt: skip
        buckets, keys = [x.bucket for x in entries], [(x.bucket.name, x.level) for x in entries]
        kinds = [_kind(x, phase_of(x), bool(evidence)) for x in entries]
        sizes = [payloads.get(key, x.dense_bytes) for key, x in zip(keys, buckets, strict=True)]
        self.complete = all(key in payloads for key in keys)
        self.keeps_state = any(entry.compressor.batching != "any" for entry in entries)
        device = entries[0].spec.device if entries else None
        self.on_cpu, self.compares_early = on_cpu(device), True
        division = divide(buckets, kinds, sizes, limit, device)
        serving = [x for x in (earlier.batches if earlier else ()) if x.serves]
        known = {(x.stacked, *map(id, x.entries)): x for x in serving}
        self.batches: list[Batch] = []
        self.groups: list[range] = []
        for group in division:
            first = len(self.batches)
            for stacked, positions in group:
                chosen = [entries[i] for i in positions]
                # A batch that goes on keeps its stacked states and its buffer.
                batch = known.get((stacked, *map(id, chosen)))
                if batch is None:
                    mine = [tensors[m] for x in chosen for m in x.bucket.members]
                    batch = Batch(chosen, stacked, xp, evidence, mine)
                self.batches.append(batch)
            self.groups.append(range(first, len(self.batches)))
        self.batch_of = {m: i for i, batch in enumerate(self.batches) for m in batch.members}
        self.group_of = {i: g for g, members in enumerate(self.groups) for i in members}
        self.labels = [_label([self.batches[i] for i in members]) for members in self.groups]
        self._phased = [entry for entry in entries if entry.phased]
        self.phases = [phase_of(entry) for entry in self._phased]
        self.period = math.lcm(*(entry.compressor.period or 1 for entry in self._phased))
        shapes = [(*key, x.shape) for key, x in zip(keys, buckets, strict=True)]
        self.number = fingerprint(shapes, self.phases, division)

    def holds(self, phase_of: Callable[[BucketState], int]) -> bool:
        return not self._phased or self.phases == [phase_of(entry) for entry in self._phased]


def _label(batches: Sequence[Batch]) -> tuple[str, str]:
    first, *others = [entry for batch in batches for entry in batch.entries]
    more = f" and {len(others)} more" if others else ""
    return first.bucket.name + more, repr(first.compressor)


def _kind(entry: BucketState, phase: int, followed: bool) -> Kind:
    bucket, layout = entry.bucket, entry.compressor.batching
    if layout == "alike" and bucket.packed:  # whose members have shapes of their own
        layout = ""
    # Evidence follows it by a sketch, which is that of one bucket, not of a common vector.
    if layout == "any" and followed and bucket.size > SKETCHED:
        layout = ""
    kind = repr(entry.compressor), phase, bucket.dtype, str(entry.spec.device)
    return layout, (*kind, bucket.group, bucket.compress)
