"""The time of a step: what ranks compute, encode and decode, and what they wait for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accordion_hvd.comm.recording import Launch
from accordion_hvd.ops.numpy import Array
from accordion_hvd.simulation.links import Network
from accordion_hvd.simulation.programs import FusionGroup, Program

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
    """The clocks of the training threads of all ranks, in seconds.

    A training thread computes, encodes and decodes, while the network carries operations. The first
    requests of a fusion group are launched as soon as its gradients are encoded. Later requests
    follow when the backward pass has ended and the first requests of all groups have been answered,
    as in `engine.step`.

    Args:
        network: the network, which carries operations of the same ranks.
        slowness: factor of each rank by which it computes, encodes and decodes more slowly.
        backward: part of the compute time that is the backward pass.
        overlap: whether requests are launched during the backward pass.

    Attributes:
        now: time of each rank's training thread.
    """

    def __init__(self, network: Network, slowness: Array, backward: float, overlap: bool) -> None:
        self._network, self._slowness = network, slowness
        self._backward, self._overlap = backward, overlap
        self.now = np.zeros(len(slowness))

    @property
    def latest(self) -> float:
        return float(self.now.max())

    def wait(self, until: Array | float) -> None:
        """Let each rank wait until a moment, unless it has passed."""
        self.now = np.maximum(self.now, until)

    def advance(self, program: Program, compute: Array) -> Times:
        """Advance all clocks by a step; `compute`: seconds for a small batch at slowness 1."""
        begin, own = self.now, compute * self._slowness
        (now,) = self._network.run([(begin, program.decisions)])
        forward = now + (program.batches - self._backward) * own
        thread = now + program.batches * own + program.encode * self._slowness
        launches: list[tuple[Array, Launch]] = []
        for group in program.groups:
            backward = group.ready * self._backward * own
            ready = forward + backward + group.encode * self._slowness
            launches.append((ready if self._overlap else thread, group.rounds[0]))
        waiting: Sequence[FusionGroup] = program.groups
        number, decode = 0, 0.0
        while waiting:
            done = self._network.run(launches)
            if number == 0:
                thread = functools.reduce(np.maximum, done, thread)
            answered = zip(done, waiting, strict=True)
            arrived = sorted(answered, key=lambda pair: float(np.max(pair[0])))
            launches, waiting = [], []
            for moment, group in arrived:
                thread = np.maximum(thread, moment) + group.decode[number] * self._slowness
                decode += group.decode[number]
                if number + 1 < len(group.rounds):
                    launches.append((thread, group.rounds[number + 1]))
                    waiting.append(group)
            number += 1
        self.now = thread
        return self._times(program, begin, program.batches * own, decode)

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
