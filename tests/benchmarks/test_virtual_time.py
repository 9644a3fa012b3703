"""Tests of virtual time: comparison with results worked out by hand and with an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from averages import replay

from accordion_hvd import COLD, DPSGD, WAGMA, DiLoCo, DynaCOLD, LocalSGD
from accordion_hvd.averaging.groups import Groups
from accordion_hvd.engine.group_protocol import factors
from accordion_hvd.simulation.compute_times import Constant, LogNormal, Stragglers, Traced
from accordion_hvd.simulation.links import Link
from benchmarks.averaging.virtual_time import train

FREE = Link(0.0, float("inf"))


def update(rank: int, step: int, model: np.ndarray | None = None) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=4)


def labels(times: np.ndarray, period: int) -> list[list[tuple[int, bool, int]]]:
    """Return the version of each rank's contributions, worked out from the compute times alone.

    Messages take no time. A version becomes active when its first rank arrives, and each rank
    contributes the newest model that it has published by then. Ranks wait only at a period's end,
    for the last rank.
    """
    steps, ranks = times.shape
    logs: list[list[tuple[int, bool, int]]] = [[] for _ in range(ranks)]
    begin = 0.0
    for first in range(0, steps, period):
        arrive = begin + np.cumsum(times[first : first + period], 0)
        for v, row in enumerate(arrive):
            version, whole = first + v, v == period - 1
            for rank in range(ranks):
                there = int((arrive[: v + 1, rank] <= row.min()).sum())
                logs[rank].append((version, whole, version if whole else first - 1 + there))
        begin = arrive[-1].max()
    return logs


@pytest.mark.parametrize(
    ("ranks", "each", "period"), [(8, 4, 10), (8, 2, 5), (4, 4, 4), (6, 3, 7), (5, 2, 6)]
)
def test_every_model_is_that_of_the_oracle(ranks: int, each: int, period: int) -> None:
    """Every rank's model after each step equals the oracle's bit for bit.

    The fraction of late contributions, their largest age, and the seconds are the oracle's, too.
    """
    steps, compute = 4 * period, LogNormal(0.1, 1.0)
    run = train(
        WAGMA(each, period), ranks, steps, compute, FREE, wait_avoiding=True,
        first=np.zeros(4), update=update, keep=True,
    )  # fmt: skip
    times = compute.draw(ranks, steps, 0)
    logs = labels(times, period)
    due = np.array(replay(Groups(ranks, each), logs, update, np.zeros(4)))
    assert run.models is not None and (run.models == due.transpose(1, 0, 2)).all()
    behind = [v - label for log in logs for v, whole, label in log if not whole]
    assert run.late == pytest.approx(np.mean(np.array(behind) > 0)) and run.lag == max(behind)
    windows = times.reshape(-1, period, ranks).sum(1).max(1)
    assert run.seconds == pytest.approx(windows.sum())


def test_costs_only_delay() -> None:
    """Messages that take time delay a training; no contribution is older than a period allows."""
    method = WAGMA(4, 6)
    slow = train(method, 16, 60, Stragglers(), Link(1e-3, 1e9), wait_avoiding=True, size=4e7)
    free = train(method, 16, 60, Stragglers(), FREE, wait_avoiding=True)
    assert slow.seconds > free.seconds and 0 < slow.late < 1 and slow.lag <= 5


@pytest.mark.parametrize("each", [1, 2, 8])
@pytest.mark.parametrize("wait_avoiding", [False, True])
def test_equal_times_are_those_of_the_link(each: int, wait_avoiding: bool) -> None:
    """With equal compute times, no rank is late, and a step takes computing and one exchange.

    The exchange is that of a group, and at a period's end that of all ranks.
    """
    link = Link(1e-3, 1e9)
    run = train(WAGMA(each, 5), 8, 10, Constant(0.1), link, wait_avoiding=wait_avoiding, size=1e7)

    def exchange(ranks: int) -> float:
        rounds = len(factors(ranks)) if wait_avoiding else np.log2(ranks)  # Horovod's: by twos
        return 2 * rounds * 1e-3 + 2 * (ranks - 1) / ranks * 1e7 / 1e9

    due = 10 * 0.1 + 8 * exchange(each) + 2 * exchange(8)
    token = 10e-3 if wait_avoiding else 0.0  # a message for each exchange that says "I am ready"
    assert due <= run.seconds <= due + token + 1e-9
    assert run.distance[4] < 1e-12 and run.distance[9] < 1e-12
    assert run.late == 0


@pytest.mark.parametrize(
    ("method", "due"),
    [
        (LocalSGD(1), "max"),
        (LocalSGD(10), "window"),
        (DiLoCo(10), "window"),
        (WAGMA(8, 10), "max"),
    ],
    ids=repr,
)
def test_who_waits_for_whom(method: Any, due: str) -> None:
    """An average of all ranks in each step waits for the slowest rank of the step.

    An average after a window of steps waits for the slowest rank of the window.
    """
    compute = Stragglers(0.02, 0.18)
    times = compute.draw(8, 40, 0)
    expected = times.max(1).sum() if due == "max" else times.reshape(4, 10, 8).sum(1).max(1).sum()
    assert train(method, 8, 40, compute, FREE).seconds == pytest.approx(expected)


def test_gossip_waits_for_neighbours_only() -> None:
    times = np.full((3, 8), 1.0)
    times[0, 0] = 10.0

    class Once:
        def draw(self, ranks: int, steps: int, seed: int) -> np.ndarray:
            return times

    # rank 0 delays its neighbours at once, and others a step later each; it never delays rank 4
    assert train(DPSGD("ring"), 8, 3, Once(), FREE).waited == pytest.approx(6 * 9 / 8 / 3)


def test_methods_in_the_order_of_the_paper() -> None:
    """Methods that wait less are faster, and models of groups stay closer than those of local SGD.

    Of 64 ranks, one or two are late in each step.
    """
    rates, apart = {}, {}
    for name, method, avoiding in (
        ("allreduce", LocalSGD(1), False),
        ("groups", WAGMA(8), False),
        ("wagma", WAGMA(8), True),
        ("local", LocalSGD(10), False),
    ):
        run = train(method, 64, 40, Stragglers(0.2), wait_avoiding=avoiding, size=1e8)
        rates[name], apart[name] = run.rate, max(run.distance)
    assert rates["allreduce"] < rates["groups"] < rates["wagma"] < 1.1 * rates["local"]
    assert apart["allreduce"] < 1e-9
    assert 0.01 < max(apart["groups"], apart["wagma"]) < apart["local"] / 3


def test_methods_with_messages_of_their_own() -> None:
    for method in (COLD("torus"), DynaCOLD("torus")):
        run = train(method, 9, 60, Constant(0.01), update=lambda rank, step, x: -0.1 * (x - rank))
        np.testing.assert_allclose(run.mean, 4.0, atol=0.05)


def test_what_takes_time(tmp_path: Path) -> None:
    assert (Constant(0.3).draw(4, 5, 0) == 0.3).all()
    normal = LogNormal(0.1, 0.5).draw(100, 100, 0)
    assert np.median(normal) == pytest.approx(0.1, rel=0.03)
    assert np.log(normal).std() == pytest.approx(0.5, rel=0.03)
    late = Stragglers(0.1).draw(64, 500, 0) > 0.2
    assert set(late.sum(1).tolist()) == {1, 2}
    assert Stragglers(0.1).draw(64, 5, 0).max() == pytest.approx(0.42)
    path = tmp_path / "seconds.txt"
    path.write_text("0.1 0.2\n0.3 0.4\n0.5 0.6\n")
    traced = Traced(path).draw(5, 7, 0)
    assert traced.shape == (7, 5) and set(traced.ravel()) <= {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}
    path.write_text("0.1 -1\n")
    with pytest.raises(ValueError, match="Traced: path is .* a table of seconds"):
        Traced(path).draw(2, 2, 0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="train: method is LocalSGD"):
        train(LocalSGD(), 2, 2, wait_avoiding=True)
    for ranks, steps in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="train: (ranks|steps) is 0"):
            train(LocalSGD(), ranks, steps)
