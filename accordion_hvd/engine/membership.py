"""Changes of the ranks of a training, and what becomes of the state of compression.

Per-rank state follows the rule of checkpoints for another number of ranks (`Compressor.rescale`):
the mean residual over the ranks, which is owed to the mean gradient, stays the same (with `op=Sum`,
the sum). Ranks that leave in order pass their part on before (`hand_over`). The residual of a rank
that died is lost.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import BucketState, TensorInfo
from accordion_hvd.engine.ledger import Ledger
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.optimizers.base import UpdateRule
from accordion_hvd.policies import Policy

E = TypeVar("E", bound=Exchange)

Gather = Callable[[Any], list[Any]]
"""Function that returns the objects of all ranks, in rank order; collective."""


@dataclass
class Part:
    """The state with which a rank enters a new group.

    Attributes:
        rank: number of the rank in the old group.
        ranks: number of ranks in the old group.
        handed_over: whether every rank holds an equal part of all residuals (`hand_over`).
        about: values that are equal on all ranks (`checkpoint.describe`).
        buckets: saved states of the buckets, with residuals of full tensors.
    """

    rank: int
    ranks: int
    handed_over: bool
    about: dict[str, Any]
    buckets: list[SavedState]

    @property
    def steps(self) -> int:
        return self.about["steps"]


@dataclass(frozen=True)
class Regrouping:
    """The ranks of a new group that have state, and those that the old group has lost.

    Attributes:
        lead: the leading rank's part, without its buckets.
        places: old rank numbers of the new ranks with state, in the order of the new ranks.
        joined: number of ranks without state.
    """

    lead: Part
    places: tuple[int, ...]
    joined: int

    @property
    def unchanged(self) -> bool:
        """Return whether the group has the ranks of the old one, in the same order."""
        return not self.joined and self.places == tuple(range(self.lead.ranks))

    @property
    def lost(self) -> list[int]:
        """Return the old numbers of the ranks whose residuals are lost."""
        if self.lead.handed_over:
            return []
        return sorted(set(range(self.lead.ranks)) - set(self.places))


def part(exchange: Exchange, handed_over: bool) -> Part:
    """Return this rank's state, before its communicator is replaced."""
    link, about = exchange.communicator, checkpoint.describe(exchange)
    buckets = checkpoint.expanded(exchange, about)
    return Part(link.rank, link.size, handed_over, about, buckets)


def hand_over(exchange: Exchange, gather: Gather) -> None:
    """Give every rank an equal part of all per-rank state; collective, before ranks leave."""
    own = part(exchange, True)
    states = []
    for entry, mine in zip(exchange.bucket_states, own.buckets, strict=True):
        new = checkpoint.merged(exchange, entry, gather(mine))
        states.append(SavedState(new.level, new.states, new.carried, mine.evidence))
    checkpoint.restoring(exchange, states, own.about)()


def find_group(own: Part | None, leads: bool, gather: Gather) -> Regrouping | None:
    """Compare the parts of all ranks; collective.

    Args:
        own: this rank's part; None for a rank that joins.
        leads: whether the others follow this rank's state; True on one rank.

    Returns:
        The group; None if the leading rank has no state yet. Ranks that have taken another number
        of steps than the leading rank count as joined.
    """
    row = None
    if own is not None:
        about = own.about if leads else {"steps": own.steps}
        row = Part(own.rank, own.ranks, own.handed_over, about, [])
    rows = gather(row)
    lead = next((row for row in rows if row is not None and "tensors" in row.about), None)
    if lead is None:
        return None
    members = [row for row in rows if row is not None and row.steps == lead.steps]
    return Regrouping(lead, tuple(row.rank for row in members), len(rows) - len(members))


def regroup(exchange: Exchange, own: Part | None, group: Regrouping, gather: Gather) -> None:
    """Take over the leading rank's policy and a part of all per-rank state; collective.

    Args:
        own: this rank's part; None for a rank that joins.

    Raises:
        ValueError: if the tensors or the compression of this rank and the leading one differ.
    """
    checkpoint.compare(exchange, group.lead.about)
    if own is not None and own.steps != group.lead.steps:
        own = None
    states = []
    for number, entry in enumerate(exchange.bucket_states):
        mine = None if own is None else own.buckets[number]
        present = [saved for saved in gather(mine) if saved is not None]
        new = checkpoint.merged(exchange, entry, _in_old_places(present, entry, group))
        if not isinstance(entry.levels[new.level], UpdateRule):  # which replace lost parts by zeros
            new = new.scaled(_share(group.lead, len(present), exchange.total))
        new.evidence = {} if mine is None else mine.evidence
        states.append(new)
    checkpoint.restoring(exchange, states, group.lead.about)()


def residual_norm(saved: Sequence[SavedState]) -> float:
    values = (np.asarray(value, np.float64) for state in saved for value in state.residuals())
    return float(np.sqrt(sum(np.sum(np.square(value)) for value in values)))


def _in_old_places(
    present: list[SavedState], entry: BucketState, group: Regrouping
) -> list[SavedState]:
    level = entry.levels[present[0].level]
    if not isinstance(level, UpdateRule) or len(present) == group.lead.ranks:
        return present
    # Rules shard states over the old ranks; what lost ranks owed (`UpdateRule.owed`) is zero.
    by_place = dict(zip(group.places, present, strict=True))
    lost = _without(present[0], level.owed)
    return [by_place.get(i) or lost for i in range(group.lead.ranks)]


def _without(saved: SavedState, names: Sequence[str]) -> SavedState:
    states = {
        number: {k: 0 * x if k in names else x for k, x in state.items()}
        for number, state in saved.states.items()
    }
    return SavedState(saved.level, states, saved.carried)


def _share(lead: Part, present: int, total: bool) -> float:
    # After a handover, each rank has the mean; otherwise, residuals of lost ranks are zero.
    if lead.handed_over:
        return lead.ranks / present if total else 1.0
    return 1.0 if total else present / lead.ranks


class Member(abc.ABC, Generic[E]):
    """An averager whose ranks may come, go and fail, and whose training may resume.

    Elastic jobs, torchft and checkpoints call these methods; adapters of frameworks extend them.

    Attributes:
        agreed: whether the ranks have compared their settings.
    """

    communicator: Communicator
    policy: Policy
    ledger: Ledger
    name: str
    sparse: list[Any]
    agreed = False
    _exchange: E | None = None
    _own_state = True  # whether the adopted state was saved by this rank
    _committed: dict[str, Any] | None = None  # state of the last commit
    _part: Part | None = None  # state from before the last change of ranks
    _handed_over = False

    @property
    @abc.abstractmethod
    def exchange(self) -> E:
        """Return the exchange of all tensors except the sparse ones; made at the first use."""

    @abc.abstractmethod
    def connect(self) -> Communicator:
        """Return a new communicator of the ranks of the process set."""

    @abc.abstractmethod
    def tensors(self) -> Mapping[Any, TensorInfo]:
        """Return all tensors with gradients to average, in an order that is equal on all ranks."""

    def keep_start(self) -> None:
        """Keep the policy's present state, to which `adopt(None)` returns."""
        self._initial_policy = copy.deepcopy(self.policy.state_dict())

    def doubt(self) -> None:
        """Make ranks compare their set-ups again before the next exchange."""
        self.agreed = False

    def resumed(self) -> None:
        """Handle the event that the exchange goes on from the steps of the leading rank."""

    # -------------------------------------------------------------------------- elastic jobs
    def commit(self) -> None:
        self._committed = None
        if self._exchange is not None and self._exchange.steps:
            saved = checkpoint.snapshot(self._exchange)
            self._committed = {**saved, "about": copy.deepcopy(saved["about"])}

    def committed_norm(self) -> float:
        if self._committed is None:
            return 0.0
        saved, to_numpy = self._committed, self.exchange.xp.to_numpy
        tensors = {name: to_numpy(value) for name, value in saved["tensors"].items()}
        return residual_norm(checkpoint.read_named(tensors, saved["about"]))

    def roll_back(self) -> None:
        """Return to the state of the last commit, after a failure; nothing is exchanged."""
        if self._exchange is not None:
            self._exchange.abort()
        if self._committed is not None:
            saved = {**self._committed, "about": copy.deepcopy(self._committed["about"])}
            checkpoint.adopt(self.exchange, saved)
        elif self._exchange is not None:
            self.adopt(None)
        self._handed_over = False
        self.doubt()

    def hand_over(self, gather: Gather) -> None:
        if self._exchange is not None and self._exchange.steps:
            hand_over(self._exchange, gather)
            self._handed_over = True

    def ranks_changed(self) -> None:
        link = self.connect()
        if self._exchange is not None:
            self._exchange.abort()
            # Before `move`, which puts the new communicator in the place of the old one.
            self._part = part(self._exchange, self._handed_over)
            checkpoint.move(self._exchange, link)
        self.communicator = link
        if self._exchange is not None:
            self.ledger.moved(self._exchange)
        self._own_state = self._handed_over = False
        self.doubt()

    def prepare_regroup(self, gather: Gather, leader: int) -> None:
        """Do nothing: weights are equal on all ranks, so those of the leader can be broadcast."""

    def regroup(self, gather: Gather, leader: int) -> Regrouping | None:
        """Take over policy and steps of the leading rank, a part of all residuals; collective.

        Returns:
            The group; None if the leading rank has taken no step.
        """
        begun = self._exchange is not None and self._exchange.steps > 0
        own, self._part = self._part, None
        if not begun:
            own = None
        elif own is None:
            own = part(self.exchange, False)
        # Names must be equal, but a rank that joins has counted its averagers by itself.
        self.name = gather(self.name)[leader]
        group = find_group(own, self.communicator.rank == leader, gather)
        if group is not None and not group.unchanged:
            if self.policy.gate is not None:  # a rank that joins has measured nothing
                self.policy.gate.restart()
                self.policy.gate.assignment = {}
            self.expect(group.lead.about["tensors"])
            regroup(self.exchange, own, group, gather)
        if self._exchange is not None:
            self._exchange.name = self.name
            self.resumed()
        self._own_state = True
        self.doubt()
        return group

    # -------------------------------------------------------------------------------- checkpoints
    def expect(self, names: Sequence[str]) -> checkpoint.Restore | None:
        """Prepare a restore: tensors that are not in `names` had sparse gradients when saved.

        Returns:
            A function that takes this back; None if the exchange existed before.
        """
        if self._exchange is not None:
            return None
        before = self.sparse
        self.sparse = [
            key
            for key, info in self.tensors().items()
            if not any(checkpoint.same_name(info.name, name) for name in names)
        ]

        def take_back() -> None:
            self.adopt(None)
            self.sparse = before

        return take_back

    def adopt(self, saved: dict[str, Any] | None) -> None:
        """Continue from a `checkpoint.snapshot`; as `adopting` does, but now."""
        self.adopting(saved)()

    def adopting(self, saved: dict[str, Any] | None) -> checkpoint.Restore:
        """Check a `checkpoint.snapshot`, and return the function that continues from it.

        Call the function before the next exchange. Before that exchange, the ranks check whether
        each adopted its own snapshot. If not, all ranks discard per-rank state.

        Args:
            saved: the snapshot; None to return to the initial state.

        Raises:
            ValueError: if the snapshot is from other tensors or another policy, or lacks a key.
        """
        if saved is None:
            return self._start_over
        own, restore = checkpoint.adopting(self.exchange, saved)

        def adopt() -> None:
            restore()
            self._own_state = own
            self.doubt()

        return adopt

    def _start_over(self) -> None:
        self._exchange = None
        self.policy._bound = None
        self.policy.load_state_dict(copy.deepcopy(self._initial_policy))
        self.doubt()


logger = logging.getLogger(__name__)


class FollowsRanks:
    """Mixin for the states of `horovod.elastic`, placed before Horovod's class.

    Commits contain residuals, levels, policies and the state of model averaging. Before ranks
    leave in order, they hand their residuals over to the others. After a change of the ranks, all
    ranks share the residuals equally. If a rank died, the leader reports the loss, which is the
    residual that the rank's last commit held.

    All ranks take over the state of the leader, which is the first rank that was in the job before.
    That is rank 0, except after a discovery that found no host: Horovod then forgets which hosts
    were first, and rank 0 may be new.

    Attributes:
        interrupt: Horovod's exception for changed hosts.
        leading_rank: number of the rank whose state the others take over.
    """

    interrupt: ClassVar[type[Exception]]
    leading_rank = 0
    _bcast_object: Callable[..., Any]
    _norms: tuple[list[float], ...] = ()  # norms of the committed residuals, by rank and member
    _in_job = False  # whether this rank has the state of the job

    def _gather(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def _optimizers(self) -> Iterable[Any]:
        raise NotImplementedError

    def save(self) -> None:
        for member in self._members():
            member.commit()
        super().save()  # type: ignore[misc]

    def restore(self) -> None:
        for member in self._members():
            member.roll_back()
        super().restore()  # type: ignore[misc]

    def check_host_updates(self) -> None:
        """Raise Horovod's interrupt if hosts have changed; collective.

        Before the interrupt, ranks hand over their residuals.
        """
        members = self._members()
        if members:
            # Now, because a rank that dies before the next commit can no longer tell.
            self._norms = tuple(self._gather([member.committed_norm() for member in members]))
        try:
            super().check_host_updates()  # type: ignore[misc]
        except self.interrupt as change:
            for member in members:
                member.hand_over(self._gather)
            # Horovod omits `sync` if hosts were only removed. But another host may be added before
            # the ranks connect, and its ranks would wait for the others in `sync` for ever.
            change.skip_sync = False  # type: ignore[attr-defined]
            raise

    def reset(self) -> None:
        """Connect all optimizers of this process to the present ranks."""
        for owner in checkpoint.owners():
            if hasattr(owner, "ranks_changed"):
                owner.ranks_changed()
        super().reset()  # type: ignore[misc]

    def sync(self) -> None:
        """Broadcast the leader's state to all ranks, and share the residuals; collective."""
        in_job = self._gather(self._in_job)
        self.leading_rank = in_job.index(True) if True in in_job else 0
        for member in self._members():
            member.prepare_regroup(self._gather, self.leading_rank)
        with replaced(self, _bcast_object=self.from_leader(self._bcast_object)):
            super().sync()  # type: ignore[misc]
        self._regroup()
        self._in_job = True

    def from_leader(self, broadcast: Callable[..., Any]) -> Callable[..., Any]:
        """Return Horovod's function `broadcast` with the leader as its root."""

        def broadcast_from_leader(value: Any, root_rank: int = 0) -> Any:
            del root_rank  # Horovod's states take rank 0 for the leader
            return broadcast(value, root_rank=self.leading_rank)

        return broadcast_from_leader

    def _regroup(self) -> None:
        norms, self._norms = self._norms, ()
        leads = self._rank() == self.leading_rank  # type: ignore[attr-defined]
        for number, member in enumerate(self._members()):
            group = member.regroup(self._gather, self.leading_rank)
            if group is not None and group.lost and leads:
                _report(group, [row[number] for row in norms])
        self.save()  # a failure must not lead back to a commit of other ranks

    def _members(self) -> list[Any]:
        values = [getattr(item, "exchange_owner", None) for item in self._optimizers()]
        owners = [owner for x in values for owner in (x if isinstance(x, tuple) else (x,))]
        return [owner for owner in owners if hasattr(owner, "regroup")]


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object or a module within a `with` block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _report(group: Regrouping, norms: list[float]) -> None:
    if len(norms) != group.lead.ranks:  # they died before the first commit
        return
    lost = math.hypot(*(norms[rank] for rank in group.lost))
    if lost:
        logger.warning(
            "accordion_hvd: ranks %s of %d ended without a handover. Their residuals at the last "
            "commit (norm %.3g of %.3g) are lost.",
            group.lost, group.lead.ranks, lost, math.hypot(*norms),
        )  # fmt: skip
