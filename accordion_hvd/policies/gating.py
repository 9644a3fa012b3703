"""The observer through which a gate measures the steps of an exchange and switches its levels."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from accordion_hvd.comm.agreement import share
from accordion_hvd.comm.fp16_reduction import choose_by
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.advice import Advice
from accordion_hvd.policies.cost_model import bytes_sent
from accordion_hvd.policies.gate import Cost, Gate, is_lossy, probe

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.step import Step

logger = logging.getLogger(__name__)

PROBE = 1 << 18
"""Elements of the tensor that measures the link."""


class Gating(Observer):
    """Connects a gate to an exchange."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._totals: dict[str, tuple[float, float, int]] = {}  # bucket -> seconds, bytes, steps
        self._bytes: dict[str, dict[str, float]] = {}  # bucket -> fallback -> bytes
        self._weight = 1

    def due(self, exchange: Exchange) -> bool:
        """Return `Gate.due`. If the batch size has changed, old measurements are void: restart."""
        weight = exchange.policy.observers.weight
        if weight != self._weight:
            self._weight = weight
            self.gate.restart()
        self.gate.tick(exchange.steps)
        return self.gate.due(exchange.steps, wanted(exchange))

    def decide(self, exchange: Exchange) -> Generator[Any, Any, None]:
        """Measure the link if the gate needs it, let rank 0 decide, and apply the decision."""
        gate, communicator = self.gate, exchange.communicator
        levels, link = wanted(exchange), None
        if gate.probes(levels):
            vector = exchange.xp.zeros((PROBE,), "float32", exchange.device)
            began = time.perf_counter()
            link = yield from probe(vector, exchange.xp, communicator.size)
            gate.trial_seconds += time.perf_counter() - began
            if gate.fp16_reduction:
                yield from choose_by(link.bandwidth, communicator, exchange.device)
        decision = None
        if communicator.rank == 0:
            measured = names(exchange), self._costs(exchange), link, startup(exchange)
            decision = gate.decide(exchange.steps, levels, *measured)
        decision = yield from share(communicator, decision, exchange.device)
        if gate.apply(decision, levels) and decision["verdict"] and communicator.rank == 0:
            logger.info("%s", decision["verdict"])
        self._totals.clear()

    @property
    def measures(self) -> bool:  # type: ignore[override]
        return self.gate.measuring

    def closed(self, exchange: Exchange, step: Step) -> None:
        """Add the seconds and bytes of a step's calls to the totals, after the start-up steps."""
        if not step.measuring or startup(exchange):
            return
        for index, batch in enumerate(exchange.layout.batches):
            buckets = [entry.bucket for entry in batch.entries]
            size = max(sum(bucket.size for bucket in buckets), 1)
            for bucket in buckets:
                seconds, sent, steps = self._totals.get(bucket.name, (0.0, 0.0, 0))
                part = bucket.size / size
                seconds += part * step.spent(index)[0]
                sent += part * step.spent(index)[1]
                self._totals[bucket.name] = (seconds, sent, steps + 1)

    def _costs(self, exchange: Exchange) -> dict[str, Cost]:
        """Return the mean cost per step of each bucket since the last decision."""
        ranks, costs = exchange.communicator.size, {}
        for entry in _compressed(exchange):
            seconds, sent, steps = self._totals.get(entry.bucket.name, (0.0, 0.0, 1))
            dense = 2 * (ranks - 1) / ranks * entry.bucket.dense_bytes
            fallbacks = self._fallbacks(entry.bucket, ranks)
            costs[entry.bucket.name] = Cost(seconds / steps, sent / steps, dense, fallbacks)
        return costs

    def _fallbacks(self, bucket: Any, ranks: int) -> dict[str, float]:
        """Return the bytes of each lossy fallback for a bucket, computed once.

        Those of other fallbacks follow from the size; to compute them would take as much memory.
        """
        if bucket.name not in self._bytes:
            self._bytes[bucket.name] = {
                repr(fallback): bytes_sent(fallback, bucket.shape, bucket.dtype, ranks)
                for fallback in self.gate.fallbacks
                if is_lossy(fallback)
            }
        return self._bytes[bucket.name]

    def advice(self, exchange: Exchange) -> Advice:
        return self.gate.advice(names(exchange))


def wanted(exchange: Exchange) -> dict[str, int]:
    """Return bucket -> the level that the policy wants."""
    buckets = (entry.bucket.name for entry in _compressed(exchange))
    return {name: exchange.policy.level(name) for name in buckets}


def names(exchange: Exchange) -> dict[str, str]:
    """Return bucket -> the compressor that the policy wants, as text."""
    levels = exchange.policy.levels
    return {name: repr(levels(name)[level]) for name, level in wanted(exchange).items()}


def startup(exchange: Exchange) -> int:
    """Return the start-up steps left for the wanted compressors; see `Compressor.startup_steps`."""
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


def _compressed(exchange: Exchange) -> list[Any]:
    return [entry for entry in exchange.bucket_states if entry.bucket.compress]
