"""Process that delays the packets that hosts receive, and loses some: `DELAY LOSS PROCESS...`.

Each host's packets wait in a queue within the kernel, behind the limit of its link, for half the
round-trip time. A timestamp is taken after a packet has arrived, so no packet is early. The process
prints "ready", and at its end the numbers of packets and of lost packets of each host. A line with
another delay on its standard input changes the delay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.netbench.packet_queue import PacketQueue

SHARE, SHORTEST, LONGEST = 1 / 40, 50e-6, 1e-3
"""Pause after each round, as a share of the delay, and its bounds in seconds. Packets that arrive
in a pause share a verdict."""


class Delay:
    """Delay and loss of the packets that a host receives.

    Args:
        queue: the host's queue.
        seconds: delay of each packet.
        loss: probability that a packet is lost.
        seed: seed of the choice of lost packets.

    Attributes:
        seconds: delay of packets that arrive from now on.
        packets: number of packets so far.
        lost: number of lost packets so far.
    """

    def __init__(self, queue: PacketQueue, seconds: float, loss: float, seed: int) -> None:
        self.queue, self.seconds, self._loss = queue, seconds, loss
        self.packets = self.lost = 0
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, int]] = deque()
        self._until_loss = self._distance()

    def receive(self) -> None:
        """Add the packets that have arrived."""
        numbers = self.queue.arrived()
        self.packets += len(numbers)
        if self._loss:
            numbers = self._without_lost(numbers)
        if numbers:
            self._waiting.append((time.monotonic() + self.seconds, numbers[-1]))

    def release(self, now: float) -> float:
        """Let the packets pass that are due; return the time at which the next ones are."""
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        if last is not None:
            self.queue.release(last)
        return self._waiting[0][0] if self._waiting else math.inf

    def _without_lost(self, numbers: list[int]) -> list[int]:
        """Drop the packets that are lost; return the numbers of the others."""
        kept = []
        while self._until_loss < len(numbers):
            self.queue.drop(numbers[self._until_loss])
            kept += numbers[: self._until_loss]
            numbers = numbers[self._until_loss + 1 :]
            self._until_loss = self._distance()
            self.lost += 1
        self._until_loss -= len(numbers)
        return kept + numbers

    def _distance(self) -> int:
        """Return the number of packets until the next lost one (geometric distribution)."""
        if not self._loss:
            return 0
        return int(math.log(1 - self._random.random()) / math.log1p(-self._loss))


def serve(delays: Sequence[Delay], seconds: float) -> None:
    """Delay packets until the process is ended.

    Args:
        delays: the delays of all hosts.
        seconds: delay until standard input has another one.
    """
    by_socket = {delay.queue.socket: delay for delay in delays}
    sources: list[Any] = [*by_socket, sys.stdin]
    due, pause = math.inf, _pause(seconds)
    while True:
        patience = None if due == math.inf else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(sources, [], [], patience)
        for each in readable:
            if each is not sys.stdin:
                by_socket[each].receive()
            elif line := sys.stdin.readline():
                pause = _pause(float(line))
                for delay in delays:
                    delay.seconds = float(line)
            else:
                sources.remove(sys.stdin)
        now = time.monotonic()
        due = min(delay.release(now) for delay in delays)
        time.sleep(pause)


def _pause(seconds: float) -> float:
    """Return the pause after each round for a delay."""
    return max(SHORTEST, min(LONGEST, seconds * SHARE))


def main(seconds: float, loss: float, processes: Sequence[int]) -> None:
    """Delay and lose packets of the hosts that `processes` keep alive, until SIGTERM."""
    try:
        queues = [PacketQueue(process, segments=loss > 0) for process in processes]
    except OSError as error:
        raise SystemExit(
            f"the kernel cannot queue packets (NFQUEUE of nf_tables): {error.strerror}."
        ) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(PermissionError):  # of containers without real-time priorities
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # ranks keep all cores busy
    delays = [Delay(queue, seconds, loss, seed) for seed, queue in enumerate(queues)]
    print("ready", flush=True)
    try:
        serve(delays, seconds)
    finally:
        print(json.dumps([(delay.packets, delay.lost) for delay in delays]))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), [int(word) for word in sys.argv[3:]])
