"""Evidence for a policy's decisions; rank 0 takes them, and all ranks apply them at one step."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accordion_hvd.comm.agreement import share
from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.layout import Batch, BucketState
from accordion_hvd.policies import base
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.evidence import Evidence, Step

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


def sync_of(exchange: Exchange) -> PolicySync | None:
    """Return None if the exchange's policy counts no steps, decides nothing and has no observer."""
    policy, kind = exchange.policy, type(exchange.policy)
    counts = kind.tick is not Policy.tick or kind.due is not Policy.due
    return PolicySync(exchange) if counts or policy.evidence or policy.observers else None


class PolicySync:
    """Collects evidence and takes decisions for an exchange's policy and its observers.

    Attributes:
        always: whether to collect evidence also in windows in which the policy does not use it.
            Graphs need this: with a sum that stops, they would have to be traced again.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.always = exchange, False

    # ------------------------------------------------------------------------------------ evidence
    @property
    def followed(self) -> tuple[Evidence, ...]:
        """Return the evidence that the present step updates; equal on all ranks."""
        policy = self._exchange.policy
        if not (self.always or policy.observing()):
            return ()
        return tuple(evidence for evidence in policy.evidence if evidence.follows)

    def wanted(self, entry: BucketState) -> list[Evidence]:
        """Return the evidence that this rank collects for a bucket in the present step."""
        lead = self._exchange.communicator.rank == 0
        return [
            evidence
            for evidence in self.followed
            if (lead or evidence.on_all_ranks)
            and (entry.bucket.compress or evidence.everywhere)
            and evidence.suits(entry.compressor)
        ]

    def before(self, batch: Batch, wanted: Sequence[Evidence], grad: Tensor) -> None:
        step, old = self._step(batch, grad), batch.evidence
        batch.before = old
        batch.evidence = old | {x.key: x.before(old[x.key], step) for x in wanted}

    def after(self, batch: Batch, mean: Tensor, bad: Any) -> None:
        step, old = self._step(batch, None, mean), batch.evidence
        new = {x.key: x.after(old[x.key], step) for x in self.wanted(batch.first)}
        if bad is not False:
            where = self._exchange.xp.where
            new = {k: x if x is old[k] else where(bad, old[k], x) for k, x in new.items()}
        if new:
            batch.evidence = old | new
        batch.before = None

    def observe(self, entry: BucketState, grads: Sequence[Tensor]) -> None:
        """Update a bucket's evidence with gradients that are not exchanged."""
        xp, wanted = self._exchange.xp, [x for x in self.wanted(entry) if x.looks_before]
        if wanted:
            parts = [xp.reshape(grads[member], (-1,)) for member in entry.bucket.members]
            batch = Batch([entry], "", xp, wanted)
            batch.evidence = {x.key: x.zeros(entry) for x in wanted} | entry.evidence
            self.before(batch, wanted, xp.reshape(xp.concat(parts), entry.bucket.shape))

    def _step(self, batch: Batch, grad: Tensor, mean: Tensor = None) -> Step:
        buckets = len(batch.entries) if batch.stacked == "alike" else 0
        weight = self._exchange.policy.observers.weight
        return Step(grad, batch.first.compressor, batch.stored, weight, buckets, mean)

    # ----------------------------------------------------------------------------------- decisions
    def tick(self, rates: Mapping[str, float]) -> None:
        policy = self._exchange.policy
        policy.tick(rates)
        for observer in policy.observers:
            observer.opening(self._exchange, rates)

    def due(self, rates: Mapping[str, float]) -> bool:
        """Return whether a decision is due now; equal on all ranks."""
        policy = self._exchange.policy
        observers = [observer.due(self._exchange) for observer in policy.observers]
        return policy.due(rates) or any(observers)

    def decide(self, rates: Mapping[str, float]) -> None:
        exchange = self._exchange
        if self.due(rates):
            began = time.perf_counter()
            exchange.communicator.run(f"{exchange.name}.policy", self.take(rates))
            exchange.ledger.add("decide", time.perf_counter() - began)

    def take(self, rates: Mapping[str, float]) -> Generator[Any, Any, None]:
        """Take the decisions that are due and apply them; a generator of collectives."""
        exchange, policy = self._exchange, self._exchange.policy
        if policy.due(rates):
            yield from self._ask(rates)
        for observer in policy.observers:
            if observer.due(exchange):
                yield from observer.decide(exchange)
        switched = [s for s in exchange.bucket_states if s.level != policy.choice(s.bucket)]
        for entry in switched:
            exchange.switch(entry, policy.choice(entry.bucket))
        policy.on_level_override([entry.bucket.name for entry in switched])

    def _ask(self, rates: Mapping[str, float]) -> Generator[Any, Any, None]:
        exchange, policy = self._exchange, self._exchange.policy
        values = {}
        for evidence in policy.evidence:
            values[evidence.key] = yield from evidence.read(exchange)
        lead = exchange.communicator.rank == 0
        # One rank decides: evidence and times of the ranks differ.
        rows = base.plain(policy.decide(values, rates)) if lead else None
        rows = yield from share(exchange.communicator, rows, exchange.device)
        policy.apply(base.read(rows))
        for entry in exchange.bucket_states:
            if entry.evidence:
                entry.evidence = {}  # a new window begins
