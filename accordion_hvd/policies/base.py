"""The contract of policies."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from accordion_hvd import _renamed
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import Compressor, NotForStockHorovod
from accordion_hvd.core.observer import Observer, Observers
from accordion_hvd.policies import decision
from accordion_hvd.policies.decision import Decision
from accordion_hvd.policies.evidence import Evidence
from accordion_hvd.policies.gate import Gate
from accordion_hvd.policies.gating import Gating

Seen = Mapping[str, Mapping[str, float]]
"""Evidence by its key: bucket -> number."""


RENAMED = {"disturbed": "on_level_override", "halves": "fp16_reduction"}
"""Old names of members that a policy may define, and the new ones."""


class Policy(NotForStockHorovod, abc.ABC):
    """Decides which of its levels serves each bucket; knows neither tensors nor networks.

    An exchange binds itself to the policy, tells it of each step (`tick`), and when a decision is
    due (`due`) hands rank 0's policy the evidence and learning rates (`decide`), broadcasts the
    decisions and lets every rank's policy `apply` them: all ranks switch at the same step.

    Attributes:
        evidence: what it decides by; see `accordion_hvd.policies.evidence`.
        features: what follows its exchange besides; see `Observer`.
        target, output, scope: what its levels declare (`Compressor`), all alike.
        topology_aware: whether one of its levels asks who shares a machine.
        fp16_reduction: whether one sends nothing but fp16.
        fixed: whether one level serves all the time.
        history: all decisions so far.
        gate: applies its levels only where that saves time; None: always.
        KEPT: attributes that checkpoints hold besides; subclasses add theirs.
    """

    evidence: tuple[Evidence, ...] = ()
    features: tuple[Observer, ...] = ()
    target: str = "gradient"
    output: str = "gradient"
    scope: str = "tensor"
    topology_aware: bool = False
    fp16_reduction: bool = False
    fixed: bool = False
    KEPT: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept members by their old names."""
        super().__init_subclass__(**options)
        _renamed.members(cls, RENAMED)

    def __init__(self) -> None:
        self.history: list[Decision] = []
        self.current: dict[str, int] = {}
        self._bound: Any = None
        self._plain: Compressor | None = None

    # -------------------------------------------------------------------------- what a policy says
    @abc.abstractmethod
    def levels(self, name: str) -> tuple[Compressor, ...]:
        """Return the compressors that may serve bucket `name`; `level` is an index into them."""

    def start(self, name: str) -> int:
        """Return the level of bucket `name` before any decision."""
        return 0

    def observing(self) -> bool:
        """Return whether the gradients of this step count for a decision to come."""
        return False

    def due(self, lr: Mapping[str, float]) -> bool:
        """Return whether decisions are due before the next exchange; equal on all ranks."""
        return False

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        """Rank 0's decisions; changes nothing.

        Args:
            seen: the evidence that it has asked for, by key.
            lr: the learning rate that each bucket's next step will use.
        """
        return []

    def tick(self, lr: Mapping[str, float]) -> None:
        """Count an exchange that is about to begin with these learning rates."""

    # ------------------------------------------------------------------------- common to all
    @property
    def observers(self) -> Observers:
        """Return the observers of its exchange: its features, and its gate."""
        return Observers(self.features)

    @property
    def gate(self) -> Gate | None:
        """See the class."""
        gating = self.observers.find(Gating)
        return None if gating is None else gating.gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        others = [x for x in self.features if not isinstance(x, Gating)]
        self.features = (*others, *([] if gate is None else [Gating(gate)]))

    def choices(self, bucket: Any) -> tuple[Compressor, ...]:
        """Return the compressors that may serve a bucket: its levels, then the gate's fallbacks."""
        if not bucket.compress:
            return (self.plain() if bucket.size else Dense(),)
        return self.levels(bucket.name) + (self.gate.fallbacks if self.gate is not None else ())

    def choice(self, bucket: Any) -> int:
        """Return which of the `choices` serves a bucket now."""
        if not bucket.compress:
            return 0
        level = self.level(bucket.name)
        if self.gate is None:
            return level
        return self.gate.level(bucket.name, level, len(self.levels(bucket.name)))

    def bind(self, owner: Any, names: Sequence[str]) -> None:
        """Serve `owner`'s buckets.

        Raises:
            ValueError: the policy serves another optimizer already.
        """
        if self._bound is not None and self._bound() is not owner:
            raise ValueError(
                f"{type(self).__name__}: this policy serves another optimizer already (or did); "
                "make one for each optimizer, since it keeps what it has seen."
            )
        self._bound = weakref.ref(owner)
        for name in names:
            self.current.setdefault(name, self.start(name))

    def complete(self) -> None:
        """Raises: ValueError if it lacks what it needs to serve a `DistributedOptimizer`."""

    def plain(self) -> Compressor:
        """Return the compressor of tensors that are exempt from the policy."""
        return self._plain or Dense()

    def level(self, name: str) -> int:
        """Return the level that serves bucket `name` now."""
        return self.current[name]

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Put decisions into force and remember them."""
        for row in decisions:
            self.current[row.name] = row.level
        self.history.extend(decisions)

    def on_level_override(self, names: Sequence[str]) -> None:
        """Note that a gate has changed the compressors of these buckets."""

    def affords(self) -> bool:
        """Return whether another step may be taken: False once a privacy budget is spent."""
        return all(observer.affords() for observer in self.observers)

    def end_window(self) -> None:
        """End a window (an epoch); called by the user."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        kept = {key: getattr(self, key) for key in self.KEPT}
        return {"history": decision.plain(self.history), "current": dict(self.current)} | kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict`."""
        self.history[:] = decision.read(state["history"])
        self.current = dict(state["current"])
        for key in self.KEPT:
            setattr(self, key, state[key])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which keeps the history but serves no exchange yet."""
        return {**vars(self), "_bound": None}


def agree(owner: Policy, levels: Sequence[Any]) -> None:
    """Declare for `owner` what its levels declare; `Dense` and its like take any scope.

    Raises:
        TypeError: one is no compressor.
        ValueError: they differ in target, output or scope, or in what serves exempt tensors; a
            private one is not alone; or under one, the ranks' weights differ at times, when no
            other may follow.
    """
    for level in levels:
        if not isinstance(level, Compressor):
            raise TypeError(
                f"{type(owner).__name__}: level {level!r} must be a Compressor such as TopK(0.01)."
            )
    _keep_private(owner, levels)
    alone = [x for x in levels if type(x).synchronous is not Compressor.synchronous]
    if alone and len({repr(level) for level in levels}) > 1:
        raise ValueError(
            f"{type(owner).__name__}: under {alone[0]!r} the ranks' weights differ between its "
            "synchronisations, so it cannot take turns with others; name it alone."
        )
    for aspect in ("target", "output", "scope"):
        choosy = [x for x in levels if aspect != "scope" or not _takes_any_vector(x)] or levels
        values = {repr(level): getattr(level, aspect) for level in choosy}
        _compare(owner, aspect, values)
        setattr(owner, aspect, getattr(choosy[0], aspect))
    _compare(owner, "what serves exempt tensors", {repr(x): x.plain() or Dense() for x in levels})
    owner._plain = levels[0].plain()
    owner.topology_aware = any(level.topology_aware for level in levels)
    owner.fp16_reduction = any(level.fp16_reduction for level in levels)


def _keep_private(owner: Policy, levels: Sequence[Compressor]) -> None:
    private = [level for level in levels if level.private]
    if private and (len(levels) > 1 or not owner.fixed):
        raise ValueError(
            f"{type(owner).__name__}: {private[0]!r} is private and can be no level among others, "
            "which would send what it hides; let it serve alone, as compression=TopAgg(...)."
        )


def _compare(owner: Policy, aspect: str, values: Mapping[str, Any]) -> None:
    if len(set(values.values())) > 1:
        described = ", ".join(f"{name} has {value!r}" for name, value in values.items())
        raise ValueError(f"{type(owner).__name__}: levels must agree in {aspect}: {described}.")


def _takes_any_vector(level: Compressor) -> bool:
    return level.batching == "any" and level.scope == "tensor"
