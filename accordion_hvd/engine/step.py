"""The exchange generators of one step, from the first gradient that is ready to the last mean.

A bucket batch starts as soon as its gradients are ready. When the last batch of a fusion group has
started, the first requests of the group are launched together. The first requests of each group
carry flags. The generators continue only when the first requests of all groups have returned, that
is, after backward. So before any change that cannot be undone, every rank knows whether a gradient
of some rank was not finite, and whether some rank lacks a gradient. If so, the ranks tell each
other which ones they have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.comm.collectives import Traffic, size_of, traffic_of
from accordion_hvd.comm.communicator import Communicator, Pending
from accordion_hvd.core.base import Allgather, Allreduce, ExchangeGenerator, Request, State, Tensor
from accordion_hvd.core.running import Running
from accordion_hvd.engine.layout import Layout
from accordion_hvd.ops import journal

LACKS = 2.0**-20
"""Value of the flag if a gradient is absent, but none is bad: less than that of one bad rank."""


class BatchExchange(Running):
    """The exchange generator of one bucket batch, with its cost.

    Attributes:
        payload: bytes of the generator's first requests, if the layout does not know them yet.
        seconds: seconds spent in the generator.
        sent: bytes that the generator has sent.
    """

    def __init__(self, opening: Callable[[Tensor], ExchangeGenerator], grad: Tensor) -> None:
        self._undo: list[journal.Undo] = []
        with journal.recording(self._undo):
            super().__init__(opening(grad))
        self.payload = 0
        self.seconds = self.sent = 0.0

    def answer(self, results: Sequence[Any]) -> None:
        self._undo.clear()  # from here on, changes of states in place stay
        super().answer(results)

    def take_back(self) -> None:
        self.close()
        journal.rewind(self._undo)


@dataclass
class GroupCost:
    """Cost of a fusion group in one step.

    Attributes:
        launched: time of its first request (of `time.perf_counter`); 0 before it.
        arrived: time at which its last results were there.
        rounds: number of times that requests were launched.
        encode, decode: seconds before and after the first requests.
    """

    launched: float = 0.0
    arrived: float = 0.0
    rounds: int = 0
    sent: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


class Step:
    """The exchange generators of one step, which run together.

    Args:
        name: prefix of the names of this step's collectives. All steps use the same name, so that
            engines can cache.
        guarded: whether the first requests carry flags. Compressors without state need no flags: a
            non-finite gradient shows in the mean.

    Attributes:
        layout: the batches and fusion groups. If the ranks have different ones, `advance` raises on
            every rank.
        costs: cost of each fusion group.
        starts: position of each batch, in the order in which they were started, and the times (of
            `time.perf_counter`) at which its start began and ended.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, name: str, guarded: bool
    ) -> None:
        self.traffic = Traffic()
        self.bad: Any = False  # whether a gradient of any rank is too large; symbolic in a graph
        self.broken: Any = False  # whether one is not finite
        self.seconds = {"encode": 0.0, "wait": 0.0, "decode": 0.0}
        self.layout, self._groups = layout, layout.groups
        self.costs = [GroupCost() for _ in layout.groups]
        self.starts: list[tuple[int, float, float]] = []
        self._communicator, self._xp = communicator, communicator.xp
        self._name, self._guarded = name, guarded
        self._exchanges: dict[int, BatchExchange] = {}
        self._flags: dict[int, list[Tensor]] = {g: [] for g in range(len(self.costs))}
        self._sent: dict[int, list[Tensor]] = {g: [] for g in range(len(self.costs))}  # to check
        self._missing = [len(members) for members in layout.groups]
        self._next = 0  # first group that has not been launched, if groups are launched in order
        self._pending: dict[int, tuple[int, Pending]] = {}  # group -> (round, pending requests)
        self._first: dict[int, list[Any]] = {}  # group -> answers to its first requests
        self._bad: list[Tensor] = []  # one flag per group
        self._numbers: list[Tensor] = []  # means of plan numbers that are still to be compared
        self._doubts: list[tuple[Tensor, Sequence[Any]]] = []  # `Pending.doubts`
        self._sizes = [len(batch.members) for batch in layout.batches]
        self._present: dict[int, Tensor] = {}  # batch -> 1 for each gradient that is there, else 0
        self._shares: dict[int, Any] = {}  # batch -> share of the ranks that have each gradient
        self._asked: Pending | None = None  # for these shares
        self._judged = False
        self.telling = False  # whether messages in graphs say which gradients are there
        self.measuring = False  # whether to record the bytes that `spent` returns

    def missing(self) -> list[int]:
        """Return the positions of the batches that have not received their gradients."""
        return [i for i in range(len(self._sizes)) if i not in self._exchanges]

    @property
    def launched(self) -> int:
        return len(self._groups) - sum(1 for missing in self._missing if missing)

    def start(
        self,
        index: int,
        grad: Tensor,
        opening: Callable[[Tensor], ExchangeGenerator],
        detects_nonfinite: bool = False,
        present: Tensor = None,
    ) -> None:
        """Start the exchange generator of bucket batch `index` and run it to its first requests.

        Args:
            present: fp32 vector with 1 for each of the batch's gradients that is there, else 0;
                None if all are. In a graph, all ranks lack the same ones, unless `telling`.
            detects_nonfinite: whether to check the tensor of the generator's first request in place
                of the gradients (`Compressor.detects_nonfinite`).
        """
        began = time.perf_counter()
        group = self.layout.group_of[index]
        if present is not None:
            self._present[index] = present
        if self._guarded and not detects_nonfinite:
            # Neither evidence nor states see a bad gradient, even before the step is taken back.
            bad = self._xp.too_large(grad)
            grad = self._xp.zero_if_bad(grad, bad)
            self._flags[group].append(bad)
        exchange = self._exchanges[index] = BatchExchange(opening, grad)
        if not self.layout.complete:
            exchange.payload = sum([_payload(self._xp, request) for request in exchange.requests])
        if self._guarded and detects_nonfinite:
            self._sent[group].append(exchange.requests[0].tensor)
        exchange.seconds = time.perf_counter() - began
        self.costs[group].encode += exchange.seconds
        self._missing[group] -= 1
        if not self._communicator.ordered:
            if not self._missing[group]:
                self._launch(group, 0)
        else:  # gradients become ready in an order that differs between ranks
            while self._next < len(self._groups) and not self._missing[self._next]:
                self._next += 1
                self._launch(self._next - 1, 0)
        ended = time.perf_counter()
        self.seconds["encode"] += ended - began
        self.starts.append((index, began, ended))
        if not self._communicator.ordered:
            for _, pending in self._pending.values():
                pending.ready()  # lets requests progress while backward runs

    def advance(self) -> bool:
        """Continue the generators whose requests are complete, without waiting.

        Returns:
            Whether all generators have ended.

        Raises:
            RuntimeError: if the ranks have different plans.
        """
        arrived = [g for g, (_, pending) in self._pending.items() if pending.ready()]
        now = time.perf_counter()
        for group in arrived:
            round_, pending = self._pending.pop(group)
            self.traffic.add(pending.traffic)
            self.costs[group].sent += pending.traffic.sent
            self.costs[group].arrived = now
            if round_ == 0:
                # Unchecked: `_read_flags` reads the flags of all payloads at once.
                self._first[group] = self._take_flags(group, pending.result(checked=False))
                if pending.doubts is not None:
                    self._doubts.append(pending.doubts)
            else:
                self._answer(group, pending.result(), round_)
        if not self._judged and len(self._first) == len(self._groups):
            self._judged = True
            self._judge()
        if self._asked is not None and self._asked.ready():
            self._read_shares(self._asked)
            self._asked = None
            if self.bad is not True:
                self._answer_all()
        return self._judged and not self._pending and self._asked is None

    def finish(self) -> None:
        began, decoding = time.perf_counter(), self.seconds["decode"]
        self._communicator.until(self.advance)
        waited = time.perf_counter() - began - (self.seconds["decode"] - decoding)
        self.seconds["wait"] += waited

    def payload(self, index: int) -> int:
        return self._exchanges[index].payload

    def spent(self, index: int) -> tuple[float, float]:
        """Return the seconds and, if `measuring`, the sent bytes of bucket batch `index`."""
        return self._exchanges[index].seconds, self._exchanges[index].sent

    def absent(self, index: int) -> list[Any]:
        """Return whether no rank has a gradient, for each tensor of bucket batch `index`.

        The list is empty if this rank has all of them, or if there are no flags. Its elements are
        symbolic in a graph.
        """
        if index not in self._present or index not in self._shares:
            return []
        return [share <= 0 for share in self._shares[index]]

    def result(self, index: int) -> tuple[Tensor, State]:
        """Return the mean and the new state of bucket batch `index`; undefined if `bad` is True.

        Call it once: the step does not hold their memory any longer.
        """
        exchange = self._exchanges[index]
        result, exchange.result = exchange.result, None
        return result

    def take_back(self) -> None:
        for exchange in self._exchanges.values():
            exchange.take_back()

    # ---------------------------------------------------------------------------------- internals
    def _launch(self, group: int, round_: int) -> None:
        requests = [ask for i in self._groups[group] for ask in self._exchanges[i].requests]
        if self.measuring:
            self._account(group)
        if round_ == 0 and self._guarded:
            requests.append(self._flag_request(group, requests))
        if requests:
            name = f"{self._name}.g{group}.r{round_}"
            cost = self.costs[group]
            cost.launched = cost.launched or time.perf_counter()
            cost.rounds += 1
            self._pending[group] = (round_, self._communicator.launch(name, requests))
        elif round_ == 0:
            self._first[group] = []

    def _account(self, group: int) -> None:
        for i in self._groups[group]:
            for request in self._exchanges[i].requests:
                ranks = self._communicator.ranks(request.group)
                # Not within a host, where no time of the link is taken. Uneven counts as even.
                if not self._communicator.within_host(request.group):
                    self._exchanges[i].sent += traffic_of([request], ranks).sent

    def _flag_request(self, group: int, requests: Sequence[Request]) -> Request:
        xp = self._xp
        flags, sent = self._flags.pop(group), self._sent.pop(group)
        if sent:  # one check of all of them
            flags.append(xp.nonfinite(xp.concat([xp.reshape(x, (-1,)) for x in sent])))
        bad = xp.reshape(xp.maximum_of(flags), (1,))
        parts = [bad, xp.full((1,), float(self.layout.number), "float32", xp.device(bad))]
        lacks = self._present and any([i in self._present for i in self._groups[group]])
        if xp.symbolic(bad) and (lacks or self.telling):
            parts += self._presence(self._groups[group], xp.device(bad))
        elif lacks:
            parts[0] = bad + LACKS
        # Of a kind that the group sends anyway, so that the flag costs no message of its own.
        both = xp.concat(parts)
        for request in requests:
            if _is_plain_mean(xp, request):
                return Allreduce(both)
        gathers = any([_is_gather(request) for request in requests])
        return Allgather(both) if gathers else Allreduce(both)

    def _judge(self) -> None:
        flags, exceeds = self._read_flags()
        if self._guarded:
            marked = exceeds(flags, 0.0)
            # A flag is a mean over the ranks: at most LACKS, unless a gradient is bad.
            self.bad = exceeds(flags, 2 * LACKS) if marked is True else marked
            self.broken = self.bad is not False and exceeds(flags, 2.0)
            if self.bad is True:
                self.take_back()
            if marked is True:  # lost means, too, are not for tensors that no rank has
                self._ask()
                return
        self._answer_all()

    def _read_flags(self) -> tuple[Any, Callable[[Any, float], Any]]:
        xp = self._xp
        doubts = [xp.cast(flags, "float32") for flags, _ in self._doubts]
        parts = [*self._bad, *self._numbers, *doubts]
        if not parts or xp.symbolic(parts[0]):
            return xp.concat(parts) if parts else None, xp.exceeds
        # One read of all of them, because each makes the host wait for an accelerator.
        values, first = xp.to_numpy(xp.concat(parts)), len(self._bad)
        rest = first + len(self._numbers)
        for number in values[first:rest]:
            self._compare_plans(float(number))
        # The ranks' plans are equal: on an accelerator, later steps compare them here only.
        self.layout.compares_early = self.layout.on_cpu or not self._guarded
        if values[rest:].any():
            senders = [sender for _, ranks in self._doubts for sender in ranks]
            check.refuse_payload([senders[i] for i in values[rest:].nonzero()[0]])
        return values[:first], lambda flags, limit: bool((flags > limit).any())

    def _answer_all(self) -> None:
        # Results arrive in another order on each rank, and ordered engines need one.
        for group in sorted(self._first):
            self._answer(group, self._first[group], 0)

    def _ask(self) -> None:
        parts = self._presence(range(len(self._sizes)), self._xp.device(self._bad[0]))
        request = Allreduce(self._xp.concat(parts))
        self._asked = self._communicator.launch(f"{self._name}.present", [request])

    def _presence(self, batches: Sequence[int], device: Any) -> list[Tensor]:
        full, sizes = self._xp.full, self._sizes
        return [
            self._present[i] if i in self._present else full((sizes[i],), 1.0, "float32", device)
            for i in batches
        ]

    def _read_shares(self, asked: Pending) -> None:
        self.traffic.add(asked.traffic)
        shares = iter(self._xp.to_numpy(asked.result()[0]).tolist())
        self._shares = {i: [next(shares) for _ in range(n)] for i, n in enumerate(self._sizes)}

    def _take_flags(self, group: int, answers: list[Any]) -> list[Any]:
        if not self._guarded:
            return answers
        *results, flag = answers
        if isinstance(flag, tuple):
            flag = sum(flag[1:], flag[0]) / len(flag)
        if not self._xp.symbolic(flag):
            if self.layout.compares_early:  # before this rank waits for groups that others lack
                self._compare_plans(float(self._xp.to_numpy(flag)[1]))
            else:
                self._numbers.append(flag[1:2])
        self._bad.append(flag[:1])
        place = 2
        for i in self._groups[group] if self._xp.symbolic(flag) else ():
            if self._xp.shape(flag)[0] > place:
                self._shares[i] = [flag[place + j] for j in range(self._sizes[i])]
                place += self._sizes[i]
        return results

    def _compare_plans(self, number: float) -> None:
        mine = self.layout.number
        # A mean in fp32 over a number of ranks that is no power of two is rounded.
        if abs(number - mine) > max(0.5 / self._communicator.size, 1e-6 * mine):
            raise RuntimeError(
                f"ranks disagree about the tensors to exchange: the plan of rank "
                f"{self._communicator.rank} has number {mine}, but the mean over all ranks "
                f"is {number}. Do all ranks train the same parameters, with the same compression "
                "levels?"
            )

    def _answer(self, group: int, answers: list[Any], round_: int) -> None:
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
        spent = time.perf_counter() - began
        self.costs[group].decode += spent
        self.seconds["decode"] += spent


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


def _payload(xp: ModuleType, request: Request) -> int:
    if isinstance(request, Allgather) and request.uneven:
        return 0  # sizes differ between ranks, whose layouts must not
    return size_of(request.tensor, request.wire if isinstance(request, Allreduce) else None, xp)


class Accounts:
    """Bytes and seconds of this rank since the start of training.

    Attributes:
        dense_bytes: bytes of the uncompressed gradients of all steps.
        seconds: seconds spent in encoding, waiting and decoding, by these names.
        each_step: bytes of the uncompressed gradients of one step.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.dense_bytes = self.each_step = 0.0
        self.seconds = {"encode": 0.0, "wait": 0.0, "decode": 0.0}

    def count(self, step: Step) -> None:
        self.traffic.add(step.traffic)
        self.dense_bytes += self.each_step
        for key, value in step.seconds.items():
            self.seconds[key] += value

    def stats(self, ranks: int) -> dict[str, Any]:
        dense_sent, sent = 2 * (ranks - 1) / ranks * self.dense_bytes, self.traffic.sent
        return {
            "dense": self.dense_bytes,
            "dense_sent": dense_sent,
            "payload": self.traffic.payload,
            "sent": sent,
            "received": self.traffic.received,
            "between": sent - self.traffic.within,
            "ratio": dense_sent / sent if sent else math.nan,
            "seconds": dict(self.seconds),
        }
