"""Tests of wait-avoiding model averaging between real processes over MPI."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from averages import problems, replay  # noqa: E402

from accordion_hvd.comm.agreement import RanksDisagree  # noqa: E402
from accordion_hvd.engine import wait_avoiding  # noqa: E402
from accordion_hvd.engine.wait_avoiding import RanksEnded, WaitAvoiding, why_not  # noqa: E402

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def update(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([7, rank, step]).normal(size=40)


def train(averaging: WaitAvoiding, steps: int, delay: Any = None, model: Any = None) -> Any:
    """Take steps with random delays; return the model, and copies of it after each step."""
    draw = np.random.default_rng([11, RANK])
    model, found = np.zeros(40) if model is None else model, []
    for step in range(averaging.steps, averaging.steps + steps):
        model += update(RANK, step)
        mine = draw.exponential(0.002) * (8 if draw.random() < 0.1 else 1)
        time.sleep(mine if delay is None else delay(step))
        averaging.average([model])
        found.append(model.copy())
    return model, found


def agrees(averaging: WaitAvoiding, found: list[np.ndarray], extra: tuple[int, ...] = ()) -> None:
    """Assert on rank 0 that the models of all ranks and steps equal the oracle's, bit for bit."""
    everything = COMM.gather((averaging.log, found))
    if everything is None:
        return
    logs, models = zip(*everything, strict=True)
    assert not (found := problems(averaging.groups, averaging.period, logs)), found
    due = replay(averaging.groups, logs, update, np.zeros(40), extra)
    for rank in range(SIZE):
        wanted = [m for version, m in enumerate(due[rank]) if version not in extra]
        for step, (mine, theirs) in enumerate(zip(models[rank], wanted, strict=False)):
            assert (mine == theirs).all(), f"rank {rank}, step {step}"


def check_why_not() -> None:
    assert why_not(SIZE) is None
    assert "of the job's" in str(why_not(SIZE + 1))


def check_models_are_the_oracles() -> None:
    late = 0
    for each, period in ((2, 10), (SIZE, 4), (max(2, SIZE - 1), 7), (2, 1)):
        model, log = np.zeros(40), []
        averaging = WaitAvoiding([model], group_size=each, period=period, timeout=60, log=log)
        model, found = train(averaging, 4 * period + 3)
        averaging.close([model])
        agrees(averaging, found)
        assert averaging.lag <= period - 1
        alone = sum(not whole for _, whole, _ in log[: 4 * period + 3])
        assert averaging.on_time + averaging.late == alone
        assert len({row.tobytes() for row in COMM.allgather(model)}) == 1, "equal at the end"
        late += averaging.late
    assert COMM.allreduce(late) > 0, "nobody was late: nothing was tried"


def check_messages_that_come_while_data_travels() -> None:
    """Averages are correct if messages about later versions arrive while a rank still adds up."""
    interval, wait_avoiding._POLL = wait_avoiding._POLL, 0.0
    try:
        model, log = np.zeros(40), []
        averaging = WaitAvoiding([model], group_size=2, period=3, timeout=60, log=log)
        finish, draw = averaging._finish, np.random.default_rng([13, RANK])

        def late(turn: Any, done: Any) -> None:
            until = time.monotonic() + draw.exponential(0.003)
            finish(turn, lambda: time.monotonic() > until and done())

        averaging._finish = late
        model, found = train(averaging, 60)
        averaging.close([model])
        agrees(averaging, found)
    finally:
        wait_avoiding._POLL = interval


def check_alone_until_the_period_ends() -> None:
    """Groups of one are local SGD."""
    model = np.zeros(40)
    with WaitAvoiding([model], group_size=1, period=5, timeout=60) as averaging:
        own = np.zeros(40)
        for step in range(10):
            model += update(RANK, step)
            own += update(RANK, step)
            averaging.average([model])
            if (step + 1) % 5 == 0:
                own = COMM.allreduce(own) / SIZE
            np.testing.assert_allclose(model, own, rtol=1e-12, atol=1e-12)
        assert averaging.on_time == averaging.late == 0


def check_vectors_of_two_dtypes() -> None:
    parts = [np.full(5, RANK, np.float32), np.full(3, 10.0 * RANK)]
    with WaitAvoiding([np.zeros(5, np.float32), np.zeros(3)], period=1, timeout=60) as averaging:
        averaging.average(parts)
    assert parts[0].dtype == np.float32 and (parts[0] == (SIZE - 1) / 2).all()
    assert (parts[1] == 10 * (SIZE - 1) / 2).all()


def check_no_torn_reads() -> None:
    """Elements that are equal stay equal, although a rank trains while peers read its model."""
    model = np.zeros(300_000)
    with WaitAvoiding([model], group_size=2, period=20, timeout=60) as averaging:
        for step in range(40):
            model += update(RANK, step)[0]
            averaging.average([model])
            assert (model == model[0]).all(), step
        assert averaging._pool.made <= 20 + 3


def check_nobody_waits_for_a_late_rank() -> None:
    """If rank 1 is a second late, the other ranks wait only at the average of all ranks."""
    COMM.Barrier()
    model, took = np.zeros(40), []
    with WaitAvoiding([model], group_size=2, period=8, timeout=60) as averaging:
        COMM.Barrier()
        for step in range(8):
            time.sleep(1.0 if RANK == 1 and step == 2 else 0.01)
            began = time.perf_counter()
            averaging.average([model])
            took.append(time.perf_counter() - began)
    if RANK != 1:
        assert max(took[:7]) < 0.5, took
        assert sum(took) > 0.5, took


def check_average_now() -> None:
    log: list[Any] = []
    averaging = WaitAvoiding([np.zeros(40)], group_size=2, period=6, timeout=60, log=log)
    model, found = train(averaging, 8)
    averaging.average_now([model])
    assert len({row.tobytes() for row in COMM.allgather(model)}) == 1
    model, more = train(averaging, 6, model=model)
    averaging.close([model])
    agrees(averaging, found + more, extra=(8,))
    assert [version for version, whole, _ in log if whole] == [5, 8, 12, 15]


class Interrupted(Exception):
    """An exception in place of a KeyboardInterrupt or another exception of a signal handler."""


def interrupt(averaging: WaitAvoiding, after: bool) -> None:
    """Raise `Interrupted` in this rank's next wait, at once or `after` the wait has ended."""
    wait = averaging._wait

    def once(done: Any) -> None:
        averaging._wait = wait
        if after:
            wait(done)
        raise Interrupted

    averaging._wait = once


def check_an_interrupted_average_of_all_is_finished() -> None:
    """Rank 0 catches an exception within an average of all, and trains on: no update is lost."""
    model, sums, wanted = np.zeros(40), np.zeros(40), np.zeros(40)
    with WaitAvoiding([model], group_size=2, period=1, timeout=60) as averaging:
        for step in range(12):
            model += update(RANK, step)
            sums += COMM.allreduce(update(RANK, step)) / SIZE
            if RANK == 0 and step % 3 == 1:
                before = model.copy()
                interrupt(averaging, after=step % 2 == 0)
                try:
                    averaging.average([model])
                    raise AssertionError("nothing was interrupted")
                except Interrupted:
                    assert (model == before).all()
                continue  # the next call finishes this average, too
            averaging.average([model])
            wanted[:] = sums
            np.testing.assert_allclose(model, wanted, rtol=1e-12, atol=1e-12)
        assert averaging._pool.made <= 5, averaging._pool.made
        assert averaging.steps == 12
    assert len({row.tobytes() for row in COMM.allgather(model)}) == 1


def check_an_interrupted_average_of_a_group_leaks_nothing() -> None:
    model = np.zeros(40)
    with WaitAvoiding([model], group_size=2, period=20, timeout=60) as averaging:
        for step in range(60):
            model += update(RANK, step)
            if RANK == 0 and step % 20 < 10:
                interrupt(averaging, after=step % 2 == 0)
            try:
                averaging.average([model])
            except Interrupted:
                pass
            assert np.isfinite(model).all()
        assert len(averaging._results) <= 1 and averaging._pool.made <= 20 + 4


def check_average_now_on_some_ranks_only() -> None:
    model = np.zeros(40)
    try:
        with WaitAvoiding([model], group_size=2, period=6, timeout=60) as averaging:
            model, _ = train(averaging, 2, model=model)
            if RANK == 0:
                averaging.average_now([model])
            train(averaging, 20, model=model)
        raise AssertionError("nobody has noticed")
    except RanksDisagree as error:
        assert RANK == 0 and "average_now() after the same step" in str(error)
    except RanksEnded as error:
        assert RANK != 0 and "rank 0: RanksDisagree" in str(error)
        assert averaging.steps == 6


def check_averages_of_all_after_different_steps() -> None:
    """An average of all ranks fails on all if they request it after different steps.

    With groups of one rank, ranks cannot notice the difference earlier.
    """
    try:
        with WaitAvoiding([np.zeros(40)], group_size=1, period=6, timeout=60) as averaging:
            train(averaging, 2)
            if RANK == 0:
                averaging.average_now([np.zeros(40)])
            train(averaging, 20)
        raise AssertionError("nobody has noticed")
    except RanksEnded as error:
        assert "rank 0: asks for an average after 2 steps" in str(error), error
        assert "rank 1: asks for an average after 6 steps" in str(error), error


def check_an_exception_ends_all_at_the_same_version() -> None:
    for failing in (10, 14, 19):  # at a period's beginning, middle and end
        log: list[Any] = []
        averaging = WaitAvoiding([np.zeros(40)], group_size=2, period=10, timeout=60, log=log)
        try:
            with averaging:
                train(averaging, failing if RANK == 1 else 100)
                raise ValueError("intended")
        except ValueError:
            assert RANK == 1
        except RanksEnded as error:
            assert RANK != 1 and "rank 1: ValueError('intended')" in str(error)
            assert averaging.steps == 20
        assert not averaging._thread.is_alive()
        assert COMM.allgather(len(log)) == [20] * SIZE


def check_two_ranks_fail() -> None:
    averaging = WaitAvoiding([np.zeros(40)], group_size=2, period=10, timeout=60)
    try:
        with averaging:
            train(averaging, 3 + RANK if RANK < 2 else 100)
            raise ValueError(f"intended {RANK}")
    except ValueError:
        assert RANK < 2
    except RanksEnded as error:
        assert "intended 0" in str(error) and "intended 1" in str(error)


def check_different_numbers_of_steps() -> None:
    """A rank with fewer steps takes part until its period ends; then all ranks stop."""
    for group_size in (2, 1):
        averaging = WaitAvoiding([np.zeros(40)], group_size=group_size, period=5, timeout=60)
        model = np.zeros(40)
        try:
            with averaging:
                train(averaging, 7 + (0 if RANK == 0 else 4), model=model)
                averaging.close([model])
        except RanksEnded as error:
            assert RANK != 0 and "rank 0: ended after 7 steps" in str(error)
            assert averaging.steps == 10
        assert len({row.tobytes() for row in COMM.allgather(model)}) == 1


def check_the_last_average_of_a_rank_that_ends_early() -> None:
    """Its model is contributed until the period ends: averages of equal models are that model."""
    averaging, model = WaitAvoiding([np.ones(40)], group_size=2, period=5, timeout=60), np.ones(40)
    try:
        with averaging:
            for step in range(7 if RANK == 0 else 20):
                averaging.average([model])
                time.sleep(0.2 if step >= 6 else 0.0)
            averaging.close([model])
    except RanksEnded:
        assert RANK != 0
    assert (model == 1).all(), model


def check_interrupted_while_it_waits_for_all() -> None:
    """If Ctrl-C hits rank 0 in an average of all, it completes; all ranks end at the next."""
    averaging = WaitAvoiding([np.zeros(40)], group_size=2, period=4, timeout=60)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with averaging:
            if RANK == 0:
                timer.start()
            train(averaging, 40, delay=lambda step: 0.6 if RANK == 1 and step == 3 else 0.001)
    except KeyboardInterrupt:
        assert RANK == 0 and averaging.steps == 4
    except RanksEnded as error:
        assert RANK != 0 and "rank 0: KeyboardInterrupt()" in str(error) and averaging.steps == 8
    assert not averaging._thread.is_alive()


def check_interrupts_at_any_moment() -> None:
    """Ctrl-C on all ranks, at slightly different moments, ends the averaging on all ranks."""
    for turn in range(6):
        averaging = WaitAvoiding([np.zeros(40)], group_size=2, period=4, timeout=60)
        timer = threading.Timer(0.05 + 0.003 * RANK * turn, os.kill, (os.getpid(), signal.SIGINT))
        try:
            with averaging:
                timer.start()
                train(averaging, 10_000, delay=lambda step: 0.0005)
        except (KeyboardInterrupt, RanksEnded):
            pass
        assert not averaging._thread.is_alive()
        try:
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass  # other ranks had ended the averaging before
        COMM.Barrier()


def check_idle_costs_nothing() -> None:
    with WaitAvoiding([np.zeros(40)], timeout=60) as averaging:
        clock = time.pthread_getcpuclockid(averaging._thread.ident)
        time.sleep(0.2)
        spent = []
        for _ in range(4):  # on a busy host, a single second may cost more
            before = time.clock_gettime(clock)
            time.sleep(1)
            spent.append(time.clock_gettime(clock) - before)
    assert averaging._bell.heard
    assert min(spent) <= 0.01, f"{[f'{100 * part:.2f}' for part in spent]} % of a core"


def check_what_is_refused() -> None:
    for arguments, word in (
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": SIZE + 1}, f"from 1 to {SIZE}"),
        ({"period": 0}, "period is 0"),
        ({"timeout": 0}, "timeout is 0"),
    ):
        try:
            WaitAvoiding([np.zeros(3)], **arguments)  # type: ignore[arg-type]
        except ValueError as error:
            assert word in str(error), error
        else:
            raise AssertionError(arguments)
    for model in ([np.zeros(3, np.int32)], [np.zeros((2, 2))], [[1.0]]):
        try:
            WaitAvoiding(model)  # type: ignore[arg-type]
        except ValueError as error:
            assert "vectors (numpy.ndarray) of float32 or float64" in str(error)
        else:
            raise AssertionError(model)


if __name__ == "__main__":
    harness.main(globals())
