"""The clocks of all ranks, which the programs of steps advance."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from accordion_hvd.simulation.links import Prices
from accordion_hvd.simulation.programs import FusionGroup, Program, Round

Array = np.ndarray
PARTS = ("compute", "encode", "decode", "exposed", "idle")


@dataclass(frozen=True)
class Times:
    """Seconds of one step.

    Attributes:
        seconds: seconds by which the latest clock advanced.
        parts: mean seconds over the ranks, by the names in `PARTS`.
    """

    seconds: float
    parts: dict[str, float]


class Clocks:
    """The clocks of all ranks, in seconds.

    A rank has a training thread, which computes, encodes and decodes, and a link, which carries one
    operation after the other. The first requests of a fusion group are launched as soon as its
    gradients are encoded. Later requests follow when the backward pass has ended and the first
    requests of all groups have been answered, as in `engine.step`.

    Args:
        backward: part of the compute time that is the backward pass.
        overlap: whether requests are launched during the backward pass.
        speeds: relative speed of each rank, by which compute, encode and decode times are divided.

    Attributes:
        now: time of each rank's training thread.
    """

    def __init__(
        self, prices: Prices, ranks: int, backward: float, overlap: bool, speeds: Array
    ) -> None:
        self._prices, self._ranks, self._slowness = prices, ranks, 1 / speeds
        self._backward, self._overlap = backward, overlap
        self.now = np.zeros(ranks)
        self._free = np.zeros(ranks)  # when the link of each rank is free

    def restart(self, now: float) -> None:
        self.now, self._free = np.full(self._ranks, now), np.full(self._ranks, now)

    @property
    def latest(self) -> float:
        return float(self.now.max())

    def pause(self, seconds: float) -> None:
        """Advance all clocks by `seconds`, in which no rank computes."""
        if seconds:
            self.now, self._free = self.now + seconds, self._free + seconds

    def advance(self, program: Program, compute: Array) -> Times:
        """Advance all clocks by a step; `compute`: seconds for a small batch at speed 1."""
        begin, own = self.now, compute * self._slowness
        now = self._operations(program.decisions, begin)
        backward = self._backward * own
        forward = now + program.batches * own - backward
        thread = forward + backward + program.encode * self._slowness
        waiting: deque[tuple[FusionGroup[Round], int, Array]] = deque()
        latest = thread
        for group in program.groups:
            ready = forward + group.ready * backward + group.encode * self._slowness
            done = self._operations(group.rounds[0], ready if self._overlap else thread)
            latest = np.maximum(latest, done)
            waiting.append((group, 0, done))
        thread = latest if program.groups else thread
        decode = 0.0
        while waiting:
            group, number, done = waiting.popleft()
            thread = np.maximum(thread, done) + group.decode[number] * self._slowness
            decode += group.decode[number]
            if number + 1 < len(group.rounds):
                done = self._operations(group.rounds[number + 1], thread)
                waiting.append((group, number + 1, done))
        self.now = thread
        return self._times(program, begin, program.batches * own, decode)

    def _operations(self, round_: Round, ready: Array) -> Array:
        """Run the operations that are launched together; return when each rank has the results."""
        for collective in round_:
            start = collective.members.latest(np.maximum(ready, self._free))
            seconds = self._prices.seconds(collective.operation, collective.members)
            self._free = np.broadcast_to(start + seconds, ready.shape)
        return self._free if round_ else ready

    def _times(self, program: Program, begin: Array, compute: Array, decode: float) -> Times:
        """Return the step's seconds and their parts.

        A rank waits for the operations as long as the rank that waits least for them; the rest of
        its wait is idle time, in which it waits for slower ranks.
        """
        work = compute, program.encode * self._slowness, decode * self._slowness
        waited = self.now - begin - sum(work)
        exposed = np.broadcast_to(program.together.least(waited), waited.shape)
        parts = (*work, exposed, waited - exposed)
        seconds = float(self.now.max() - begin.max())
        return Times(seconds, {k: float(np.mean(v)) for k, v in zip(PARTS, parts, strict=True)})
