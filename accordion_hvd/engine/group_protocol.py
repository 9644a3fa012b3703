"""The decisions of a rank's progress thread in wait-avoiding averaging: no clocks, no network.

Versions 0, 1, 2, ... of the model are averaged one after the other, each within a group or among
all. A group's average needs nobody's training thread: as soon as anybody has activated version t,
each rank takes part with the model that was published last there. An average among all takes
place when every training thread has asked for it.

`engine.wait_avoiding` runs this over MPI, `simulation.virtual_time` in virtual time, and tests
under adversaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd.averaging.groups import Group, Groups
from accordion_hvd.engine.reduce_scatter import BLOCK

Model = Any


@dataclass(frozen=True)
class Activation:
    """A message: `version` is active; rank `to` shall tell the `span` - 1 ranks after it."""

    to: int
    version: int
    span: int


@dataclass(frozen=True)
class GroupRound:
    """An exchange that a rank is ready for."""

    version: int
    all_ranks: bool
    members: Group


class GroupProtocol:
    """One rank's part in the protocol.

    *Activation* (ours; the paper's runs along the dimensions of a hypercube and needs 2^d ranks):
    whoever activates a version tells the ranks 1, 2, 4, ... further on, each of which tells those
    up to the next of these. Activating t activates all versions before it, so messages may
    overtake each other; a rank that is reached by several trees passes on what an earlier one did
    not ask of it. So every rank is reached, at most 2 log2 P steps from the first.

    *Order*: a rank takes its versions strictly one after the other. No two ranks can then wait
    for each other: whoever waits does so for one with an older version, or for a training thread.

    Args:
        rank: this one.
        size: how many there are.
        groups: who averages at which version.
        first: the model that all start from; counts as the version before.
        version: the first one.

    Attributes:
        next: the version that comes next here.
        level: the highest version that is known to be active.
        label: of which version the published model is.
        published: that model.
        asked: the version that this rank's training thread wants all to average, and its model.
    """

    def __init__(
        self, rank: int, size: int, groups: Groups, first: Model, version: int = 0
    ) -> None:
        self.rank, self.size, self.groups = rank, size, groups
        self.everybody = tuple(range(size))
        self.next, self.level = version, version - 1
        self.label, self.published = version - 1, first
        self._covered = 0  # ranks from this one on that will be told of `level`
        self.asked: tuple[int, Model] | None = None
        self._here: dict[tuple[int, bool], set[int]] = {}

    # ------------------------------------------------------------- what the training thread does
    def publish(self, version: int, model: Model) -> None:
        """From now on this rank takes part with this model."""
        assert version > self.label
        self.label, self.published = version, model

    def activate(self, version: int) -> list[Activation]:
        """Versions up to this one may run; returns what to send: nothing if they may already."""
        return self.hear(version, self.size) if version > self.level else []

    def ask(self, version: int, model: Model) -> None:
        """Take part in an average among all, with this model."""
        self.asked = version, model

    # ------------------------------------------------------------- what the progress thread does
    def hear(self, version: int, span: int) -> list[Activation]:
        """Take a message; return the messages to send on."""
        if version < self.level or (version == self.level and span <= self._covered):
            return []
        told = self._covered if version == self.level else 1
        self.level, self._covered = version, span
        sends, step = [], 1
        while step < span:
            if 2 * step > told:
                to = (self.rank + step) % self.size
                sends.append(Activation(to, version, min(2 * step, span) - step))
            step *= 2
        return sends

    def next_round(self) -> GroupRound | None:
        """Return the exchange that this rank could take part in now."""
        if self.level >= self.next:
            return GroupRound(self.next, False, self.groups.of(self.rank, self.next))
        if self.asked is not None and self.asked[0] == self.next:
            return GroupRound(self.next, True, self.everybody)
        return None

    def arrived(self, rank: int, version: int, all_ranks: bool) -> None:
        """Another rank is ready for an exchange."""
        self._here.setdefault((version, all_ranks), set()).add(rank)

    def missing(self, round_: GroupRound) -> Group:
        """Return the members that are not ready."""
        here = self._here.get((round_.version, round_.all_ranks), set())
        return tuple(rank for rank in round_.members if rank != self.rank and rank not in here)

    def seed(self, round_: GroupRound) -> tuple[int, Model]:
        """Return the model that takes part, and its version."""
        if round_.all_ranks:
            assert self.asked is not None
            return self.asked
        return self.label, self.published

    def done(self, round_: GroupRound, average: Model = None) -> None:
        """End the exchange; an `average` over all ranks is published before the next one.

        Otherwise a rank late for the next version would contribute a model from before.
        """
        if round_.all_ranks:
            self.publish(round_.version, average)
            self.asked = None
        self.next += 1
        for key in [key for key in self._here if key[0] < self.next]:
            del self._here[key]


def combine(total: np.ndarray, fresh: np.ndarray, members: int, on_time: bool) -> None:
    """Combine two models with the paper's weights, into `fresh`.

    Args:
        total: the sum over the group.
        fresh: this rank's newest model.
        members: of the group.
        on_time: whether `fresh` is in the sum. If it is not, it counts as one member more, and the
            older model that stood in for it stays in.
    """
    if on_time:
        np.divide(total, members, out=fresh)
        return
    for start in range(0, fresh.size, BLOCK):  # what is added is in the cache yet when divided
        part = fresh[start : start + BLOCK]
        part += total[start : start + BLOCK]
        part /= members + 1
