"""Decisions, which rank 0 takes and all ranks apply at the same step."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from accordion_hvd.comm.agreement import share
from accordion_hvd.policies import decision

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


class Decisions:
    """The decisions that an exchange's policy and its observers take between two steps."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def due(self, rates: Mapping[str, float]) -> bool:
        """Return whether a decision is due now; equal on all ranks."""
        policy = self._exchange.policy
        observers = [observer.due(self._exchange) for observer in policy.observers]
        return policy.due(rates) or any(observers)

    def take(self, rates: Mapping[str, float]) -> Generator[Any, Any, None]:
        """Take the decisions that are due and apply them; a generator of collectives."""
        exchange, policy = self._exchange, self._exchange.policy
        if policy.due(rates):
            yield from self._decide(rates)
        for observer in policy.observers:
            if observer.due(exchange):
                yield from observer.decide(exchange)
        self._apply()

    def _decide(self, rates: Mapping[str, float]) -> Generator[Any, Any, None]:
        exchange, policy = self._exchange, self._exchange.policy
        values = {}
        for evidence in policy.evidence:
            values[evidence.key] = yield from evidence.read(exchange)
        lead = exchange.communicator.rank == 0
        rows = decision.plain(policy.decide(values, rates)) if lead else None
        rows = yield from share(exchange.communicator, rows, exchange.device)
        policy.apply(decision.read(rows))
        for entry in exchange.bucket_states:
            if entry.evidence:
                entry.evidence = {}

    def _apply(self) -> None:
        policy = self._exchange.policy
        switched = [s for s in self._exchange.bucket_states if s.level != policy.choice(s.bucket)]
        for entry in switched:
            self._exchange.switch(entry, policy.choice(entry.bucket))
        policy.on_level_override([entry.bucket.name for entry in switched])
