"""How ranks come to the same decisions: rank 0 takes them, all ranks put them into force.

Between two exchanges, where policy or gate ask for it: the policy judges each bucket's window, the
gate what pays on this job's link.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Broadcast, Compressor, Tensor
from accordion_hvd.engine.plan import Plan, dense_bytes
from accordion_hvd.engine.slots import Slot
from accordion_hvd.engine.step import Step
from accordion_hvd.policies.advice import Advice
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.gate import Cost, Gate, probe

PROBE = 1 << 18
"""Elements that a gate sends to measure a link."""


def levels_of(policy: Policy, name: str) -> tuple[Compressor, ...]:
    """What may serve a bucket: the policy's levels, and behind them what its gate may choose."""
    return policy.levels(name) + (policy.gate.fallbacks if policy.gate is not None else ())


def level_of(policy: Policy, name: str) -> int:
    """Which of them serves it now."""
    level = policy.level(name)
    if policy.gate is None:
        return level
    return policy.gate.level(name, level, len(policy.levels(name)))


class Decided(Protocol):
    """An exchange, as far as decisions look at it and change it."""

    communicator: Communicator
    policy: Policy
    xp: ModuleType
    steps: int
    slots: list[Slot]

    @property
    def counted(self) -> int:
        """Exchanges that were not skipped."""

    @property
    def plan(self) -> Plan:
        """Which buckets share a conversation."""

    def switch(self, slot: Slot, level: int) -> None:
        """Let another level serve a bucket."""


class Decisions:
    """Those of an exchange's policy and gate.

    Args:
        exchange: whose levels they change.
    """

    def __init__(self, exchange: Decided) -> None:
        self._exchange = exchange
        self._spent: dict[str, tuple[float, float, int]] = {}  # bucket -> seconds, bytes, steps

    def due(self, rates: Mapping[str, float]) -> bool:
        """Whether policy or gate have something to decide now; equal on all ranks."""
        return self._exchange.policy.due(rates) or self._gate_due()

    def _gate_due(self) -> bool:
        gate = self._exchange.policy.gate
        return gate is not None and gate.due(self._exchange.steps, self._wanted())

    def conversation(self, rates: Mapping[str, float]) -> Generator[Any, Any, None]:
        """Decide, and follow."""
        policy = self._exchange.policy
        if policy.due(rates):
            lead = self._exchange.communicator.rank == 0
            rows = yield from self._shared(policy.decide(self._norms(), rates) if lead else None)
            before = policy.micro_batches
            policy.apply(rows)
            if policy.gate is not None and policy.micro_batches != before:
                policy.gate.restart()  # a step is another now
            for slot in self._exchange.slots:
                if slot.bucket.compress or policy.whole:
                    slot.seen = None
        if policy.gate is not None and self._gate_due():
            yield from self._gate(policy.gate)
        self._follow()

    def _gate(self, gate: Gate) -> Generator[Any, Any, None]:
        """The gate's part."""
        exchange = self._exchange
        wanted, link = self._wanted(), None
        if gate.probes(wanted):
            vector = exchange.xp.zeros((PROBE,), "float32", self._device())
            link = yield from probe(vector, exchange.xp, exchange.communicator.size)
        decision = None
        if exchange.communicator.rank == 0:
            known = self._names(), self._costs(), link, self._settling()
            decision = gate.decide(exchange.steps, wanted, *known)
        decision = yield from self._shared(decision)
        changes = gate.apply(decision, wanted)
        if changes and decision["verdict"] and exchange.communicator.rank == 0:
            print(decision["verdict"], file=sys.stderr, flush=True)
        self._spent.clear()

    def _shared(self, value: Any) -> Generator[Any, Any, Any]:
        """Rank 0's `value` (of JSON's kinds) on every rank."""
        xp = self._exchange.xp
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = yield Broadcast(self._tensor(np.array([text.size], np.int64)))
        if self._exchange.communicator.rank != 0:
            text = np.zeros(int(xp.to_numpy(length)[0]), np.uint8)
        text = yield Broadcast(self._tensor(text))
        return json.loads(xp.to_numpy(text).tobytes())

    def _follow(self) -> None:
        """Let those levels serve that policy and gate want."""
        policy = self._exchange.policy
        chosen = [slot for slot in self._exchange.slots if slot.bucket.compress]
        switched = [s for s in chosen if s.level != level_of(policy, s.bucket.name)]
        for slot in switched:
            self._exchange.switch(slot, level_of(policy, slot.bucket.name))
        if policy.gate is not None:
            policy.disturbed([slot.bucket.name for slot in switched])

    def _norms(self) -> dict[str, float]:
        """Of the sums over the window; read from the device once, together."""
        xp, watched = self._exchange.xp, self._exchange.policy.watches
        if watched is not None:
            norms = self._magnitudes(watched)
        else:
            seen = [(s.bucket.name, s.seen) for s in self._exchange.slots]
            norms = {name: xp.norm(total) for name, total in seen if total is not None}
        if not norms:
            return {}
        values = xp.to_numpy(xp.stack(list(norms.values())))
        return {name: float(value) for name, value in zip(norms, values, strict=True)}

    def _magnitudes(self, key: str) -> dict[str, Tensor]:
        """The sum of what each bucket's state has there, without signs."""
        xp, found = self._exchange.xp, {}
        for slot in self._exchange.slots:
            if slot.bucket.compress and slot.state:
                sums = xp.bucket_norms(slot.state[key], slot.bucket.size, "l1")
                found[slot.bucket.name] = xp.reshape(sums, ())
        return found

    # ------------------------------------------------------------------------------- for the gate
    def measure(self, step: Step) -> None:
        """Add up what a step's conversations took, once all has settled."""
        if self._settling():
            return
        slots = self._exchange.slots
        for index, unit in enumerate(self._exchange.plan.units):
            whole = max(sum(slots[i].bucket.size for i in unit.buckets), 1)
            for bucket in (slots[i].bucket for i in unit.buckets):
                seconds, sent, steps = self._spent.get(bucket.name, (0.0, 0.0, 0))
                share = bucket.size / whole
                seconds += share * step.spent(index)[0]
                sent += share * step.spent(index)[1]
                self._spent[bucket.name] = (seconds, sent, steps + 1)

    def _costs(self) -> dict[str, Cost]:
        """What conversations took in a step since the last decision, bucket by bucket."""
        ranks = self._exchange.communicator.size
        costs = {}
        for slot in self._exchange.slots:
            if slot.bucket.compress:
                seconds, sent, steps = self._spent.get(slot.bucket.name, (0.0, 0.0, 1))
                dense = 2 * (ranks - 1) / ranks * dense_bytes(slot.bucket)
                costs[slot.bucket.name] = Cost(seconds / steps, sent / steps, dense)
        return costs

    def _wanted(self) -> dict[str, int]:
        """Bucket -> the policy's level."""
        slots = self._exchange.slots
        names = (slot.bucket.name for slot in slots if slot.bucket.compress)
        return {name: self._exchange.policy.level(name) for name in names}

    def _settling(self) -> int:
        """Steps until all that the policy wants has settled (`Compressor.settling`)."""
        exchange, wanted, left = self._exchange, self._wanted(), [0]
        for slot in exchange.slots:
            if slot.bucket.compress:
                level = wanted[slot.bucket.name]
                served = exchange.counted - slot.since
                if slot.level != level:
                    served = slot.turns.get(level, 0)
                left.append(slot.levels[level].settling - served)
        return max(left)

    def _names(self) -> dict[str, str]:
        """Bucket -> the policy's compressor."""
        policy = self._exchange.policy
        return {k: repr(policy.levels(k)[level]) for k, level in self._wanted().items()}

    def advice(self) -> Advice:
        """What the gate knows."""
        gate = self._exchange.policy.gate
        if gate is None:
            raise RuntimeError(
                "exchange.advice() needs a gate: pass for example Fixed(PowerSGD(1), gate='auto')."
            )
        return gate.advice(self._names())

    # ------------------------------------------------------------------------------------- tensors
    def _tensor(self, values: np.ndarray) -> Tensor:
        return self._exchange.xp.asarray(values, self._device())

    def _device(self) -> Any:
        slots = self._exchange.slots
        return slots[0].spec.device if slots else None
