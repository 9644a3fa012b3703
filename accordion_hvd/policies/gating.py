"""A gate at work: it measures an exchange's steps and decides on rank 0; all ranks follow."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

from accordion_hvd.comm.agreement import share
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.advice import Advice
from accordion_hvd.policies.gate import Cost, Gate, probe

PROBE = 1 << 18
"""Elements that a gate sends to measure a link."""


class Gating(Observer):
    """Lets a gate follow an exchange.

    Args:
        gate: what decides.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._spent: dict[str, tuple[float, float, int]] = {}  # bucket -> seconds, bytes, steps
        self._weight = 1

    def due(self, exchange: Any) -> bool:
        """See `Gate.due`. What a step is has changed where its batch has: then all begins anew."""
        weight = exchange.policy.observers.weight
        if weight != self._weight:
            self._weight = weight
            self.gate.restart()
        self.gate.tick(exchange.steps)
        return self.gate.due(exchange.steps, wanted(exchange))

    def decide(self, exchange: Any) -> Generator[Any, Any, None]:
        """Measure the link, if the gate asks for it; let it decide, and tell what it has found."""
        gate, link = self.gate, exchange.communicator
        levels, seen = wanted(exchange), None
        if gate.probes(levels):
            vector = exchange.xp.zeros((PROBE,), "float32", exchange.device)
            seen = yield from probe(vector, exchange.xp, link.size)
        decision = None
        if link.rank == 0:
            known = names(exchange), self._costs(exchange), seen, startup(exchange)
            decision = gate.decide(exchange.steps, levels, *known)
        decision = yield from share(link, decision, exchange.device)
        if gate.apply(decision, levels) and decision["verdict"] and link.rank == 0:
            print(decision["verdict"], file=sys.stderr, flush=True)
        self._spent.clear()

    @property
    def measures(self) -> bool:  # type: ignore[override]
        """Return whether the gate wants to measure calls."""
        return self.gate.measuring

    def closed(self, exchange: Any, step: Any) -> None:
        """Add up what a step's calls took, after the start-up steps."""
        if not step.measuring or startup(exchange):
            return
        for index, batch in enumerate(exchange.bucket_batches.plan.batches):
            buckets = [exchange.bucket_states[i].bucket for i in batch.buckets]
            whole = max(sum(bucket.size for bucket in buckets), 1)
            for bucket in buckets:
                seconds, sent, steps = self._spent.get(bucket.name, (0.0, 0.0, 0))
                share = bucket.size / whole
                seconds += share * step.spent(index)[0]
                sent += share * step.spent(index)[1]
                self._spent[bucket.name] = (seconds, sent, steps + 1)

    def _costs(self, exchange: Any) -> dict[str, Cost]:
        """Return the mean cost of a step since the last decision, bucket by bucket."""
        ranks, costs = exchange.communicator.size, {}
        for entry in _compressed(exchange):
            seconds, sent, steps = self._spent.get(entry.bucket.name, (0.0, 0.0, 1))
            dense = 2 * (ranks - 1) / ranks * entry.bucket.dense_bytes
            costs[entry.bucket.name] = Cost(seconds / steps, sent / steps, dense)
        return costs

    def advice(self, exchange: Any) -> Advice:
        """Return what the gate knows."""
        return self.gate.advice(names(exchange))


def wanted(exchange: Any) -> dict[str, int]:
    """Return the level that the policy wants of each bucket."""
    found = (entry.bucket.name for entry in _compressed(exchange))
    return {name: exchange.policy.level(name) for name in found}


def names(exchange: Any) -> dict[str, str]:
    """Return the compressor that the policy wants of each bucket, as it is written."""
    levels = exchange.policy.levels
    return {name: repr(levels(name)[level]) for name, level in wanted(exchange).items()}


def startup(exchange: Any) -> int:
    """Return the steps that the wanted compressors still need (`Compressor.startup_steps`)."""
    levels, left = wanted(exchange), [0]
    for entry in _compressed(exchange):
        level = levels[entry.bucket.name]
        served = (
            exchange.counted - entry.served_from
            if entry.level == level
            else entry.served_by_level.get(level, 0)
        )
        left.append(entry.levels[level].startup_steps - served)
    return max(left)


def _compressed(exchange: Any) -> list[Any]:
    return [entry for entry in exchange.bucket_states if entry.bucket.compress]
