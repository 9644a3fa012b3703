"""Wait-avoiding group averaging over MPI: a thread for each rank that takes part on its behalf.

All messages are that thread's. The training thread publishes its model, activates a version and
waits until that has been averaged; if it is late, that has happened already, with what it had
published before. `GroupProtocol` has the protocol, `halving` the sums, `Wakeup` the waiting.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import periodic
from accordion_hvd.averaging.groups import Groups, default_size
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.comm.launcher import started_by_mpi
from accordion_hvd.engine import reduce_scatter
from accordion_hvd.engine.group_protocol import Activation, GroupProtocol, GroupRound, combine
from accordion_hvd.engine.wakeup import Wakeup

Array = np.ndarray
_CONTROL, _DATA = 1, 2  # tags
_ACTIVATE, _HERE, _BYE, _ASK, _ANSWER = range(5)
_EXACT = 2**20  # steps beyond it begin anew, so that sums of their squares are exact
_NAP = 1e-4  # seconds between polls of pending messages
_QUIET = 0.1  # seconds between looks at other messages meanwhile
_GRACE = 5.0  # seconds in which a rank that lives tells so
_DTYPES = ("float32", "float64")


class RanksEnded(RuntimeError):
    """Other ranks have ended their training, so this one stops too, at the same version."""


def why_not(size: int) -> str | None:
    """Why averaging without waiting is not possible here; None if it is.

    Args:
        size: how many ranks the job has.
    """
    if not started_by_mpi():
        return "the job was not started by an MPI launcher"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be loaded ({error})"
    if MPI.COMM_WORLD.Get_size() != size:
        return f"MPI knows {MPI.COMM_WORLD.Get_size()} of the job's {size} ranks"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "MPI was not started with MPI_THREAD_MULTIPLE"
    return None


class Model:
    """Vectors of one model in memory that serves again; `holders` counts who still needs it."""

    __slots__ = ("vectors", "holders")

    def __init__(self, vectors: list[Array]) -> None:
        self.vectors, self.holders = vectors, 0


class Pool:
    """Memory for models of one shape; not thread-safe."""

    def __init__(self, like: Sequence[Array]) -> None:
        self._like = [(vector.size, vector.dtype) for vector in like]
        self._free: list[Model] = []
        self.made = 0

    def take(self) -> Model:
        """Return a model with one holder; its values are undefined."""
        if not self._free:
            self.made += 1
            self._free.append(Model([np.empty(size, dtype) for size, dtype in self._like]))
        model = self._free.pop()
        model.holders = 1
        return model

    def hold(self, model: Model) -> Model:
        """Add a holder."""
        model.holders += 1
        return model

    def release(self, model: Model) -> None:
        """Remove a holder."""
        model.holders -= 1
        if not model.holders:
            self._free.append(model)


class WaitAvoiding:
    """Averages models within groups that change each step, waiting for nobody who is late.

    ```python
    with WaitAvoiding([parameters], period=10) as averaging:
        for batch in batches:
            take_a_step(parameters, batch)
            averaging.average([parameters])
    ```
    After each `period` steps all ranks average, which waits for the last one and makes all models
    equal. In between, who arrives first starts its version everywhere; a rank that is late finds
    it done, with the model that it had published last, and counts its newest one besides
    (`agent.combine`). The published model is at most `period` - 1 versions old.

    Leaving the `with` block ends the averaging on all ranks at the same version: at once if all
    leave after the same step, else with the period that has begun, in which those who left still
    take part with their last model. Ranks that would go on get `RanksEnded`. Processes that leave
    without `close` do so when they exit. If a rank's process dies, or it does not take part for
    `timeout` seconds, a survivor names it and ends the job.

    Args:
        model: vectors of float32 or float64, equal on all ranks: what all start from.
        group_size: ranks that average together; None: near the root of their number.
        period: steps from one average of all ranks to the next, at least 1.
        comm: an mpi4py communicator; by default the world.
        timeout: seconds to wait for a rank before giving it up for lost.
        steps: those of an earlier one that is gone on with, the same on all ranks.
        version: that of the first average; 0 for a new one.

    Attributes:
        steps: how often `average` was called.
        version: the one that comes next.
        on_time: versions whose average had this rank's newest model in it.
        late: versions whose average had an older one.
        lag: how many versions old that was at most.
        sent: bytes of models that this rank has sent.
        log: None, or a list to which (version, whole, label of the model taken) are added.

    Raises:
        RuntimeError: there is no MPI with the threading that is needed; the sentence says why.
        ValueError: an argument is not what it may be.
    """

    def __init__(
        self,
        model: Sequence[Array],
        *,
        group_size: int | None = None,
        period: int = 10,
        comm: Any = None,
        timeout: float = 600.0,
        steps: int = 0,
        version: int = 0,
        log: list[tuple[int, bool, int]] | None = None,
    ) -> None:
        periodic(self, period)
        check.integer(self, "steps", steps, least=0)
        check.integer(self, "version", version, least=0)
        check.at_least(self, "timeout", timeout, least=0.1)
        _check_vectors(model)
        world = comm if comm is not None else _world()
        size = world.Get_size()
        self.groups = Groups(size, default_size(size) if group_size is None else group_size)
        self.period, self.timeout, self.log = period, timeout, log
        self.on_time = self.late = self.lag = self.sent = 0
        self.steps, self.version = steps, version  # the training thread's
        self._then = steps  # `steps` once all have averaged
        self._comm = world.Dup()
        self.rank, self.size = self._comm.Get_rank(), size
        strides = [1 << i for i in range((size - 1).bit_length())]
        self._tell = sorted({(self.rank + stride) % size for stride in strides})
        self._told = {(self.rank - stride) % size for stride in strides}
        self._bell = Wakeup(self._comm, self._tell)
        self._sizes = [vector.size for vector in model]
        like = [*model, np.zeros(3)]  # with what `_signs` says
        self._pool = Pool(like)
        self._scratch = [np.empty(vector.size + size, vector.dtype) for vector in like]
        self._changed = threading.Condition()
        self._agent = GroupProtocol(self.rank, size, self.groups, self._copied(model), version)
        self._outbox: list[Activation] = []
        self._results: dict[int, tuple[int, Model]] = {}
        self._reason = ""  # why this rank ends, for others to read
        self._ended: list[tuple[int, str]] | None = None  # who, and why
        self._moving = False  # whether data travels
        self._kept: list[tuple[int, ...]] = []  # messages that came meanwhile
        self._goodbyes: set[int] = set()
        self._answers: dict[int, bool] = {}  # who lives, and whether it waits for others itself
        self._sending: list[tuple[Any, Array]] = []
        self._thread = threading.Thread(target=self._serve, name="averaging", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    # -------------------------------------------------------------------------- the training thread
    def average(self, model: Sequence[Array]) -> bool:
        """Bring in the model of one more step; its vectors then hold the average.

        Returns:
            Whether all ranks' models are equal now.

        Raises:
            RanksEnded: other ranks have ended; the vectors hold the last average of all.
        """
        self._check_going()
        whole = (self.steps + 1) % self.period == 0
        if whole:
            self._average_all(model, self.steps + 1)
        elif self.groups.group_size > 1:
            self._average_group(model)
        else:
            self.steps += 1
        return whole

    def average_now(self, model: Sequence[Array]) -> None:
        """Make all models equal, beside the usual turn; all ranks must call it after the same step.

        Raises:
            RanksDisagree: they have not.
            RanksEnded: other ranks have ended; the vectors hold the last average of all.
        """
        self._check_going()
        self._average_all(model, self.steps)

    def close(
        self, model: Sequence[Array] | None = None, error: BaseException | None = None
    ) -> None:
        """End the averaging on all ranks; may be called again.

        Args:
            model: this rank's last one, which will hold the average of all; by default what it
                has published last takes part.
            error: why training ends before its time; other ranks are told.
        """
        atexit.unregister(self._leave)
        if self._agent.asked is not None:  # an exception came meanwhile; others wait for this one
            self._finish_asking()
        if self._ended is None:
            self._reason = repr(error) if error is not None else f"ended after {self.steps} steps"
            last = self._copied(self._agent.published.vectors[:-1] if model is None else model)
            self._end_together(last, alone=error is not None)
        if model is not None:
            self._take(model)
        self._thread.join()

    def __enter__(self) -> WaitAvoiding:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close(error=error)

    def _average_group(self, model: Sequence[Array]) -> None:
        fresh, version = self._copied(model), self.version
        self.version += 1  # with `steps`, so that no interrupt comes between
        self.steps += 1
        with self._changed:
            self._outbox += self._agent.activate(version)
            self._pool.release(self._agent.published)
            self._agent.publish(version, fresh)
        self._bell.ring()
        self._wait(lambda: version in self._results)
        label, total = self._results.pop(version)
        self.on_time += label == version
        self.late += label != version
        self.lag = max(self.lag, version - label)
        members = len(self.groups.of(self.rank, version))
        for mine, added in zip(model, total.vectors, strict=False):
            combine(added, mine, members, label == version)
        with self._changed:
            self._pool.release(total)

    def _average_all(self, model: Sequence[Array], then: int) -> None:
        self._ask(self.version, self._copied(model), then)
        if not self._finish_asking():
            raise RanksDisagree(
                f"rank {self.rank} asks for an average of all ranks after step {self.steps}, but "
                "others take another step: do all ranks call average_now() after the same step?"
            )
        self._take(model)
        self._check_going()

    def _ask(self, version: int, model: Model, then: int, ends: bool = False) -> None:
        """Take part in an average of all as soon as they do; `steps` is `then` afterwards."""
        some = then % _EXACT
        model.vectors[-1][:] = ends, some, some**2
        with self._changed:
            self._then = then
            self._agent.ask(version, model)
        self._bell.ring()

    def _finish_asking(self) -> bool:
        """Wait for what was asked; False if it cannot be, as others have activated that version."""
        agent = self._agent
        self._wait(lambda: agent.asked is None or agent.level >= agent.asked[0])
        with self._changed:
            refused, agent.asked = agent.asked, None
        return refused is None

    def _end_together(self, last: Model, alone: bool) -> None:
        """Take part in one more average of all, which tells that this rank ends."""
        if not alone:  # perhaps all others end here too
            self._ask(self.version, last, self.steps, ends=True)
            if self._finish_asking():
                return
        ahead = -(self.steps + 1) % self.period if self.groups.group_size > 1 else 0
        if ahead:
            with self._changed:
                self._outbox += self._agent.activate(self.version + ahead - 1)
        self._ask(self.version + ahead, last, self.steps, ends=True)
        self._finish_asking()

    def _leave(self) -> None:
        """At exit: end with the others, and say why if it was an exception."""
        self.close(error=getattr(sys, "last_value", None))

    def _take(self, model: Sequence[Array]) -> None:
        with self._changed:
            average = self._pool.hold(self._agent.published)
        for mine, theirs in zip(model, average.vectors, strict=False):
            np.copyto(mine, theirs)
        with self._changed:
            self._pool.release(average)

    def _copied(self, model: Sequence[Array]) -> Model:
        sizes = [vector.size for vector in model]
        if sizes != self._sizes:
            check.refuse(self, "sizes of the model's vectors", sizes, f"{self._sizes}, as at first")
        with self._changed:
            taken = self._pool.take()
        for room, vector in zip(taken.vectors, model, strict=False):
            np.copyto(room, vector)
        return taken

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not done():
                self._changed.wait(1.0)

    def _check_going(self) -> None:
        if self._ended is not None:
            told = "; ".join(f"rank {rank}: {why}" for rank, why in self._ended)
            raise RanksEnded(f"the averaging has ended on all ranks ({told}).")

    # -------------------------------------------------------------------------- the progress thread
    def _serve(self) -> None:
        try:
            while self._ended is None:
                self._listen()
                with self._changed:
                    round_ = self._agent.next_round()
                if round_ is None:
                    self._bell.wait()
                else:
                    self._execute(round_)
            self._say_goodbye()
        except BaseException:
            self._abort(f"its averaging thread has failed:\n{traceback.format_exc()}")

    def _listen(self) -> None:
        """Take in all messages, send what is to be sent.

        While data travels, only tell who asks that this rank lives: what others go on with
        meanwhile must not change what is being averaged here.
        """
        from mpi4py import MPI

        if not self._moving:
            kept, self._kept = self._kept, []
            for words in kept:
                self._take_in(*words)
        status, message = MPI.Status(), np.empty(3, np.int64)
        empty = 0
        while empty < 2:  # Open MPI looks for new messages only if it has not found an old one
            if not self._comm.Iprobe(MPI.ANY_SOURCE, _CONTROL, status):
                empty += 1
                continue
            source = status.Get_source()
            self._comm.Recv(message, source, _CONTROL)
            words = source, *(int(word) for word in message)
            if self._moving and words[1] not in (_ASK, _ANSWER):
                self._kept.append(words)
            else:
                self._take_in(*words)
        self._sending = [(r, words) for r, words in self._sending if not r.Test()]
        if not self._moving:
            with self._changed:
                outbox, self._outbox = self._outbox, []
            for activation in outbox:
                self._send(activation.to, _ACTIVATE, activation.version, activation.span)

    def _take_in(self, source: int, kind: int, version: int, more: int) -> None:
        with self._changed:
            if kind == _ACTIVATE:
                self._outbox += self._agent.hear(version, more)
                self._changed.notify_all()
            elif kind == _HERE:
                self._agent.arrived(source, version, bool(more))
            elif kind == _BYE:
                self._goodbyes.add(source)
            elif kind == _ANSWER:
                self._answers[source] = bool(version)
            waiting = self._agent.next_round() is not None
        if kind == _ASK:
            self._send(source, _ANSWER, waiting)

    def _send(self, to: int, *words: int) -> None:
        message = np.array((*words, 0)[:3], np.int64)
        self._sending.append((self._comm.Isend(message, to, _CONTROL), message))
        self._bell.ring(to)

    def _execute(self, round_: GroupRound) -> None:
        """Wait, quietly, until all members are ready; then exchange."""
        for rank in round_.members:
            if rank != self.rank:
                self._send(rank, _HERE, round_.version, round_.all_ranks)
        began = time.monotonic()
        while True:
            self._listen()
            with self._changed:
                if self._agent.next_round() != round_:
                    return  # not all average after all: somebody has activated this version
                missing = self._agent.missing(round_)
                if not missing:
                    label, model = self._agent.seed(round_)
                    self._pool.hold(model)
                    total = self._pool.take()
                    break
            if time.monotonic() - began > self.timeout:
                answers = self._inquire(missing)
                with self._changed:
                    came = not self._agent.missing(round_) or self._agent.next_round() != round_
                if not came:  # who is not waiting for others keeps them waiting
                    self._blame(round_, [rank for rank in missing if not answers.get(rank, False)])
                began = time.monotonic()
            self._bell.wait()
        self._moving = True
        self._add_up(round_, model, total)
        self._moving = False
        self._keep(round_, label, model, total)

    def _inquire(self, ranks: Sequence[int]) -> dict[int, bool]:
        """Return whether each of these waits for others; without those that do not answer."""
        self._answers.clear()
        for rank in ranks:
            self._send(rank, _ASK)
        until = time.monotonic() + min(self.timeout, _GRACE)
        while time.monotonic() < until and not self._answers.keys() >= set(ranks):
            self._bell.wait()
            self._listen()
        return self._answers

    def _blame(self, round_: GroupRound, suspects: Sequence[int]) -> None:
        if suspects:
            time.sleep(min(2.0, 0.05 * self.rank))  # one reason is enough
            what = "the average of all ranks" if round_.all_ranks else "a group's average"
            self._abort(
                f"rank {_words(suspects)} did not take part in {what} (version {round_.version}) "
                f"for {self.timeout:g} seconds."
            )

    def _add_up(self, round_: GroupRound, model: Model, total: Model) -> None:
        from mpi4py import MPI

        place = round_.members.index(self.rank)
        parts = zip(model.vectors, total.vectors, self._scratch, strict=True)
        for mine, into, scratch in list(parts)[: None if round_.all_ranks else -1]:
            for turns in reduce_scatter.total(mine, into, scratch, place, len(round_.members)):
                requests = [
                    self._comm.Irecv(room, round_.members[peer], _DATA)
                    for peer, room in turns.receive
                ]
                requests += [
                    self._comm.Isend(part, round_.members[peer], _DATA) for peer, part in turns.send
                ]
                self._finish(round_, partial(MPI.Request.Testall, requests))
                self.sent += sum(part.nbytes for _, part in turns.send)

    def _finish(self, round_: GroupRound, done: Callable[[], bool]) -> None:
        """Let data travel; Waitall would be busy, on a core that the others may need."""
        began = heard = time.monotonic()
        while not done():
            time.sleep(_NAP)
            now = time.monotonic()
            if now - heard > _QUIET:  # somebody may ask whether this rank lives
                self._listen()
                heard = now
            if now - began > self.timeout:
                others = [rank for rank in round_.members if rank != self.rank]
                answers = self._inquire(others)
                if not done():  # who answers is as stuck as this rank is, or the link is slow
                    self._blame(round_, [rank for rank in others if rank not in answers])
                began = time.monotonic()

    def _keep(self, round_: GroupRound, label: int, model: Model, total: Model) -> None:
        if self.log is not None:
            self.log.append((round_.version, round_.all_ranks, label))
        if round_.all_ranks:
            ended = self._signs(total.vectors[-1])
            for vector in total.vectors:
                vector /= self.size
        with self._changed:
            if round_.all_ranks:
                self._pool.release(self._agent.published)
                self._pool.release(model)  # the asking thread needs it no more
                self.version, self.steps, self._ended = round_.version + 1, self._then, ended
            else:
                self._results[round_.version] = label, total
            self._agent.done(round_, total)
            self._pool.release(model)
            self._changed.notify_all()

    def _signs(self, total: Array) -> list[tuple[int, str]] | None:
        """Return the rank that ends and its reason, from the sums of (ending, steps, steps^2)."""
        if not total[0] and self.size * total[2] == total[1] ** 2:
            return None  # nobody ends, and all have taken as many steps
        steps = "" if total[0] else f"asks for an average after {self._then} steps"
        told = self._comm.allgather(self._reason or steps)
        return [(rank, why) for rank, why in enumerate(told) if why]

    def _say_goodbye(self) -> None:
        """Messages keep their order: after a neighbour's last one, no other is pending."""
        from mpi4py import MPI

        for rank in self._tell:
            self._send(rank, _BYE)
        began = time.monotonic()
        while not self._goodbyes >= self._told:
            self._listen()
            if time.monotonic() - began > self.timeout:
                self._abort(f"rank {_words(sorted(self._told - self._goodbyes))} did not end")
            self._bell.wait()
        MPI.Request.Waitall([request for request, _ in self._sending])
        self._comm.Free()
        self._bell.close()

    def _abort(self, why: str) -> None:
        """End the job: with part of its ranks gone there is no other end."""
        sys.stderr.write(f"accordion_hvd: rank {self.rank} ends the job: {why}\n")
        sys.stderr.flush()
        self._comm.Abort(1)


def _words(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _world() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"averaging without waiting needs MPI, but mpi4py cannot be loaded ({error}): install "
            "it and an MPI library, or take wait_avoiding=False."
        ) from None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "averaging without waiting needs MPI_THREAD_MULTIPLE, but MPI was started without: "
            "import mpi4py.MPI before whatever starts MPI, or take wait_avoiding=False."
        )
    return MPI.COMM_WORLD


def _check_vectors(model: Sequence[Array]) -> None:
    for vector in model:
        kind = f"{type(vector).__name__} of {getattr(vector, 'dtype', 'no dtype')}"
        if (
            not isinstance(vector, np.ndarray)
            or vector.ndim != 1
            or str(vector.dtype) not in _DTYPES
        ):
            check.refuse(
                "WaitAvoiding", "model", kind, "vectors (numpy.ndarray) of float32 or float64"
            )
