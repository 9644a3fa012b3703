"""The interface of policies."""

from __future__ import annotations

import abc
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import ASPECTS, Compressor, NotForStockHorovod, Output, Private, Scope
from accordion_hvd.core.observer import Observers
from accordion_hvd.policies.evidence import Evidence
from accordion_hvd.policies.gate import Gate, Gating

Numbers = Mapping[str, float]
"""Bucket -> number, such as its learning rate."""

Seen = Mapping[str, Numbers]
"""Evidence key -> bucket -> number."""


class Policy(NotForStockHorovod, abc.ABC):
    """Base class of policies: decides which of its levels serves each bucket.

    A policy sees names, numbers and learning rates, never tensors or networks. The exchange of an
    optimizer binds the policy (`bind`) and announces each step (`tick`). If a decision is due
    (`due`), the exchange gives rank 0's policy the evidence and the learning rates (`decide`),
    broadcasts the decisions, and has the policy of each rank `apply` them. So all ranks switch at
    the same step.

    Attributes:
        evidence: the evidence for decisions; see `accordion_hvd.policies.evidence`.
        observers: features that follow an exchange, such as a gate; see `Observer`.
        output: the levels' `output` (see `Compressor`), on which all levels agree.
        scope: the levels' `scope`, on which all levels agree.
        scopes: name pattern -> scope of the tensors that an override of this pattern serves.
        overrides: name pattern -> compressor that serves the matching tensors instead.
        plain: the compressor of tensors that are exempt from the policy.
        topology_aware: whether a level needs to know which ranks share a host.
        fp16_reduction: whether a level sends nothing but fp16.
        fixed: whether one level serves all the time.
        watches_rates: whether decisions depend on the learning rate.
        passes: number of backward passes whose gradients one exchange averages.
        history: all decisions so far.
        gate: the gate that uses the levels only where they save time; None to use them always.
        KEPT: names of further attributes that checkpoints contain; subclasses extend it.
    """

    evidence: tuple[Evidence, ...] = ()
    observers: Observers = Observers()
    output: Output = "gradient"
    scope: Scope = "tensor"
    scopes: Mapping[str, Scope] = {}
    topology_aware: bool = False
    fp16_reduction: bool = False
    fixed: bool = False
    watches_rates: bool = False
    passes: int = 1
    overrides: Mapping[str, Compressor] = {}
    plain: Compressor = Dense()
    KEPT: ClassVar[tuple[str, ...]] = ()
    _levels: tuple[Compressor, ...] = ()  # those that have agreed

    def __init__(self) -> None:
        self.history: list[Decision] = []
        self.current: dict[str, int] = {}
        self._step = 0  # exchanges so far, if the policy counts them; of `Windowed`, batches
        self._bound: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"  # an address would differ in a resumed job

    # ------------------------------------------------------------------ for subclasses to define
    @abc.abstractmethod
    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return the compressors that may serve bucket `name`; a level is an index into them."""

    def start(self, name: str) -> int:
        """Return the level of bucket `name` before the first decision."""
        return 0

    def observing(self) -> bool:
        """Return whether the gradients of this step are evidence for a later decision."""
        return False

    def due(self, lr: Numbers) -> bool:
        """Return whether decisions are due before the next exchange; equal on all ranks."""
        return False

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        """Return the decisions of rank 0, without changing the policy.

        Args:
            seen: the evidence that the policy declares, by its key.
            lr: bucket -> learning rate of the next step.
        """
        return []

    def tick(self, lr: Numbers) -> None:
        """Count the exchange that is about to begin.

        Args:
            lr: bucket -> learning rate of that step.
        """
        self._step += 1

    # ------------------------------------------------------------------- common to all policies
    @property
    def gate(self) -> Gate | None:
        """Return the gate; None if there is none."""
        gating = self.observers.find(Gating)
        return None if gating is None else gating.gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        others = [x for x in self.observers if not isinstance(x, Gating)]
        self.observers = Observers([*others, *([] if gate is None else [Gating(gate)])])

    def choices(self, bucket: Any) -> tuple[Compressor, ...]:
        """Return the compressors that may serve a bucket: the levels, then the gate's fallbacks."""
        if not bucket.compress:
            return (self.plain if bucket.size else Dense(),)
        return self.levels(bucket.name) + (self.gate.fallbacks if self.gate is not None else ())

    def choice(self, bucket: Any) -> int:
        """Return the index into `choices` of the compressor that serves a bucket now."""
        if not bucket.compress:
            return 0
        level = self.level(bucket.name)
        if self.gate is None:
            return level
        return self.gate.level(bucket.name, level, len(self.levels(bucket.name)))

    def bind(self, owner: Any, names: Sequence[str]) -> None:
        """Start to serve the buckets of an exchange.

        Args:
            owner: the exchange.
            names: names of its buckets.

        Raises:
            ValueError: if the policy serves another optimizer already.
        """
        if self._bound is not None and self._bound() is not owner:
            raise ValueError(
                f"{type(self).__name__}: this policy already serves another optimizer, or did; "
                "make a new policy for each optimizer, because a policy has state."
            )
        self._bound = weakref.ref(owner)
        for name in names:
            self.current.setdefault(name, self.start(name))

    def complete(self) -> None:
        """Check that the policy can serve a `DistributedOptimizer`.

        Raises:
            ValueError: if an argument is missing.
        """

    def level(self, name: str) -> int:
        """Return the level of bucket `name` now."""
        return self.current[name]

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Set the levels that were decided, and append the decisions to the history."""
        for row in decisions:
            self.current[row.name] = row.level
        self.history.extend(decisions)

    def on_level_override(self, names: Sequence[str]) -> None:
        """Handle the event that a gate has changed the compressors of these buckets."""

    def affords(self) -> bool:
        """Return whether another step may be taken: False once a privacy budget is spent."""
        return all(observer.affords() for observer in self.observers)

    def end_window(self) -> None:
        """End a window (an epoch); called by the user."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in numbers, strings, lists and dicts."""
        state = {"history": plain(self.history), "current": dict(self.current)}
        state |= {key: getattr(self, key) for key in self.KEPT}
        for observer in self.observers:
            state |= observer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict`; privacy that was spent later stays spent."""
        self.history[:] = read(state["history"])
        self.current = dict(state["current"])
        for key in self.KEPT:
            setattr(self, key, state[key])
        for observer in self.observers:
            observer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has the same history but serves no exchange yet."""
        return {**vars(self), "_bound": None}

    def _call(self, *arguments: Any, **named: Any) -> str:
        """Return the constructor's call with these arguments, the policy's repr."""
        words = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in named.items())]
        return f"{type(self).__name__}({', '.join(words)})"


def agree(owner: Policy, levels: Sequence[Any], overrides: Mapping[str, Any] | None = None) -> None:
    """Set the levels of `owner`, and the attributes on which they must agree.

    `Dense` and other compressors with `batching = "any"` agree with any scope. Overrides serve
    buckets of their own, and may have the scope "tensor" beside levels of scope "joint", or the
    reverse.

    Args:
        owner: the policy.
        levels: its levels, which `Windowed.levels` returns.
        overrides: name pattern -> compressor that serves the matching tensors instead.

    Raises:
        TypeError: if a level is no compressor.
        ValueError: if an attribute of a level is none of `ASPECTS`; if the levels differ in output
            or scope, or in the compressor of exempt tensors; if a private compressor is not
            the only level; or if the ranks' weights differ at times under one of several levels.
    """
    bases, overrides = levels, overrides or {}
    levels = [*levels, *overrides.values()]
    for level in levels:
        if not isinstance(level, Compressor):
            raise TypeError(
                f"{type(owner).__name__}: level {level!r} must be a Compressor such as TopK(0.01)."
            )
        for aspect, allowed in ASPECTS.items():
            check.one_of(level, aspect, getattr(level, aspect), allowed)
    _check_private(owner, levels)
    local = [x for x in levels if type(x).synchronous is not Compressor.synchronous]
    if local and len({repr(level) for level in levels}) > 1:
        raise ValueError(
            f"{type(owner).__name__}: under {local[0]!r} the ranks' weights differ between "
            "synchronisations, so it cannot alternate with other levels; use it as the only level."
        )
    _compare(owner, "output", {repr(level): level.output for level in levels})
    owner.output = levels[0].output
    _agree_in_scope(owner, bases, overrides)
    plain = {repr(level): level.plain() or Dense() for level in levels}
    _compare(owner, "the compressor of exempt tensors", plain)
    owner._levels, owner.plain = tuple(bases), levels[0].plain() or Dense()
    owner.topology_aware = any(level.topology_aware for level in levels)
    owner.fp16_reduction = any(level.fp16_reduction for level in levels)


def _agree_in_scope(
    owner: Policy, bases: Sequence[Compressor], overrides: Mapping[str, Compressor]
) -> None:
    levels = [*bases, *overrides.values()]
    values = {repr(level): level.scope for level in levels if not _takes_any_vector(level)}
    if not set(values.values()) <= {"tensor", "joint"}:
        _compare(owner, "scope", values)
    bound = [level for level in bases if not _takes_any_vector(level)] or bases
    _compare(owner, "scope", {repr(level): level.scope for level in bound})
    owner.scope = bound[0].scope
    owner.scopes = {pattern: level.scope for pattern, level in overrides.items()}


def _check_private(owner: Policy, levels: Sequence[Compressor]) -> None:
    private = [level for level in levels if isinstance(level, Private)]
    if private and (len(levels) > 1 or not owner.fixed):
        raise ValueError(
            f"{type(owner).__name__}: {private[0]!r} is private and must be the only level, since "
            "other levels would send the gradients that it protects; use compression=TopAgg(...)."
        )


def _compare(owner: Policy, aspect: str, values: Mapping[str, Any]) -> None:
    if len(set(values.values())) > 1:
        described = ", ".join(f"{name} has {value!r}" for name, value in values.items())
        raise ValueError(f"{type(owner).__name__}: levels must agree in {aspect}: {described}.")


def _takes_any_vector(level: Compressor) -> bool:
    return level.batching == "any" and level.scope == "tensor"


def override(overrides: Mapping[str, Compressor], name: str) -> Compressor | None:
    """Return the compressor of the first pattern that a bucket's first tensor matches.

    The bucket's name is such as "fc.weight", or "fc.weight+2" for three tensors.
    """
    tensor, plus, others = name.rpartition("+")
    pattern = check.first_match(tensor if plus and others.isdigit() else name, overrides)
    return None if pattern is None else overrides[pattern]


# ------------------------------------------------------------------------------- windows of batches
PATIENCE = 1000
"""Batches after which a policy warns if no window has ended yet and their length is unknown."""


class Windowed(Policy):
    """Base class of policies that count steps and windows and decide at the end of a window.

    If an exchange has several micro-batches, or averages the gradients of several backward passes,
    the policy counts these. An exchange belongs to the window in which it takes place; its
    micro-batches beyond the end of the window count for the next window. A decision that must wait
    (`ready`) prolongs its window, possibly by several lengths.

    Args:
        window: batches (backward passes) in a window, such as `len(loader)`. None if calls of
            `end_window` end the windows.
    """

    KEPT: ClassVar[tuple[str, ...]] = ("_epoch", "_steps", "_step", "_ended", "_by_hand", "_lr")

    def __init__(self, window: int | None) -> None:
        super().__init__()
        if window is not None:
            check.integer(self, "window", window, least=1)
        self.window = window
        self._epoch = 0  # windows ended so far
        self._steps = 0  # batches of the exchanges in this window
        self._ended = False  # whether end_window has ended this window
        self._by_hand = False  # whether end_window was ever called
        self._lr: dict[str, float] = {}  # learning rates at the start of the window

    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return the levels of `agree`, or the one override that always serves bucket `name`."""
        always = override(self.overrides, name)
        return self._levels if always is None else (always,)

    def due(self, lr: Numbers) -> bool:
        """Return whether a decision is due: at the first exchange after the end of a window.

        Only then is the next learning rate known.
        """
        return self.ready and self.over

    @property
    def ready(self) -> bool:
        """Return whether a decision is possible now; otherwise the window is prolonged."""
        return True

    @property
    def steps(self) -> int:
        """Return the number of batches of all exchanges so far."""
        return self._step

    @property
    def over(self) -> bool:
        """Return whether the window has ended."""
        complete = self.window is not None and self._steps >= self.window
        return self._steps > 0 and (self._ended or complete)

    def tick(self, lr: Numbers) -> None:
        """Count an exchange; store the learning rates at the start of a window."""
        if Windowed.due(self, lr):
            self._roll()  # the window ended without a decision
        if self._steps == 0 or not self._lr:
            self._lr = dict(lr)
        batches = self.observers.weight * self.passes
        self._steps += batches
        self._step += batches
        unknown = self.window is None and not self._by_hand
        if unknown and 0 <= self._step - PATIENCE - 1 < batches:
            name = type(self).__name__
            warnings.warn(
                f"{name}: after {PATIENCE} batches no window (epoch) has ended, and without one "
                f"there is no decision. Pass {name}(..., window=<batches per epoch>), or call "
                "optimizer.end_window() after each epoch; in Keras, pass "
                "BroadcastGlobalVariablesCallback to fit().",
                RuntimeWarning,
                stacklevel=2,
            )

    def end_window(self) -> None:
        """End the current window.

        A call before the first step declares that later calls will end the windows.
        """
        self._by_hand = True
        self._ended = self._steps > 0

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions, and begin the next window."""
        super().apply(decisions)
        self._roll()

    def _decision(self, name: str, level: int, reason: str, lr: float, **found: Any) -> Decision:
        """Return the row about bucket `name` at the end of this window."""
        row = Decision(name, level, self._step, self._epoch, repr(self._levels[level]), reason)
        return replace(row, lr=lr, previous_lr=self._lr.get(name, math.nan), **found)

    def _roll(self) -> None:
        beyond = 0 if self._ended or self.window is None else self._steps % self.window
        self._epoch += 1
        self._steps, self._ended, self._lr = beyond, False, {}


# ---------------------------------------------------------------------------------------- decisions
@dataclass(eq=False)
class Decision(Mapping[str, Any]):
    """One decision about a bucket, the batch size or model averaging.

    A decision is also a mapping: `row["level"]` is `row.level`, and `dict(row)` has all fields.

    Attributes:
        name: name of the bucket; "(batch size)" or "(model)" for a decision about the entire model.
        level: index of the chosen level.
        step: number of exchanges before the decision; of small batches if an exchange has several.
        window: number of windows that ended before the current one.
        compressor: the chosen level as text.
        reason: reason of the decision in a few words.
        norm: the evidence, such as the norm of the sum of a window's gradients.
        previous: the value with which `norm` was compared (`AdaQS`: `ratio`).
        change: the relative change from `previous`.
        lr: learning rate of the next step.
        previous_lr: learning rate at the start of the window.
        ratio: mean over standard deviation of the gradients (`AdaQS`).
        efficiency: progress of a step relative to an uncompressed one (`Goodput`).
        weight: weight of `efficiency` in a mean over buckets (`Goodput`).
    """

    name: str
    level: int
    step: int = 0
    window: int = 0
    compressor: str = ""
    reason: str = ""
    norm: float = math.nan
    previous: float = math.nan
    change: float = math.nan
    lr: float = math.nan
    previous_lr: float = math.nan
    ratio: float = math.nan
    efficiency: float = math.nan
    weight: float = math.nan

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def plain(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Return decisions as dicts for JSON."""
    return [dict(decision) for decision in decisions]


def read(rows: Iterable[Mapping[str, Any]]) -> list[Decision]:
    """Return decisions from dicts; missing fields get their defaults, unknown ones are ignored."""
    known = {field.name for field in fields(Decision)}
    return [Decision(**{k: v for k, v in row.items() if k in known}) for row in map(dict, rows)]
