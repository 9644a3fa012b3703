"""One step's conversations, from the first gradient that is ready to the last mean.

BucketBatches are started as their gradients appear. A group's first requests leave, fused, when
its last
batch has started; the first requests of all groups carry flags, and only when every group's have
come back (that is, after backward) do the conversations go on. So every rank knows, before
anything that cannot be undone, whether some rank's gradient was not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from accordion_hvd.comm.communicator import Communicator, Pending
from accordion_hvd.comm.traffic import Traffic, size_of, traffic_of
from accordion_hvd.core.base import Allgather, Allreduce, ExchangeGenerator, Request, State, Tensor
from accordion_hvd.core.running import Running
from accordion_hvd.ops import journal


class BatchExchange(Running):
    """One batch's conversation, with what it has cost.

    Args:
        opening: makes the conversation of the gradients.
        grad: the gradients.

    Attributes:
        payload: bytes of its first requests.
        seconds: spent in it.
        sent: bytes that it has sent.
    """

    def __init__(self, opening: Callable[[Tensor], ExchangeGenerator], grad: Tensor) -> None:
        self._undo: list[journal.Undo] = []
        with journal.recording(self._undo):
            super().__init__(opening(grad))
        self.payload = sum(_payload(request) for request in self.requests)
        self.seconds = self.sent = 0.0

    def answer(self, results: Sequence[Any]) -> None:
        """Go on; what was done to states in place is no longer undone."""
        self._undo.clear()
        super().answer(results)

    def take_back(self) -> None:
        """End it; undo what it has done to states in place."""
        self.close()
        journal.rewind(self._undo)


class Step:
    """The generators of one step, which run together.

    Args:
        communicator: carries the requests.
        groups: positions of batches whose requests leave together; every rank's are the same.
        name: of this step's collectives; the same in each step, so that engines can cache.
        plan: a number that must be equal on all ranks (`buckets.fingerprint`), else `advance`
            raises on every rank.
        guarded: whether flags travel. Without state, a non-finite mean speaks for itself.
    """

    def __init__(
        self,
        communicator: Communicator,
        groups: Sequence[Sequence[int]],
        name: str,
        plan: int,
        guarded: bool,
    ) -> None:
        self.traffic = Traffic()
        self.bad: Any = False  # whether any rank's gradient was not finite; symbolic in a graph
        self.seconds = {"encode": 0.0, "wait": 0.0, "decode": 0.0}
        self._communicator, self._xp = communicator, communicator.xp
        self._groups, self._name, self._plan, self._guarded = groups, name, plan, guarded
        self._group_of = {i: g for g, members in enumerate(groups) for i in members}
        self._exchanges: dict[int, BatchExchange] = {}
        self._flags: dict[int, list[Tensor]] = {g: [] for g in range(len(groups))}
        self._missing = [len(members) for members in groups]
        self._pending: dict[int, tuple[int, Pending]] = {}  # group -> (round, pending requests)
        self._first: dict[int, list[Any]] = {}  # group -> answers to its first requests
        self._bad: list[Tensor] = []  # one flag for each group
        self._judged = False
        self.measuring = False  # whether `spent` is wanted

    def started(self, index: int) -> bool:
        """Return whether batch `index` has received its gradients."""
        return index in self._exchanges

    @property
    def launched(self) -> int:
        """Return the number of groups whose first requests have left."""
        return len(self._groups) - sum(1 for missing in self._missing if missing)

    def start(
        self,
        index: int,
        grad: Tensor,
        opening: Callable[[Tensor], ExchangeGenerator],
        detects_nonfinite: bool = False,
    ) -> None:
        """Give batch `index` its gradients and run `opening` of them to the first request.

        With `detects_nonfinite`, that request's tensor tells whether they are finite
        (`Compressor.detects_nonfinite`).
        """
        began = time.perf_counter()
        group = self._group_of[index]
        if self._guarded and not detects_nonfinite:
            bad = self._xp.nonfinite(grad)
            grad = self._xp.zero_if_nonfinite(grad, bad)
            self._flags[group].append(bad)
        exchange = self._exchanges[index] = BatchExchange(opening, grad)
        if self._guarded and detects_nonfinite:
            self._flags[group].append(self._xp.nonfinite(exchange.requests[0].tensor))
        exchange.seconds = time.perf_counter() - began
        self._missing[group] -= 1
        if not self._missing[group]:
            self._launch(group, 0)
        self.seconds["encode"] += time.perf_counter() - began
        for _, pending in self._pending.values():
            pending.ready()  # what has arrived goes on while backward runs

    def advance(self) -> bool:
        """Move on with whatever has arrived, without waiting; True when all is done.

        Raises:
            RuntimeError: ranks disagree about the plan.
        """
        arrived = [g for g, (_, pending) in self._pending.items() if pending.ready()]
        for group in arrived:
            round_, pending = self._pending.pop(group)
            self.traffic.add(pending.traffic)
            if round_ == 0:
                self._first[group] = self._take_flag(pending.result())
            else:
                self._answer(group, pending.result(), round_)
        if not self._judged and len(self._first) == len(self._groups):
            self._judged = True
            self._judge()
        return self._judged and not self._pending

    def finish(self) -> None:
        """Wait until all is done."""
        began = time.perf_counter()
        decoding = self.seconds["decode"]
        while not self.advance():
            self._communicator.pause(time.perf_counter() - began)
        waited = time.perf_counter() - began - (self.seconds["decode"] - decoding)
        self.seconds["wait"] += waited

    def payload(self, index: int) -> int:
        """Bytes of batch `index`'s first requests, on this rank."""
        return self._exchanges[index].payload

    def spent(self, index: int) -> tuple[float, float]:
        """Seconds in batch `index`'s conversation, and bytes that it sent; if `measuring`."""
        return self._exchanges[index].seconds, self._exchanges[index].sent

    def result(self, index: int) -> tuple[Tensor, State]:
        """BucketBatch `index`'s mean and new state; not there if `bad` is True."""
        return self._exchanges[index].result

    def take_back(self) -> None:
        """End conversations where they are; what they have done to states in place is undone."""
        for exchange in self._exchanges.values():
            exchange.take_back()

    # ------------------------------------------------------------------------------------ within
    def _launch(self, group: int, round_: int) -> None:
        requests = [ask for i in self._groups[group] for ask in self._exchanges[i].requests]
        if self.measuring:
            self._account(group)
        if round_ == 0 and self._guarded:
            requests.append(self._flag_request(group, requests))
        if requests:
            name = f"{self._name}.g{group}.r{round_}"
            self._pending[group] = (round_, self._communicator.launch(name, requests))
        elif round_ == 0:
            self._first[group] = []

    def _account(self, group: int) -> None:
        """Note what each batch is about to send; an uneven gathering counts as an even one.

        What stays within a machine takes none of the link's time.
        """
        for i in self._groups[group]:
            for request in self._exchanges[i].requests:
                ranks = self._communicator.ranks(request.group)
                if not self._communicator.within_host(request.group):
                    self._exchanges[i].sent += traffic_of(request, ranks).sent

    def _flag_request(self, group: int, requests: Sequence[Request]) -> Request:
        """Return the request of two numbers that travel with the first collective."""
        xp = self._xp
        flags = self._flags[group]
        bad = xp.reshape(xp.maximum_of(flags), (1,))
        plan = xp.full((1,), float(self._plan), "float32", xp.device(bad))
        both = xp.concat([bad, plan])
        rides = any(_is_plain_mean(xp, request) for request in requests)
        if not rides and any(_is_gather(request) for request in requests):
            return Allgather(both)
        return Allreduce(both)

    def _judge(self) -> None:
        """Every rank knows every flag: go on together, or take everything back together."""
        if self._guarded:
            self.bad = self._xp.is_nonfinite(self._xp.concat(self._bad))
        if self.bad is True:
            self.take_back()
            return
        for group in sorted(self._first):
            self._answer(group, self._first[group], 0)

    def _take_flag(self, answers: list[Any]) -> list[Any]:
        """Read what rode in a group's first collective; returns the rest."""
        if not self._guarded:
            return answers
        *rest, flag = answers
        if isinstance(flag, tuple):
            flag = sum(flag[1:], flag[0]) / len(flag)
        self._compare_plans(flag[1:])
        self._bad.append(flag[:1])
        return rest

    def _compare_plans(self, mean: Tensor) -> None:
        if self._xp.symbolic(mean):
            return
        seen = float(self._xp.to_numpy(mean)[0])
        if seen != self._plan:
            raise RuntimeError(
                f"ranks disagree about what they exchange: the plan of rank "
                f"{self._communicator.rank} has number {self._plan}, the mean over ranks is {seen}."
                " Do all ranks train the same parameters, with the same compression levels?"
            )

    def _answer(self, group: int, answers: list[Any], round_: int) -> None:
        """Hand each conversation what it asked for; send what they ask for next."""
        began = time.perf_counter()
        taken = 0
        for index in self._groups[group]:
            exchange = self._exchanges[index]
            if not exchange.done:
                asked = len(exchange.requests)
                start = time.perf_counter()
                exchange.answer(answers[taken : taken + asked])
                exchange.seconds += time.perf_counter() - start
                taken += asked
        self._launch(group, round_ + 1)
        self.seconds["decode"] += time.perf_counter() - began


def _is_gather(request: Request) -> bool:
    return isinstance(request, Allgather) and request.group is None and not request.uneven


def _is_plain_mean(xp: ModuleType, request: Request) -> bool:
    return (
        isinstance(request, Allreduce)
        and request.op == "mean"
        and request.group is None
        and request.wire is None
        and xp.dtype(request.tensor) == "float32"
    )


def _payload(request: Request) -> int:
    if isinstance(request, Allgather) and request.uneven:
        return 0
    return size_of(request.tensor, request.wire if isinstance(request, Allreduce) else None)
