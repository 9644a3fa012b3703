"""Wait-avoiding group averaging over MPI, with a progress thread on each rank.

The progress thread sends and receives all messages on behalf of its rank. The training thread
publishes its model, activates a version and waits for the average of this version. If the training
thread is late, the average exists already, with the model that it published before.
`GroupProtocol` implements the protocol, `group_protocol.total` the sums, and `Wakeup` the waiting.
"""

from __future__ import annotations

import atexit
import logging
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.groups import Groups, default_size
from accordion_hvd.comm import mpi, tcp, timeouts
from accordion_hvd.comm.agreement import RanksDisagree, started_by_mpi
from accordion_hvd.engine import group_protocol
from accordion_hvd.engine.group_protocol import Activation, GroupProtocol, GroupRound, combine
from accordion_hvd.ops.numpy import Array

logger = logging.getLogger(__name__)

_CONTROL, _DATA = 1, 2  # tags
_ACTIVATE, _READY, _BYE, _ASK, _ANSWER = range(5)
_EXACT = 2**20  # step numbers are sent modulo this, so that sums of their squares are exact
_NAP = 1e-4  # seconds between polls of pending messages
_POLL = 0.1  # seconds between polls of control messages while data is transferred
_REPORT = 60.0  # seconds between messages of a rank that waits
_GRACE = 5.0  # seconds in which a live rank answers
_DTYPES = ("float32", "float64")


class RanksEnded(RuntimeError):
    """Other ranks have ended their training, so this rank stops too, at the same version."""


def why_not(size: int) -> str | None:
    """Return why wait-avoiding averaging is not possible in this job; None if it is possible."""
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


class Pooled:
    """Vectors of one model in pooled memory; `holders` is the reference count."""

    __slots__ = ("vectors", "holders")

    def __init__(self, vectors: list[Array]) -> None:
        self.vectors, self.holders = vectors, 0


class Pool:
    """Pool of memory for models of one shape; not thread-safe."""

    def __init__(self, like: Sequence[Array]) -> None:
        self._like = [(vector.size, vector.dtype) for vector in like]
        self._free: list[Pooled] = []
        self.made = 0

    def take(self) -> Pooled:
        """Return a model with one holder and undefined values."""
        if not self._free:
            self.made += 1
            self._free.append(Pooled([np.empty(size, dtype) for size, dtype in self._like]))
        model = self._free.pop()
        model.holders = 1
        return model

    def hold(self, model: Pooled) -> Pooled:
        model.holders += 1
        return model

    def release(self, model: Pooled) -> None:
        """Decrement the number of holders; a model without holders returns to the pool."""
        model.holders -= 1
        if not model.holders:
            self._free.append(model)


class WaitAvoiding:
    """Averages models within groups that change in each step, without waiting for late ranks.

    ```python
    with WaitAvoiding([parameters], period=10) as averaging:
        for batch in batches:
            take_a_step(parameters, batch)
            averaging.average([parameters])
    ```
    After each `period` steps, all ranks average together. This average waits for the last rank and
    makes all models equal. In other steps, the first rank to arrive starts the average of its
    version on all ranks. When a late rank arrives, the average exists already and contains the
    model that the rank published last; the rank combines it with its newest model
    (`group_protocol.combine`). The published model is at most `period` - 1 versions old.

    Leaving the `with` block ends the averaging on all ranks at the same version: at once if all
    ranks leave after the same step, otherwise at the end of the present period, in which ranks that
    left still contribute their last model. Ranks that would continue get `RanksEnded`. A process
    without a call of `close` leaves at exit. If the process of a rank dies, or a rank does not take
    part for `timeout` seconds, another rank reports it and ends the job.

    Args:
        model: initial model, as vectors of float32 or float64; equal on all ranks.
        group_size: number of ranks of a group; None: near the square root of the number of ranks.
        period: number of steps between averages of all ranks, at least 1.
        comm: an mpi4py communicator; default: COMM_WORLD.
        timeout: seconds after which a rank that does not take part counts as lost. Default: None,
            the environment variable ACCORDION_HVD_TIMEOUT if set, else 900.
        steps: initial number of steps, equal on all ranks; nonzero to continue earlier averaging.
        version: version of the first average; nonzero to continue earlier averaging.
        log: None, or a list to which the progress thread appends a tuple (version, whether all
            ranks average, version of this rank's model in it) for each average.

    Attributes:
        steps: number of steps so far, the initial `steps` included.
        version: next version.
        on_time: number of averages that contained this rank's newest model.
        late: number of averages that contained an older model of this rank.
        lag: largest age of such an older model, in versions.
        sent: bytes of models that this rank has sent.

    Raises:
        RuntimeError: if mpi4py or MPI_THREAD_MULTIPLE is missing; the message has the reason.
        ValueError: if an argument is not allowed.
    """

    def __init__(
        self,
        model: Sequence[Array],
        *,
        group_size: int | None = None,
        period: int = 10,
        comm: Any = None,
        timeout: float | None = None,
        steps: int = 0,
        version: int = 0,
        log: list[tuple[int, bool, int]] | None = None,
    ) -> None:
        check.integer(self, "period", period, least=1)
        check.integer(self, "steps", steps, least=0)
        check.integer(self, "version", version, least=0)
        timeout = timeouts.seconds() if timeout is None else timeout
        check.at_least(self, "timeout", timeout, least=0.1)
        _check_vectors(model)
        world = comm if comm is not None else _world()
        size = world.Get_size()
        self.groups = Groups(size, default_size(size) if group_size is None else group_size)
        self.period, self.timeout, self.log = period, timeout, log
        self.on_time = self.late = self.lag = self.sent = 0
        self.steps, self.version = steps, version  # of the training thread
        self._steps_after = steps  # `steps` after the next average of all ranks
        mpi.free_retired()
        self._comm = world.Dup()
        self.rank, self.size = self._comm.Get_rank(), size
        strides = [1 << i for i in range((size - 1).bit_length())]
        self._receivers = sorted({(self.rank + stride) % size for stride in strides})
        self._senders = {(self.rank - stride) % size for stride in strides}
        self._bell = Wakeup(self._comm, self._receivers)
        self._sizes = [vector.size for vector in model]
        like = [*model, np.zeros(3)]  # the last vector is for `_end_reasons`
        self._pool = Pool(like)
        self._scratch = [np.empty(vector.size + size, vector.dtype) for vector in like]
        self._changed = threading.Condition()  # guards what both threads use, such as the pool
        self._agent = GroupProtocol(self.rank, size, self.groups, self._copy(model), version)
        self._outbox: list[Activation] = []
        self._results: dict[int, tuple[int, Pooled]] = {}
        self._reason = ""  # why this rank ends, sent to other ranks
        self._ended: list[tuple[int, str]] | None = None  # ranks that ended, with reasons
        self._interrupted: Pooled | None = None  # this rank's model in an unfinished average of all
        self._transferring = False  # whether data messages are pending
        self._deferred: list[tuple[int, ...]] = []  # control messages received meanwhile
        self._goodbyes: set[int] = set()
        self._answers: dict[int, bool] = {}  # by live rank: whether it waits for others
        self._sending: list[tuple[Any, Array]] = []
        self._thread = threading.Thread(target=self._serve, name="averaging", daemon=True)
        self._thread.start()
        self._handler = timeouts.at_exit(self._leave)

    # -------------------------------------------------------------------------- the training thread
    def average(self, model: Sequence[Array]) -> bool:
        """Average the model after a step; its vectors are overwritten by the average.

        Returns:
            Whether the models of all ranks are equal now.

        Raises:
            RanksEnded: if other ranks have ended; the vectors hold the last average of all ranks.
        """
        if not self._resume(model):
            raise self._disagreement()
        self._check_going()
        all_ranks = (self.steps + 1) % self.period == 0
        if all_ranks:
            self._average_all(model, self.steps + 1)
        elif self.groups.group_size > 1:
            self._average_group(model)
        else:
            self.steps += 1
        return all_ranks

    def average_now(self, model: Sequence[Array]) -> None:
        """Average the models of all ranks now, in addition to the periodic averages.

        All ranks must call it after the same step. The vectors are overwritten by the average.

        Raises:
            RanksDisagree: if ranks call it after different steps.
            RanksEnded: if other ranks have ended; the vectors hold the last average of all ranks.
        """
        if not self._resume(model):
            raise self._disagreement()
        self._check_going()
        self._average_all(model, self.steps)

    def close(
        self, model: Sequence[Array] | None = None, error: BaseException | None = None
    ) -> None:
        """End the averaging on all ranks; may be called more than once.

        Args:
            model: last model of this rank, which is overwritten by the average of all ranks. None:
                this rank contributes the model that it published last.
            error: exception that ends the training early; other ranks report it.
        """
        atexit.unregister(self._handler)
        self._resume(model)
        if self._agent.asked is not None:  # `close` was interrupted; others wait for this rank
            self._finish_asking()
        if self._ended is None:
            self._reason = repr(error) if error is not None else f"ended after {self.steps} steps"
            last = self._copy(self._agent.published.vectors[:-1] if model is None else model)
            self._end_together(last, others_continue=error is not None)
        if model is not None:
            self._take(model)
        self._thread.join()

    def __enter__(self) -> WaitAvoiding:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        self.close(error=error)

    def _average_group(self, model: Sequence[Array]) -> None:
        fresh, version = self._copy(model), self.version
        self.version += 1  # next to `steps`, so that no interrupt separates them
        self.steps += 1
        with self._changed:
            self._outbox += self._agent.activate(version)
            self._pool.release(self._agent.published)
            self._agent.publish(version, fresh)
        self._bell.ring()
        self._wait(lambda: version in self._results)
        label, total = self._take_result(version)
        self.on_time += label == version
        self.late += label != version
        self.lag = max(self.lag, version - label)
        members = len(self.groups.of(self.rank, version))
        for vector, added in zip(model, total.vectors, strict=False):
            combine(added, vector, members, label == version)
        with self._changed:
            self._pool.release(total)

    def _take_result(self, version: int) -> tuple[int, Pooled]:
        with self._changed:
            # Exceptions have interrupted the calls that waited for these.
            for old in [old for old in self._results if old < version]:
                self._pool.release(self._results.pop(old)[1])
            return self._results.pop(version)

    def _average_all(self, model: Sequence[Array], steps: int) -> None:
        mine = self._copy(model)
        with self._changed:
            self._interrupted = self._pool.hold(mine)
        try:
            self._ask(self.version, mine, steps)
            if not self._finish_asking():
                self._forget_interrupted()
                raise self._disagreement()
            self._take(model)
        except BaseException:  # the model stays as it was; `_resume` finishes later
            for vector, before in zip(model, mine.vectors, strict=False):
                np.copyto(vector, before)
            raise
        self._forget_interrupted()
        self._check_going()

    def _disagreement(self) -> RanksDisagree:
        return RanksDisagree(
            f"rank {self.rank} asks for an average of all ranks after step {self.steps}, but "
            "other ranks take another step. Do all ranks call average_now() after the same step?"
        )

    def _resume(self, model: Sequence[Array] | None) -> bool:
        if self._interrupted is None:
            return True
        # The other ranks went on from that average: so does this model, with its updates since.
        finished = self._finish_asking()
        if finished and model is not None:
            with self._changed:
                average = self._pool.hold(self._agent.published)
            pairs = zip(average.vectors, self._interrupted.vectors, strict=True)
            for vector, (averaged, before) in zip(model, pairs, strict=False):
                vector += averaged - before
            with self._changed:
                self._pool.release(average)
        self._forget_interrupted()
        return finished

    def _forget_interrupted(self) -> None:
        with self._changed:
            interrupted, self._interrupted = self._interrupted, None
            if interrupted is not None:
                self._pool.release(interrupted)

    def _ask(self, version: int, model: Pooled, steps: int, ends: bool = False) -> None:
        count = steps % _EXACT
        model.vectors[-1][:] = ends, count, count**2
        with self._changed:
            self._steps_after = steps
            self._agent.ask(version, model)
        self._bell.ring()

    def _finish_asking(self) -> bool:
        agent = self._agent
        self._wait(lambda: agent.asked is None or agent.level >= agent.asked[0])
        with self._changed:
            refused, agent.asked = agent.asked, None
            if refused is not None:
                self._pool.release(refused[1])
        return refused is None  # else other ranks activated this version, for a group's average

    def _end_together(self, last: Pooled, others_continue: bool) -> None:
        if not others_continue:  # perhaps all ranks end after this step
            with self._changed:
                self._pool.hold(last)  # a refused model is released, and is needed below
            self._ask(self.version, last, self.steps, ends=True)
            if self._finish_asking():
                with self._changed:
                    self._pool.release(last)
                return
        # To the end of this period, until which this rank still contributes its last model.
        ahead = -(self.steps + 1) % self.period if self.groups.group_size > 1 else 0
        if ahead:
            with self._changed:
                self._outbox += self._agent.activate(self.version + ahead - 1)
        self._ask(self.version + ahead, last, self.steps, ends=True)
        self._finish_asking()

    def _leave(self) -> None:
        self.close(error=getattr(sys, "last_value", None))

    def _take(self, model: Sequence[Array]) -> None:
        with self._changed:
            average = self._pool.hold(self._agent.published)
        for vector, averaged in zip(model, average.vectors, strict=False):
            np.copyto(vector, averaged)
        with self._changed:
            self._pool.release(average)

    def _copy(self, model: Sequence[Array]) -> Pooled:
        sizes = [vector.size for vector in model]
        if sizes != self._sizes:
            allowed = f"{self._sizes}, as in the first model"
            check.refuse(self, "sizes of the model's vectors", sizes, allowed)
        with self._changed:
            copy = self._pool.take()
        for target, vector in zip(copy.vectors, model, strict=False):
            np.copyto(target, vector)
        return copy

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not done():
                self._changed.wait(1.0)

    def _check_going(self) -> None:
        if self._ended is not None:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in self._ended)
            raise RanksEnded(f"the averaging has ended on all ranks ({reasons}).")

    # -------------------------------------------------------------------------- the progress thread
    def _serve(self) -> None:
        try:
            with mpi.in_use():
                self._follow_protocol()
                self._say_goodbye()
        except BaseException:
            self._abort(f"its progress thread has failed:\n{traceback.format_exc()}")

    def _follow_protocol(self) -> None:
        while self._ended is None:
            self._listen()
            with self._changed:
                round_ = self._agent.next_round()
            if round_ is None:
                self._bell.wait()
            else:
                self._execute(round_)

    def _listen(self) -> None:
        from mpi4py import MPI

        if not self._transferring:
            deferred, self._deferred = self._deferred, []
            for words in deferred:
                self._handle(*words)
        status, message = MPI.Status(), np.empty(3, np.int64)
        empty = 0
        while empty < 2:  # Open MPI looks for new messages only if no old one matches
            if not self._comm.Iprobe(MPI.ANY_SOURCE, _CONTROL, status):
                empty += 1
                continue
            source = status.Get_source()
            self._comm.Recv(message, source, _CONTROL)
            words = source, *(int(word) for word in message)
            # Other messages must not change the average in progress.
            if self._transferring and words[1] not in (_ASK, _ANSWER):
                self._deferred.append(words)
            else:
                self._handle(*words)
        self._sending = [(r, words) for r, words in self._sending if not r.Test()]
        if not self._transferring:
            with self._changed:
                outbox, self._outbox = self._outbox, []
            for activation in outbox:
                self._send(activation.to, _ACTIVATE, activation.version, activation.span)

    def _handle(self, source: int, kind: int, version: int, more: int) -> None:
        with self._changed:
            if kind == _ACTIVATE:
                self._outbox += self._agent.hear(version, more)
                self._changed.notify_all()
            elif kind == _READY:
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
        for rank in round_.members:
            if rank != self.rank:
                self._send(rank, _READY, round_.version, round_.all_ranks)
        wait, said = timeouts.Wait(), time.monotonic()
        while True:
            self._listen()
            with self._changed:
                if self._agent.next_round() != round_:
                    return  # a rank has activated this version, so not all average
                missing = self._agent.missing(round_)
                if not missing:
                    label, model = self._agent.seed(round_)
                    self._pool.hold(model)
                    total = self._pool.take()
                    break
            if time.monotonic() - said > _REPORT:
                said = time.monotonic()
                waits = f"waits for rank {_join_ranks(missing)} (version {round_.version})"
                logger.warning("accordion_hvd: rank %d %s", self.rank, waits)
            if wait.seconds() > self.timeout:
                answers = self._inquire(missing)
                with self._changed:
                    stuck = self._agent.missing(round_) and self._agent.next_round() == round_
                if stuck:  # a live rank that waits for others is not to blame
                    self._blame(round_, [rank for rank in missing if not answers.get(rank, False)])
                wait = timeouts.Wait()
            self._bell.wait()
        self._transferring = True
        self._add_up(round_, model, total)
        self._transferring = False
        self._store(round_, label, model, total)

    def _inquire(self, ranks: Sequence[int]) -> dict[int, bool]:
        self._answers.clear()
        for rank in ranks:
            self._send(rank, _ASK)
        limit, wait = min(self.timeout, _GRACE), timeouts.Wait()
        while wait.seconds() < limit and not self._answers.keys() >= set(ranks):
            self._bell.wait()
            self._listen()
        return self._answers

    def _blame(self, round_: GroupRound, suspects: Sequence[int]) -> None:
        if suspects:
            time.sleep(min(2.0, 0.05 * self.rank))  # so that a single rank reports
            average = "the average of all ranks" if round_.all_ranks else "the average of a group"
            self._abort(
                f"rank {_join_ranks(suspects)} did not take part in {average} "
                f"(version {round_.version}) for {self.timeout:g} seconds."
            )

    def _add_up(self, round_: GroupRound, model: Pooled, total: Pooled) -> None:
        from mpi4py import MPI

        comm, members = self._comm, round_.members
        place = members.index(self.rank)
        parts = zip(model.vectors, total.vectors, self._scratch, strict=True)
        for mine, into, scratch in list(parts)[: None if round_.all_ranks else -1]:
            for messages in group_protocol.total(mine, into, scratch, place, len(round_.members)):
                requests = [comm.Irecv(x, members[peer], _DATA) for peer, x in messages.receive]
                requests += [comm.Isend(x, members[peer], _DATA) for peer, x in messages.send]
                self._finish(round_, partial(MPI.Request.Testall, requests))
                self.sent += sum(part.nbytes for _, part in messages.send)

    def _finish(self, round_: GroupRound, done: Callable[[], bool]) -> None:
        wait, listened = timeouts.Wait(), time.monotonic()
        while not done():
            time.sleep(_NAP)  # Waitall would occupy a core that others may need
            now = time.monotonic()
            if now - listened > _POLL:  # another rank may ask whether this rank lives
                self._listen()
                listened = now
            if wait.seconds() > self.timeout:
                others = [rank for rank in round_.members if rank != self.rank]
                answers = self._inquire(others)
                if not done():  # ranks that answer are stuck as well, or the link is slow
                    self._blame(round_, [rank for rank in others if rank not in answers])
                wait = timeouts.Wait()

    def _store(self, round_: GroupRound, label: int, model: Pooled, total: Pooled) -> None:
        if self.log is not None:
            self.log.append((round_.version, round_.all_ranks, label))
        if round_.all_ranks:
            ended = self._end_reasons(total.vectors[-1])
            for vector in total.vectors:
                vector /= self.size
        with self._changed:
            if round_.all_ranks:
                self._pool.release(self._agent.published)
                self._pool.release(model)  # the training thread no longer needs it
                self.version, self.steps, self._ended = round_.version + 1, self._steps_after, ended
            else:
                self._results[round_.version] = label, total
            self._agent.done(round_, total)
            self._pool.release(model)
            self._changed.notify_all()

    def _end_reasons(self, total: Array) -> list[tuple[int, str]] | None:
        if not total[0] and self.size * total[2] == total[1] ** 2:
            return None  # no rank ends, and all have taken equally many steps
        steps = "" if total[0] else f"asks for an average after {self._steps_after} steps"
        reasons = self._comm.allgather(self._reason or steps)
        return [(rank, reason) for rank, reason in enumerate(reasons) if reason]

    def _say_goodbye(self) -> None:
        from mpi4py import MPI

        # MPI keeps the order of messages: after the last goodbye, none is pending.
        for rank in self._receivers:
            self._send(rank, _BYE)
        wait = timeouts.Wait()
        while not self._goodbyes >= self._senders:
            self._listen()
            if wait.seconds() > self.timeout:
                late = _join_ranks(sorted(self._senders - self._goodbyes))
                self._abort(f"rank {late} did not end.")
            self._bell.wait()
        MPI.Request.Waitall([request for request, _ in self._sending])
        mpi.retire(self._comm)
        self._bell.close()

    def _abort(self, why: str) -> None:
        logger.error("accordion_hvd: rank %d ends the job: %s", self.rank, why)
        logging.shutdown()  # writes what handlers hold back; no code runs after Abort
        self._comm.Abort(1)


def _join_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _world() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"wait-avoiding averaging needs MPI, but mpi4py cannot be loaded ({error}): install "
            "mpi4py and an MPI library, or pass wait_avoiding=False."
        ) from None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "wait-avoiding averaging needs MPI_THREAD_MULTIPLE, but MPI was started without it: "
            "import mpi4py.MPI before any module that starts MPI, or pass wait_avoiding=False."
        )
    return MPI.COMM_WORLD


def _check_vectors(model: Sequence[Array]) -> None:
    for vector in model:
        fits = isinstance(vector, np.ndarray) and vector.ndim == 1
        if not (fits and str(vector.dtype) in _DTYPES):
            kind = f"{type(vector).__name__} of {getattr(vector, 'dtype', 'no dtype')}"
            allowed = "vectors (numpy.ndarray) of float32 or float64"
            check.refuse("WaitAvoiding", "model", kind, allowed)


# ------------------------------------------------------------------ the wakeup of a sleeping thread
# Waiting inside MPI occupies a full core. Polling MPI often enough for short delays takes several
# percent of a core. A thread that sleeps in poll(2) until a datagram arrives takes almost no time.
# A datagram is only a hint: its content does not matter, and a time limit makes up for a lost one.

_TIMEOUT = 0.05  # seconds of delay by a lost datagram
_POLL_INTERVAL = 0.002  # seconds between polls of MPI where datagrams do not arrive
_TEST_TIMEOUT = 2.0  # seconds to wait for the neighbours' first datagrams


class Wakeup:
    """A rank's socket for wakeups; collective.

    Args:
        comm: an mpi4py communicator, used only to set up the sockets.
        neighbours: ranks to which this rank sends a first datagram as a test.

    Attributes:
        heard: whether all test datagrams arrived on all ranks. If not, `wait` returns after two
            milliseconds, so that its caller polls MPI.
    """

    def __init__(self, comm: Any, neighbours: list[int]) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        own = socket.gethostname()
        names = comm.allgather(own)
        self._socket.bind((tcp.own_address(own, names), 0))
        self._addresses = comm.allgather(self._socket.getsockname())
        self._rank = comm.Get_rank()
        self.heard = all(comm.allgather(self._try(neighbours, comm)))

    def ring(self, rank: int | None = None) -> None:
        try:
            address = self._addresses[self._rank if rank is None else rank]
            self._socket.sendto(self._rank.to_bytes(4, "little"), address)
        except OSError:
            pass  # datagrams are hints and may be lost

    def wait(self) -> None:
        if self._poll.poll(1000 * (_TIMEOUT if self.heard else _POLL_INTERVAL)):
            self._drain()

    def close(self) -> None:
        self._socket.close()

    def _drain(self) -> set[bytes]:
        received = set()
        try:
            while True:
                received.add(self._socket.recv(8))
        except OSError:
            return received

    def _try(self, neighbours: list[int], comm: Any) -> bool:
        table = enumerate(comm.allgather(neighbours))
        missing = {rank.to_bytes(4, "little") for rank, theirs in table if self._rank in theirs}
        for rank in neighbours:
            self.ring(rank)
        until = time.monotonic() + _TEST_TIMEOUT
        while missing and time.monotonic() < until:
            self._poll.poll(100)
            missing -= self._drain()
        return not missing
