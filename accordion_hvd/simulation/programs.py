"""What the ranks do in each step of a simulated job: waits, requests and work, without times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from accordion_hvd.comm.recording import Operation
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.simulation.members import Everyone, Members


@dataclass(frozen=True)
class Collective:
    """An operation of all ranks (as rank 0 sees it), in groups or among all."""

    operation: Operation
    members: Members


Round = tuple[Collective, ...]


R = TypeVar("R")


@dataclass(frozen=True)
class FusionGroup(Generic[R]):
    """The requests of a fusion group.

    Attributes:
        ready: part of the backward pass after which the last gradient of the group is ready.
        encode: seconds of encoding until the group's requests are launched, those of earlier groups
            included.
        rounds: the operations of each round.
        decode: seconds of decoding after each round.
    """

    ready: float
    encode: float
    rounds: tuple[R, ...]
    decode: tuple[float, ...]


@dataclass(frozen=True)
class Program:
    """One step of all ranks.

    Attributes:
        decisions: operations before the step, which decisions of the policy need.
        groups: fusion groups, in the order in which they are launched.
        encode: seconds of encoding.
        batches: number of small batches whose gradients the step averages.
        traffic: bytes of rank 0, counted as `stats()` counts them.
        levels: the compressor that serves each bucket, by bucket name.
        together: the ranks whose models are in step after the step.
    """

    decisions: tuple[Collective, ...]
    groups: tuple[FusionGroup[Round], ...]
    encode: float
    batches: int
    traffic: Traffic
    levels: dict[str, str]
    together: Members = Everyone()

    def collectives(self) -> Iterable[Collective]:
        yield from self.decisions
        for group in self.groups:
            for round_ in group.rounds:
                yield from round_
