"""Exchanges that are timed beside the training, for the receipt's estimates of other jobs.

A rehearsal gives made-up gradients to the exchange of the job and to others, over the job's own
links, at the moments at which a backward pass made gradients ready. What another exchange takes
longer, a step takes longer with it: packing, copies, messages and their overlap with the backward
pass are those of the training, and what an exchange does not change cancels out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from accordion_hvd.comm import tcp
from accordion_hvd.comm.agreement import largest
from accordion_hvd.comm.fp16_reduction import choose_reduction
from accordion_hvd.core.base import Compressor, Tensor
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import fingerprint
from accordion_hvd.engine.ledger import Ledger, as_ledger
from accordion_hvd.engine.ledger.samples import measurable
from accordion_hvd.engine.ledger.summary import OWN
from accordion_hvd.ops import on_cpu
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.fixed import Serving, alternatives
from accordion_hvd.policies.gate import PROBE, Link, probe

logger = logging.getLogger(__name__)

WARM, TURNS = 2, 3
"""Passes of each option that are not timed, and those that are; fewer if they cost too much."""

ALLOWANCE, SHARE = 5.0, 0.005
"""Seconds that all rehearsals of a job may take, and the share of its time that is added."""

ROOM = 1 << 28
"""Largest gradients that are rehearsed on an accelerator, whose memory may be short, in bytes."""

TIMES = ("measure", "seconds")
"""Columns of the ledger's series: what rehearsals have taken, and the job."""

Pass = Callable[[list[Tensor], Mapping[int, float]], None]
"""Exchanges gradients, given when each tensor is ready, in seconds, by its number."""

Prepare = Callable[[Any], Pass]
"""Returns the pass of an exchange."""

Sides = Mapping[str, tuple[Pass, int]]
"""Name -> the pass of an exchange, and the number of steps in a period of it."""


class Rehearsals:
    """The rehearsals of a job, which take a bounded part of its time."""

    def __init__(self) -> None:
        self._cost = 0.0  # seconds of one pass of all options; 0 until it is known
        self._failed = False

    def hold(self, exchange: Exchange, ledger: Ledger, prepare: Prepare | None) -> None:
        """Measure the link, and time the exchange and others if that is affordable; collective.

        Args:
            ledger: keeps the results; its shadows are rehearsed, too.
            prepare: returns the pass of an exchange; None if nothing can be timed now.
        """
        able = prepare is not None and not self._failed and _possible(exchange)
        turns, shadows, known = self._agreed(exchange, ledger, able)
        if not known:
            link = _measure_link(exchange, ledger)
            ranks, options = exchange.communicator.size, 3 + len(ledger.samples.shadows)
            moved = 2 * (ranks - 1) / ranks * exchange.accounts.each_step
            self._cost = options * (moved / link.bandwidth + link.latency)
            turns, shadows, _ = self._agreed(exchange, ledger, able)
        elif turns > 0:
            _measure_link(exchange, ledger)
        if turns > 0 and prepare is not None:
            began = time.perf_counter()
            sides = self._sides(exchange, shadows, prepare)
            if sides is not None:
                ready = _ready(exchange)
                seconds = _rehearse(exchange, sides, turns, ready)
                ledger.rehearsed(exchange.steps, max(ready.values(), default=0.0), seconds)
                self._cost = (time.perf_counter() - began) / (WARM + turns)

    def _sides(
        self, exchange: Exchange, shadows: Sequence[Compressor], prepare: Prepare
    ) -> Sides | None:
        entries = [entry for entry in exchange.bucket_states if entry.bucket.compress]
        serving = {entry.bucket.name: entry.compressor for entry in entries}
        sides: Sides | None = None
        try:
            made = {OWN: _side(exchange, Serving(exchange.policy, serving), OWN)}
            for compressor in alternatives(serving.values(), filter(measurable, shadows)):
                name = repr(compressor)
                made[name] = _side(exchange, Serving(exchange.policy, {}, compressor), name)
            sides = {name: (prepare(side), side.layout.period) for name, side in made.items()}
        except Exception as error:  # what only watches does not end a training
            text = f"{type(error).__name__}: {error}"
            logger.warning("accordion_hvd: exchanges are not rehearsed (%s).", text)
        flag = exchange.xp.full((1,), float(sides is None), "float32", exchange.device)
        failed = exchange.communicator.run(f"{exchange.name}.sides", largest(flag))
        self._failed = bool(exchange.xp.to_numpy(failed)[0])
        return None if self._failed else sides

    def _agreed(
        self, exchange: Exchange, ledger: Ledger, able: bool
    ) -> tuple[int, tuple[Compressor, ...], bool]:
        shadows, xp, total = ledger.samples.shadows, exchange.xp, ledger.series.total
        number, times = fingerprint(*map(repr, shadows)), map(_milli, map(total, TIMES))
        # Numbers are equal on all ranks if the largest one is the smallest one, too.
        mine = [number, -number, *times, _milli(1e3 * self._cost), ledger.enabled, not able]
        flags = xp.asarray(np.array(mine, np.int64), exchange.device)
        most = exchange.communicator.run(f"{exchange.name}.turns", largest(flags))
        high, low, spent, elapsed, cost, enabled, refused = xp.to_numpy(most).tolist()
        left = 1e3 * ALLOWANCE + SHARE * elapsed - spent
        turns = int(min(TURNS, 1e3 * left / max(cost, 1) - WARM))
        return turns if enabled and not refused else 0, shadows if high == -low else (), cost > 0


def _rehearse(
    exchange: Exchange, sides: Sides, turns: int, ready: Mapping[int, float]
) -> dict[str, list[float]]:
    communicator, native = exchange.communicator, exchange.communicator.native_fp16_allreduce
    choose_reduction(communicator, True, exchange.device)
    names, grads = list(sides), _gradients(exchange)
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        for turn in range(-WARM, turns):
            # The first exchange alternates, because the speed of a machine changes.
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                passing, period = sides[name]
                count = period if turn >= 0 else 1
                taken = [_seconds(exchange, passing, grads, ready) for _ in range(count)]
                if turn >= 0:
                    found[name].append(sum(taken) / count)
    finally:
        # The job's own choice, which its policy may not have asked for yet.
        communicator.native_fp16_allreduce = native
    return found


def _milli(seconds: float) -> int:
    return math.ceil(1e3 * seconds)


def _measure_link(exchange: Exchange, ledger: Ledger) -> Link:
    xp, before = exchange.xp, tcp.connections()
    measurement = probe(xp.zeros((PROBE,), "float32", exchange.device), xp,
                        exchange.communicator.size)  # fmt: skip
    link = exchange.communicator.run(f"{exchange.name}.link", measurement)
    ledger.measured(link, tcp.slowest(before, tcp.connections()))
    return link


def _possible(exchange: Exchange) -> bool:
    policy, entries = exchange.policy, exchange.bucket_states
    # Made-up gradients must give each compressor as much work as true ones.
    return bool(
        entries
        and policy.output == "gradient"
        and all(exchange.counted - x.served_from >= x.compressor.startup_steps for x in entries)
        and not any(policy.observers.any(x) for x in ("measures", "private"))
        and (on_cpu(exchange.device) or exchange.accounts.each_step <= ROOM)
    )


def _side(exchange: Exchange, policy: Policy, name: str) -> Exchange:
    side = type(exchange)(
        exchange.communicator, policy, exchange.tensors, skip=exchange.skip,
        name=f"{exchange.name}.side{fingerprint(name)}", ledger=as_ledger(False),
        residual_dtype=exchange.residual_dtype,
    )  # fmt: skip
    # Steps of a start-up cost something else than those of the training.
    side.steps = max((x.compressor.startup_steps for x in side.bucket_states), default=0)
    return side


def _seconds(
    exchange: Exchange, passing: Pass, grads: Sequence[Tensor], ready: Mapping[int, float]
) -> float:
    xp = exchange.xp
    copies = [xp.copy(grad) for grad in grads]  # exchanges overwrite gradients
    flag = xp.zeros((1,), "int32", exchange.device)
    xp.to_numpy(exchange.communicator.run(f"{exchange.name}.begin", largest(flag)))
    began = time.perf_counter()
    passing(copies, ready)
    return time.perf_counter() - began


def _ready(exchange: Exchange) -> dict[int, float]:
    found: dict[int, float] = {}
    now, ended = 0.0, math.inf
    for members, began, end in exchange.starts:
        # Without the seconds in which the exchanges of earlier gradients were started.
        now, ended = now + max(began - ended, 0.0), end
        found |= dict.fromkeys(members, now)
    return found


def _gradients(exchange: Exchange) -> list[Tensor]:
    noise = np.random.default_rng(exchange.communicator.rank).standard_normal(99991, np.float32)
    made = []
    for i, x in enumerate(exchange.tensors):
        values = np.resize(np.roll(noise, 101 * i), x.shape)
        tensor = exchange.xp.asarray(values, exchange.entry_of[i].spec.device)
        made.append(exchange.xp.cast(tensor, x.dtype))
    return made


def in_steps(side: Exchange) -> Pass:
    """Return the pass that runs operation by operation, as a step of the training does."""

    def run(grads: list[Tensor], ready: Mapping[int, float]) -> None:
        step, xp = side.open(), side.xp
        due = time.perf_counter()  # of the first gradient, later by what delays the backward pass
        latest = [max([ready.get(m, 0.0) for m in x.members]) for x in step.layout.batches]
        for index in sorted(range(len(latest)), key=latest.__getitem__):
            batch = step.layout.batches[index]
            while (now := time.perf_counter()) < due + latest[index]:
                pass  # a backward pass keeps the core busy, too
            side.start(index, batch.pack([grads[m] for m in batch.members], keep=True))
            due += time.perf_counter() - now
        side.finish()
        for batch in step.layout.batches:
            means = batch.unpack()
            batch.mean = None
        xp.to_numpy(xp.reshape(means[0], (-1,))[:1])  # wait for an accelerator

    return run
