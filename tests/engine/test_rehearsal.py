"""Tests of rehearsals, with ranks in threads: what they say of other jobs, and what they leave."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY
from test_gradient_averager import NumPyAverager, averagers, gradients, on_all
from threads import Threaded

from accordion_hvd import EFSignSGD, Fixed, Ledger, TopK
from accordion_hvd.engine import rehearsal
from accordion_hvd.engine.gradient_averager import EVERY, FIRST
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.ledger import as_ledger
from accordion_hvd.engine.ledger.summary import DENSE, HALF, OWN, summarize
from accordion_hvd.simulation.one_process import Hub

FOUR = "PowerSGD(rank=4)"


def train(ranks: list[NumPyAverager], steps: int) -> list[Any]:
    """Take steps; return the means of the last one."""
    for step in range(steps):
        means = on_all(ranks, lambda one, rank, step=step: one.step(gradients(rank, step)))
        for found in means:
            assert isinstance(found, dict), found
    return means


def options(ranks: list[NumPyAverager]) -> list[set[str]]:
    """Return what was rehearsed, by rehearsal; equal on all ranks."""
    found = [[set(x["seconds"]) for x in one.exchange.ledger.rehearsals] for one in ranks]
    assert all(rows == found[0] for rows in found)
    return found[0]


@pytest.mark.parametrize(
    ("compression", "others"),
    [
        ("dense", {HALF, FOUR}),
        ("fp16", {DENSE, FOUR}),
        ("powersgd:4", {DENSE, HALF}),
        ("topk:0.1", {DENSE, HALF}),
    ],
)
def test_other_exchanges_are_rehearsed_and_the_own_one(compression: str, others: set[str]) -> None:
    ranks = averagers(Hub(2), compression, guard=Guard())
    train(ranks, FIRST - 1)
    assert options(ranks) == []
    train(ranks, 1)
    assert options(ranks) == [{OWN, *others}]
    train(ranks, EVERY)
    assert options(ranks) == [{OWN, *others}] * 2
    ledger = ranks[0].exchange.ledger
    assert len(ledger.links) == 2 and ledger.series.total("measure") > 0
    for seconds in ledger.rehearsals[0]["seconds"].values():
        assert len(seconds) == rehearsal.TURNS and min(seconds) > 0


@pytest.mark.parametrize("compression", ["dense", "topk:0.05", "powersgd:2", "qsgd:4"])
def test_rehearsals_change_no_mean_and_no_byte(compression: str) -> None:
    watched, plain = (averagers(Hub(2), compression, guard=Guard()) for _ in range(2))
    for one in plain:
        one.exchange.ledger.enabled = False
    for mine, theirs in zip(train(watched, 15), train(plain, 15), strict=True):
        for name, mean in mine.items():
            np.testing.assert_array_equal(mean, theirs[name])
    assert options(watched) and not options(plain)
    sent = [ranks[0].exchange.stats()["sent"] for ranks in (watched, plain)]
    assert sent[0] == sent[1]
    assert watched[0].communicator.native_fp16_allreduce is None


def test_nothing_is_rehearsed_for_a_ledger_that_nobody_has_asked_for(tmp_path: Path) -> None:
    """Nor if some rank has not asked; the link is measured anyway."""
    assert not as_ledger(None).rehearses
    assert all(as_ledger(x).rehearses for x in (True, Ledger(), tmp_path / "ledger"))
    ranks = averagers(Hub(2), "dense", guard=Guard())
    train(ranks, 1)
    ranks[1].exchange.ledger.rehearses = False
    train(ranks, FIRST + EVERY)
    assert options(ranks) == [] and len(ranks[0].exchange.ledger.links) == 1


def test_shadows_are_rehearsed_if_all_ranks_have_them() -> None:
    for shadows in ([TopK(0.1)], [TopK(0.1)]), ([TopK(0.1)], []):
        ranks = averagers(Hub(2), "dense", guard=Guard())
        for one, shadow in zip(ranks, shadows, strict=True):
            one.exchange.ledger = Ledger(shadow=shadow)
            one.exchange.ledger.attach(one.exchange)
        train(ranks, FIRST)
        alike = shadows[0] == shadows[1]
        assert options(ranks) == [{OWN, HALF, FOUR, *(["TopK(ratio=0.1)"] if alike else [])}]


def test_what_serves_each_tensor_now_is_rehearsed() -> None:
    policy = Fixed(TopK(0.1), overrides={"v": EFSignSGD()})
    ranks = averagers(Hub(2), policy, guard=Guard())
    for one in ranks[1:]:
        one.policy = Fixed(TopK(0.1), overrides={"v": EFSignSGD()})
    made = []
    for one in ranks:
        one.prepare = lambda side: made.append(side.levels()) or rehearsal.in_steps(side)
    train(ranks, FIRST)
    assert made[0] == ranks[0].exchange.levels()


def test_a_rehearsal_that_costs_too_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone may know so; the link is measured anyway."""
    ranks = averagers(Hub(2), "dense", guard=Guard())
    train(ranks, FIRST - 1)
    ranks[1]._rehearsals._cost = 3.0
    train(ranks, 1)
    assert options(ranks) == []
    ranks[1]._rehearsals._cost = 1.4  # of 5 seconds
    train(ranks, EVERY)
    (row,) = ranks[0].exchange.ledger.rehearsals
    assert {len(seconds) for seconds in row["seconds"].values()} == {1}


def test_an_exchange_that_cannot_be_made_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The other ranks do not wait for the one that cannot make it, and training goes on."""
    ranks = averagers(Hub(2), "dense", guard=Guard())

    def fails(side: Any) -> Any:
        raise ValueError("no memory")

    ranks[1].prepare = fails
    train(ranks, FIRST + EVERY)
    assert options(ranks) == [] and ranks[0].exchange.steps == FIRST + EVERY
    told = [text for text in caplog.messages if "not rehearsed" in text]
    assert told == ["accordion_hvd: exchanges are not rehearsed (ValueError: no memory)."]


def test_gradients_that_come_late_hide_messages() -> None:
    """An exchange that starts during the backward pass waits for it, whatever it sends."""
    ranks = averagers(Hub(2), "dense", guard=Guard())
    train(ranks, 3)
    exchange = ranks[0].exchange
    members = [batch.members for batch in exchange.layout.batches]
    exchange.starts = [(x, 10.0 + 2 * i, 11.0 + 2 * i) for i, x in enumerate(members)]
    ready = rehearsal._ready(exchange)
    assert [ready[x[0]] for x in members] == [1.0 * i for i in range(len(members))]
    passes = [rehearsal.in_steps(one.exchange) for one in ranks]
    late = {number: 0.1 * (number + 1) for number in range(len(exchange.tensors))}
    grads = [[gradients(rank, 0)[x.name] for x in exchange.tensors] for rank in range(2)]
    began = time.perf_counter()
    on_all(ranks, lambda one, rank: passes[rank](grads[rank], late))
    assert 0.3 <= time.perf_counter() - began < 0.6


class Slow(Threaded):
    """A link on which an operation of n bytes takes n / RATE seconds, one after the other."""

    RATE = 6e4

    def _put(self, name: str, group: Any, *about: Any) -> Any:
        handle = super()._put(name, group, *about)
        tensors = about[0] if isinstance(about[0], list) else [about[0]]
        size = sum(x.nbytes for x in tensors)
        time.sleep(size / self.RATE)
        return handle


@pytest.mark.quiet
@pytest.mark.nightly
def test_estimates_of_other_jobs_are_what_these_take() -> None:
    """On a link whose rate is known, from each job those of the others."""
    found, took = {}, {}
    for compression in ("dense", "fp16", "powersgd:4"):
        hub, ranks = Hub(2), []
        for rank in range(2):
            link = Slow(hub, rank, NUMPY.xp)
            ranks.append(NumPyAverager(lambda link=link: link, compression, guard=Guard()))
            ranks[-1].name = "same"
        train(ranks, FIRST)
        began = time.perf_counter()
        train(ranks, 2 * FIRST)
        summary = summarize(ranks[0].exchange.ledger.as_dict())
        name = repr(ranks[0].exchange.bucket_states[0].compressor)
        took[name] = (time.perf_counter() - began) / (2 * FIRST)
        assert summary.seconds == pytest.approx(took[name], rel=0.05)
        found[name] = summary
    for name, summary in found.items():
        for other, estimate in summary.estimates.items():
            assert summary.seconds + estimate.more == pytest.approx(took[other], rel=0.1), name
    assert statistics.median(took.values()) > 0.01
