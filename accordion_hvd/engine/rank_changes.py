"""State of compression when the ranks of an elastic job change.

Per-rank state follows the rule of checkpoints for another number of ranks (`Compressor.rescale`):
the mean residual over the ranks, which is owed to the mean gradient, stays the same (with `op=Sum`,
the sum). Ranks that leave in order pass their part on before (`hand_over`). The residual of a rank
that died is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import BucketState
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.optimizers.base import UpdateRule

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
class Group:
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
    checkpoint.restore(exchange, states, own.about)


def find_group(own: Part | None, leads: bool, gather: Gather) -> Group | None:
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
    return Group(lead, tuple(row.rank for row in members), len(rows) - len(members))


def regroup(exchange: Exchange, own: Part | None, group: Group, gather: Gather) -> None:
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
    checkpoint.restore(exchange, states, group.lead.about)


def residual_norm(saved: Sequence[SavedState]) -> float:
    squares = [
        float(np.sum(np.square(np.asarray(value, np.float64))))
        for state in saved
        for value in state.residuals()
    ]
    return float(np.sqrt(sum(squares)))


def _in_old_places(present: list[SavedState], entry: BucketState, group: Group) -> list[SavedState]:
    """Return one state per old rank if an update rule's state is sharded, else `present`.

    The residual of the lost ranks' shards ("server") is zero.
    """
    level = entry.levels[present[0].level]
    if not isinstance(level, UpdateRule) or len(present) == group.lead.ranks:
        return present
    by_place = dict(zip(group.places, present, strict=True))
    return [by_place.get(i) or _without_server(present[0]) for i in range(group.lead.ranks)]


def _without_server(saved: SavedState) -> SavedState:
    states = {
        number: {k: 0 * x if k == "server" else x for k, x in state.items()}
        for number, state in saved.states.items()
    }
    return SavedState(saved.level, states, saved.carried)


def _share(lead: Part, present: int, total: bool) -> float:
    """Return the factor of the merged residuals of the ranks that are present.

    After a handover, each of them has the mean; otherwise the residuals of lost ranks are zero.
    """
    if lead.handed_over:
        return lead.ranks / present if total else 1.0
    return 1.0 if total else present / lead.ranks
