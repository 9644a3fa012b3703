"""Protocol of wait-avoiding averaging: the decisions of a rank's progress thread.

Versions 0, 1, 2, ... of the model are averaged one after the other, each within groups or over all
ranks. A group average does not wait for training threads: as soon as any rank has activated version
t, each rank contributes the model that it published last. An average over all ranks starts when
every training thread has requested it.

This module uses neither clocks nor a network. `engine.wait_avoiding` runs the protocol over MPI,
and tests run it in virtual time and with adversarial schedules.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd.averaging.base import RankGroup
from accordion_hvd.averaging.groups import Groups
from accordion_hvd.ops.numpy import Array

ModelVectors = Any


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
    members: RankGroup


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
        self, rank: int, size: int, groups: Groups, first: ModelVectors, version: int = 0
    ) -> None:
        self.rank, self.size, self.groups = rank, size, groups
        self.everybody = tuple(range(size))
        self.next, self.level = version, version - 1
        self.label, self.published = version - 1, first
        self._covered = 0  # ranks, from this one on, to which `level` is forwarded
        self.asked: tuple[int, ModelVectors] | None = None
        self._ready: dict[tuple[int, bool], set[int]] = {}

    # --------------------------------------------------------- called for the training thread
    def publish(self, version: int, model: ModelVectors) -> None:
        assert version > self.label
        self.label, self.published = version, model

    def activate(self, version: int) -> list[Activation]:
        """Activate all versions up to `version`; return the messages to send, if any."""
        return self.hear(version, self.size) if version > self.level else []

    def ask(self, version: int, model: ModelVectors) -> None:
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
        self._ready.setdefault((version, all_ranks), set()).add(rank)

    def missing(self, round_: GroupRound) -> RankGroup:
        ready = self._ready.get((round_.version, round_.all_ranks), set())
        return tuple(rank for rank in round_.members if rank != self.rank and rank not in ready)

    def seed(self, round_: GroupRound) -> tuple[int, ModelVectors]:
        """Return the version of the model that this rank contributes, and the model."""
        if round_.all_ranks:
            assert self.asked is not None
            return self.asked
        return self.label, self.published

    def done(self, round_: GroupRound, average: ModelVectors = None) -> None:
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


# -------------------------------------------------------------- allreduce of vectors within a group
# The algorithm is MPI's recursive halving and doubling with the factors of the group size S in
# place of twos. Within a factor, each member exchanges parts with all others, so a group of up to
# eight members needs two rounds. Each member sends 2 (S - 1) / S of a vector for any S; recursive
# doubling sends log2 S vectors. A single member adds up each element, so all members get the same
# bits.


@dataclass(frozen=True)
class Round:
    """The messages of one round, each as a pair (place of the other member, array)."""

    send: list[tuple[int, Array]]
    receive: list[tuple[int, Array]]


WIDEST = 8
"""Largest number of members that exchange directly, except where a prime factor is larger."""

BLOCK = 1 << 15
"""Number of elements to add at a time, so that the operands stay in a core's cache."""


def factors(count: int) -> tuple[int, ...]:
    """Factorize a group size: the largest factors up to `WIDEST`, then larger prime factors."""
    result = []
    while count > 1:
        small = [radix for radix in range(2, WIDEST + 1) if count % radix == 0]
        large = (radix for radix in range(WIDEST + 1, count + 1) if count % radix == 0)
        result.append(small[-1] if small else next(large))
        count //= result[-1]
    return tuple(result)


def total(
    mine: Array, into: Array, scratch: Array, place: int, members: int
) -> Generator[Round, None, None]:
    """Add up the vectors of all members of a group.

    Args:
        mine: this member's vector, which is only read.
        into: array that receives the sum.
        scratch: scratch memory for at least `mine.size + members` elements.
        place: this member's place in the group, from 0.

    Yields:
        Rounds of messages, which the caller transfers.
    """
    source, low, high = mine, 0, mine.size
    stack: list[tuple[list[int], list[int], int]] = []
    stride = 1
    for radix in factors(members):
        digit = place // stride % radix
        peers = [place + (other - digit) * stride for other in range(radix)]
        cuts = [low + (high - low) * i // radix for i in range(radix + 1)]
        low, high = cuts[digit], cuts[digit + 1]
        others = [other for other in range(radix) if other != digit]
        size = high - low
        buffers = [scratch[i * size : (i + 1) * size] for i in range(len(others))]
        yield Round(
            [(peers[o], source[cuts[o] : cuts[o + 1]]) for o in others],
            [(peers[o], buffer) for o, buffer in zip(others, buffers, strict=True)],
        )
        _add([*buffers[:digit], source[low:high], *buffers[digit:]], into[low:high])
        source = into
        stack.append((peers, cuts, digit))
        stride *= radix
    if members == 1:
        np.copyto(into, mine)
    for peers, cuts, digit in reversed(stack):
        others = [o for o in range(len(peers)) if o != digit]
        part = into[cuts[digit] : cuts[digit + 1]]
        yield Round(
            [(peers[o], part) for o in others],
            [(peers[o], into[cuts[o] : cuts[o + 1]]) for o in others],
        )


def _add(terms: Sequence[Array], into: Array) -> None:
    room = np.empty(min(BLOCK, into.size), into.dtype)  # since `into` may be one of the terms
    for start in range(0, into.size, BLOCK):
        parts = [term[start : start + BLOCK] for term in terms]
        block = room[: parts[0].size]
        np.add(parts[0], parts[1], out=block)
        for part in parts[2:]:
            block += part
        into[start : start + BLOCK] = block
