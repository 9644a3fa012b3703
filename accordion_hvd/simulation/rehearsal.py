"""The work and the operations of a step, measured in rehearsals on this machine."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.comm.recording import Operation
from accordion_hvd.comm.rehearsal import RehearsalCommunicator
from accordion_hvd.core.base import Hosts, Info, Tensor
from accordion_hvd.core.placement import consecutive
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import BucketState
from accordion_hvd.engine.ledger import as_ledger
from accordion_hvd.policies import Fixed
from accordion_hvd.simulation.gradient_programs import Gradients
from accordion_hvd.simulation.programs import FusionGroup

SECONDS, LEAST, MOST = 0.5, 3, 12
"""Duration of the measured steps of a configuration, and bounds on their number."""

PLACE = re.compile(r"\.g(\d+)\.r(\d+)\.(\d+)")
"""Numbers of fusion group, round and chain, in the name of an operation."""

Launch = tuple[tuple[Operation, ...], ...]
"""Chains of operations that start together; the operations of a chain follow one another."""


@dataclass(frozen=True)
class RehearsedStep:
    """Fusion groups of a step, in the order of their launch, and the seconds of encoding."""

    groups: tuple[FusionGroup[Launch], ...]
    encode: float

    @property
    def operations(self) -> list[Operation]:
        launches = [launch for group in self.groups for launch in group.rounds]
        return [operation for launch in launches for chain in launch for operation in chain]


@dataclass(frozen=True)
class _Measured:
    """Seconds and operations of one step.

    Attributes:
        encode: seconds until each bucket batch has started.
        rest: seconds from then on.
        shares: the fusion groups' parts of `rest`.
        operations: name -> operation.
    """

    encode: list[float]
    rest: float
    shares: list[float]
    operations: dict[str, Operation]


class _LeadingExchange(Exchange):
    """An exchange whose rank 0 leads in each step, if leaders rotate."""

    def info(self, entry: BucketState, step: Any = None) -> Info:
        info, ranks = super().info(entry, step), self.communicator.size
        return replace(info, step=-(-info.step // ranks) * ranks)


class Rehearsal:
    """An exchange on one rank, as if all ranks had equal gradients.

    Args:
        policy: the policy of one compressor.
        values: gradients with values, in the same order.
        native_fp16: whether the engine adds fp16.
        synchronize: waits until the device of the gradients has finished.

    Raises:
        ValueError: if the policy may change the compressor.
    """

    def __init__(
        self,
        policy: Any,
        gradients: Gradients,
        values: Sequence[Tensor],
        xp: ModuleType,
        ranks: int,
        local_size: int = 1,
        native_fp16: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        if not isinstance(policy, Fixed) or policy.gate is not None:
            check.refuse("rehearsal", "configuration", policy, "one compressor, such as powersgd:4")
        self._gradients, self._values, self._synchronize = gradients, list(values), synchronize
        self._hosts: Hosts = consecutive(ranks, local_size)
        self._communicator = RehearsalCommunicator(xp, ranks, self._hosts, native_fp16)
        self._exchange = _LeadingExchange(
            self._communicator, policy, gradients.tensors, skip=gradients.skip,
            ledger=as_ledger(False),
        )  # fmt: skip

    def steps(self, seconds: float = SECONDS) -> list[RehearsedStep]:
        """Return each step of the compressor's period, with its median time over `seconds`."""
        exchange = self._exchange
        startup = max((x.compressor.startup_steps for x in exchange.bucket_states), default=0)
        for _ in range(startup + 2):
            self._step()
        period = max(1, exchange.layout.period)
        while exchange.counted % period:
            self._step()
        steps: list[_Measured] = []
        began = time.perf_counter()
        while len(steps) < LEAST * period or (
            time.perf_counter() - began < seconds and len(steps) < MOST * period
        ):
            steps.append(self._step())
        return [self._rehearsed(steps[turn::period]) for turn in range(period)]

    def _step(self) -> _Measured:
        exchange, communicator = self._exchange, self._communicator
        communicator.operations = {}
        exchange.begin()
        encode = []
        for index, batch in enumerate(exchange.layout.batches):
            with _Clock(communicator, self._synchronize) as clock:
                grad = batch.pack([self._values[member] for member in batch.members], True)
                weights = grad if batch.first.compressor.needs_weights else None
                exchange.start(index, grad, weights)
            encode.append(clock.seconds)
        step = exchange.running
        assert step is not None
        with _Clock(communicator, self._synchronize) as clock:
            exchange.finish()
            exchange.means()
        decode = [cost.decode for cost in step.costs]
        shares = [x / (sum(decode) or 1.0) for x in decode]
        return _Measured(encode, clock.seconds, shares, communicator.operations)

    def _rehearsed(self, steps: Sequence[_Measured]) -> RehearsedStep:
        """Return a step, given measurements of steps with the same operations."""
        layout, ready = self._exchange.layout, self._gradients.ready
        encode = [statistics.median(x) for x in zip(*(step.encode for step in steps), strict=True)]
        rest = statistics.median(step.rest for step in steps)
        shares = [statistics.mean(x) for x in zip(*(step.shares for step in steps), strict=True)]
        rounds = _rounds(steps[-1].operations)
        groups, done = [], 0.0
        for number, members in enumerate(layout.groups):
            done += sum(encode[index] for index in members)
            share = max(ready[m] for index in members for m in layout.batches[index].members)
            own = rounds.get(number, [()])
            decode = (rest * shares[number] / len(own),) * len(own)
            groups.append(FusionGroup(share, done, tuple(own), decode))
        return RehearsedStep(tuple(groups), sum(encode))


def _rounds(operations: dict[str, Operation]) -> dict[int, list[Launch]]:
    """Return the rounds of each fusion group, given the operations by name."""
    found: dict[int, dict[int, dict[int, list[Operation]]]] = {}
    for name, operation in operations.items():
        if match := PLACE.search(name):
            group, round_, chain = map(int, match.groups())
            found.setdefault(group, {}).setdefault(round_, {}).setdefault(chain, [])
            found[group][round_][chain].append(operation)
    return {
        group: [tuple(map(tuple, rounds[r].values())) for r in sorted(rounds)]
        for group, rounds in found.items()
    }


class _Clock:
    """Seconds of a block, without what the engine would do."""

    def __init__(self, communicator: RehearsalCommunicator, synchronize: Callable[[], None]):
        self._communicator, self._synchronize = communicator, synchronize

    def __enter__(self) -> _Clock:
        self._synchronize()
        self._engine = self._communicator.seconds
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        engine = self._communicator.seconds - self._engine
        self.seconds = max(0.0, time.perf_counter() - self._began - engine)
