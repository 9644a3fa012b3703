"""Protocol of wait-avoiding averaging: the decisions of a rank's progress thread.

Versions 0, 1, 2, ... of the model are averaged one after the other, each within groups or over all
ranks. A group average does not wait for training threads: as soon as any rank has activated version
t, each rank contributes the model that it published last. An average over all ranks starts when
every training thread has requested it.

This module uses neither clocks nor a network. `engine.wait_avoiding` runs the protocol over MPI,
`simulation.virtual_time` runs it in virtual time, and tests run it with adversarial schedules.
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
    """Message that `version` is active; rank `to` forwards it to the next `span` - 1 ranks."""

    to: int
    version: int
    span: int


@dataclass(frozen=True)
class GroupRound:
    """An average in which a rank is ready to take part."""

    version: int
    all_ranks: bool
    members: Group


class GroupProtocol:
    """State of the protocol on one rank.

    *Activation* (ours; the paper's activation runs along the dimensions of a hypercube and needs
    2^d ranks): the rank that activates a version sends messages to the ranks at distances 1, 2, 4,
    .... Each receiver forwards the message to the ranks between itself and the next receiver.
    Activating t activates all earlier versions, so messages may overtake each other. A rank that
    several trees reach forwards only to ranks that earlier messages did not assign to it. So a
    message reaches every rank, at most 2 log2 P steps from the first.

    *Order*: a rank takes part in its versions strictly one after the other. Ranks cannot wait for
    each other in a cycle: a rank waits only for ranks at an older version or for a training thread.

    Args:
        first: initial model, equal on all ranks; it counts as version `version` - 1.
        version: first version to average.

    Attributes:
        next: next version on this rank.
        level: highest version known to be active.
        label: version of the published model.
        published: the published model.
        asked: version for which this rank's training thread has requested an average over all
            ranks, and the thread's model; None without a request.
    """

    def __init__(
        self, rank: int, size: int, groups: Groups, first: Model, version: int = 0
    ) -> None:
        self.rank, self.size, self.groups = rank, size, groups
        self.everybody = tuple(range(size))
        self.next, self.level = version, version - 1
        self.label, self.published = version - 1, first
        self._covered = 0  # ranks, from this one on, to which `level` is forwarded
        self.asked: tuple[int, Model] | None = None
        self._ready: dict[tuple[int, bool], set[int]] = {}

    # --------------------------------------------------------- called for the training thread
    def publish(self, version: int, model: Model) -> None:
        """Publish the model that this rank contributes from now on."""
        assert version > self.label
        self.label, self.published = version, model

    def activate(self, version: int) -> list[Activation]:
        """Activate all versions up to `version`; return the messages to send, if any."""
        return self.hear(version, self.size) if version > self.level else []

    def ask(self, version: int, model: Model) -> None:
        """Request an average over all ranks, with `model` as this rank's contribution."""
        self.asked = version, model

    # -------------------------------------------------------- called by the progress thread
    def hear(self, version: int, span: int) -> list[Activation]:
        """Handle an activation message; return the messages to forward."""
        if version < self.level or (version == self.level and span <= self._covered):
            return []
        covered = self._covered if version == self.level else 1
        self.level, self._covered = version, span
        sends, step = [], 1
        while step < span:
            if 2 * step > covered:
                to = (self.rank + step) % self.size
                sends.append(Activation(to, version, min(2 * step, span) - step))
            step *= 2
        return sends

    def next_round(self) -> GroupRound | None:
        """Return the average in which this rank can take part now; None if there is none."""
        if self.level >= self.next:
            return GroupRound(self.next, False, self.groups.of(self.rank, self.next))
        if self.asked is not None and self.asked[0] == self.next:
            return GroupRound(self.next, True, self.everybody)
        return None

    def arrived(self, rank: int, version: int, all_ranks: bool) -> None:
        """Record that another rank is ready for an average."""
        self._ready.setdefault((version, all_ranks), set()).add(rank)

    def missing(self, round_: GroupRound) -> Group:
        """Return the other members that are not ready."""
        ready = self._ready.get((round_.version, round_.all_ranks), set())
        return tuple(rank for rank in round_.members if rank != self.rank and rank not in ready)

    def seed(self, round_: GroupRound) -> tuple[int, Model]:
        """Return the version of the model that this rank contributes, and the model."""
        if round_.all_ranks:
            assert self.asked is not None
            return self.asked
        return self.label, self.published

    def done(self, round_: GroupRound, average: Model = None) -> None:
        """End an average; publish an `average` over all ranks at once.

        Otherwise a rank that is late for the next version would contribute an older model.
        """
        if round_.all_ranks:
            self.publish(round_.version, average)
            self.asked = None
        self.next += 1
        for key in [key for key in self._ready if key[0] < self.next]:
            del self._ready[key]


def combine(total: np.ndarray, fresh: np.ndarray, members: int, on_time: bool) -> None:
    """Combine the group's sum and this rank's newest model into `fresh`, with the paper's weights.

    An interrupt leaves old or new elements in `fresh`, but no intermediate results.

    Args:
        total: sum of the models over the group, which is overwritten.
        fresh: newest model of this rank.
        on_time: whether the sum includes `fresh`. If so, `fresh` becomes total / members. Otherwise
            the sum includes an older model of this rank, and `fresh` becomes
            (total + fresh) / (members + 1).
    """
    if on_time:
        np.divide(total, members, out=fresh)
        return
    for start in range(0, fresh.size, BLOCK):  # the sum is still in the cache when divided
        part, result = fresh[start : start + BLOCK], total[start : start + BLOCK]
        result += part
        result /= members + 1
        np.copyto(part, result)
