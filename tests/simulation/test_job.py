"""Tests of simulated jobs: their bytes, links, clocks, decisions and failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import CASES, FIRST, Case

from accordion_hvd import (
    COLD,
    DPSGD,
    WAGMA,
    Accordion,
    AdaQS,
    Allgather,
    Allreduce,
    Compressor,
    Dense,
    DiLoCo,
    Info,
    LocalSGD,
    PowerSGD,
    TopK,
    parse,
)
from accordion_hvd.comm import recording
from accordion_hvd.comm.recording import Operation
from accordion_hvd.ops.random import normal
from accordion_hvd.policies.cost_model import averaging_share
from accordion_hvd.simulation import (
    Constant,
    Failures,
    JobOutcome,
    Link,
    LogNormal,
    Stragglers,
    Throughput,
    simulate,
    simulate_job,
)
from accordion_hvd.simulation.links import DisjointGroups, Everyone, HostLinks, Neighbourhood
from benchmarks.averaging.virtual_time import train

FREE = Link(0.0, math.inf)
SHAPES = {"a": (96, 40), "b": (40,), "c": (64, 50), "d": (96, 40), "e": (7, 3)}
BYTES = 4 * sum(math.prod(shape) for shape in SHAPES.values())


def job(compression: Any = "dense", ranks: int = 8, steps: int = 10, **options: Any) -> JobOutcome:
    return simulate_job(SHAPES, compression, ranks, steps, **options)


# --------------------------------------------------------------------------------------- bytes
@pytest.mark.seldom(
    where=lambda ranks, case: ranks == 20 and (case.compressor.period != 1 or case not in FIRST)
)
@pytest.mark.parametrize("ranks, local", [(4, 2), (20, 1)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_of_a_real_exchange(case: Case, ranks: int, local: int) -> None:
    """A simulated job sends the bytes of a real exchange.

    Most cases run four steps, in which their phases change. With 20 ranks, exchange generators stop
    at their last requests.
    """
    method, steps = case.compressor, 4
    sizes = {k: v for k, v in SHAPES.items() if not (case.private and k != "a")}
    world = simulate(method, ranks, local_size=local)
    for _ in range(steps if case.rounds else 1):  # what uneven methods send depends on residuals
        gradients = {k: normal(shape, k).astype(np.float32) for k, shape in reversed(sizes.items())}
        if method.scope == "samples":
            gradients = {k: x[None] for k, x in gradients.items()}
        world.step([{k: x.copy() for k, x in gradients.items()} for _ in range(ranks)])
    stats = world.exchanges[0].stats()
    link = Link(local_size=local)
    run = simulate_job(sizes, method, ranks, stats["steps"], link=link)
    assert stats["sent"] > 0
    close = 0.1 if case.uneven else 1e-12  # what is sent depends on values
    assert run.sent_by_rank * stats["steps"] == pytest.approx(stats["sent"], rel=close)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_large_answers_are_not_needed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the answers of an allgather, the bytes and seconds are the same."""
    sizes, link = {"a": SHAPES["a"]}, Link(local_size=2)
    full = simulate_job(sizes, case.compressor, 20, 1, link=link)
    monkeypatch.setattr(recording, "LARGE", 0)
    short = simulate_job(sizes, case.compressor, 20, 1, link=link)
    assert short.sent_by_rank == full.sent_by_rank and short.seconds == full.seconds


@dataclass(frozen=True)
class Echo(Compressor):
    """Gather the gradient, and then one number for each rank."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        (first, *_) = yield Allgather(grad)
        yield Allreduce(np.zeros(info.size, np.float32))
        return first, state


def test_large_answers_on_which_requests_depend_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_job(SHAPES, Echo(), 20, 1)
    monkeypatch.setattr(recording, "LARGE", 0)
    with pytest.raises(ValueError, match="ranks is 20, but must be fewer"):
        simulate_job(SHAPES, Echo(), 20, 1)


@pytest.mark.parametrize("method", ["doublesqueeze:qsgd:4", "doublesqueeze:onebit", "terngrad"])
def test_large_tensors_on_many_ranks(method: str) -> None:
    """In parts, a thousand ranks send hardly more than 20, also where messages exceed `LARGE`."""
    shapes, size = {"w": (5120, 7000)}, 4 * 5120 * 7000
    few, many = (simulate_job(shapes, method, n, 1).sent_by_rank for n in (20, 1000))
    assert size / 8 > recording.LARGE or method != "doublesqueeze:qsgd:4"
    assert few < many < 3 * few < size


@pytest.mark.parametrize("method", [LocalSGD(5), DiLoCo(4), WAGMA(4, 5), DPSGD("ring")], ids=repr)
def test_bytes_of_averages_are_those_of_the_cost_model(method: Any) -> None:
    share = averaging_share(method, 16)
    assert job(method, 16, 20).sent_by_rank == pytest.approx(share * BYTES)


def test_methods_that_divide_by_the_learning_rate_send_their_messages() -> None:
    """COLD sends its model to both neighbours in a ring, unless the step has size 0."""
    assert job(COLD("ring"), 16, 3, lr=0.1).sent_by_rank == pytest.approx(2 * BYTES)
    assert job(COLD("ring"), 16, 3, lr=0.0).sent_by_rank == 0


def test_bytes_of_hosts() -> None:
    """A ring's messages leave each host once; those of an alltoall leave it once per rank."""
    dense = job("dense", 16, 3, link=Link(local_size=4))
    assert dense.sent_by_host == pytest.approx(dense.sent_by_rank)
    link, column = Link(local_size=4), DisjointGroups([range(i, 16, 4) for i in range(4)])
    links = HostLinks(link, 16)
    sent = links.sent(Operation("allreduce", 100.0, column))
    assert sent == pytest.approx(4 * 2 * 3 / 4 * 100)  # four groups share each host's link
    sent = links.sent(Operation("alltoall", 160.0))
    assert sent == pytest.approx(4 * 12 * 10)
    hosts = DisjointGroups([range(i, i + 4) for i in (0, 4, 8, 12)])
    assert links.sent(Operation("alltoall", 16.0, hosts)) == 0


# --------------------------------------------------------------------------------------- links
def price(link: Link, operation: Operation, members: Any, ranks: int) -> np.ndarray:
    return HostLinks(link, ranks).seconds(replace(operation, group=members))


def ring(sizes: np.ndarray, latency: np.ndarray, bandwidth: np.ndarray) -> float:
    """Return the seconds of a ring allreduce: chunks are passed around the ring, round by round."""
    clock = np.zeros(len(sizes))
    for _ in range(2 * (len(sizes) - 1)):
        arrived = np.roll(clock + latency + sizes / len(sizes) / bandwidth, 1)
        clock = np.maximum(clock, arrived)
    return float(clock.max())


@pytest.mark.parametrize("ranks", [2, 3, 8, 100])
def test_a_ring_on_equal_links(ranks: int) -> None:
    link, size = Link(1e-3, 1e9, "ring"), 1e7
    cost = price(link, Operation("allreduce", size), Everyone(), ranks)
    assert cost == pytest.approx(2 * (ranks - 1) * (1e-3 + size / ranks / 1e9))
    oracle = ring(np.full(ranks, size), np.full(ranks, 1e-3), np.full(ranks, 1e9))
    assert cost == pytest.approx(oracle)


@pytest.mark.parametrize("slow", [0, 3, 7])
def test_the_slowest_link_bounds_a_ring(slow: int) -> None:
    bandwidth = np.full(8, 1e9)
    bandwidth[slow] = 1e8
    operation = Operation("allreduce", 1e7)
    cost = price(Link(0.0, tuple(bandwidth), "ring"), operation, Everyone(), 8)
    assert cost == pytest.approx(price(Link(0.0, 1e8, "ring"), operation, Everyone(), 8))
    assert cost >= ring(np.full(8, 1e7), np.zeros(8), bandwidth) * 0.99
    groups = DisjointGroups([[0, 1, 2, 3], [4, 5, 6, 7]])
    times = price(Link(0.0, tuple(bandwidth), "ring"), operation, groups, 8)
    assert (np.argsort(times, kind="stable")[-4:] // 4 == slow // 4).all()
    assert times.max() == pytest.approx(10 * times.min())


@pytest.mark.parametrize(
    "kind, rounds, moved",
    [
        ("allreduce", 6, 1.75),
        ("allgather", 3, 7.0),
        ("broadcast", 3, 0.875),
        ("alltoall", 1, 0.875),
    ],
)
def test_a_tree(kind: str, rounds: int, moved: float) -> None:
    cost = price(Link(1e-3, 1e9), Operation(kind, 1e6), Everyone(), 8)
    assert cost == pytest.approx(rounds * 1e-3 + moved * 1e-3)


def test_links_within_hosts() -> None:
    """Rounds within hosts are added; bytes take the slower of the two links."""
    inside = Link(1e-6, 1e10)
    outside = Link(1e-3, 1e9, local_size=4, inside=inside)
    operation = Operation("allreduce", 1e6)
    whole = price(outside, operation, Everyone(), 16)
    assert whole == pytest.approx(4 * 1e-3 + 2 * 15 / 16 * 1e-3 + 4 * 1e-6)
    hosts = DisjointGroups([range(i, i + 4) for i in (0, 4, 8, 12)])
    near = price(outside, operation, hosts, 16)
    assert near == pytest.approx(4 * 1e-6 + 1.5 * 1e-4)
    assert not price(Link(1e-3, 1e9, local_size=4), operation, hosts, 16).any()


def test_neighbours_wait_for_their_own_messages() -> None:
    """If rank 0 of a ring has a slow link, only that rank and its two neighbours wait."""
    to = [((rank + 1) % 6, (rank - 1) % 6) for rank in range(6)]
    link = Link(0.0, (1e6, *[1e9] * 5))
    cost = price(link, Operation("neighbours", 1e6), Neighbourhood(to, to), 6)
    assert cost == pytest.approx([2.0, 2.0, 2e-3, 2e-3, 2e-3, 2.0])


# -------------------------------------------------------------------------------------- clocks
@pytest.mark.parametrize("compression", ["dense", "powersgd:2", "topk:0.1", "signsgd", "wagma:8"])
def test_free_links_leave_the_slowest_rank(compression: str) -> None:
    compute = LogNormal(0.1, 0.5)
    run = job(compression, 8, 20, link=FREE, compute=compute)
    assert run.step_seconds == pytest.approx(compute.draw(8, 20, 0).max(1))
    assert run.parts["exposed"] == pytest.approx(0, abs=1e-12)


def test_speeds_divide_all_work() -> None:
    speeds = [1.0] * 7 + [0.25]
    encoding = Throughput(1e9)
    fast, slow = (job("topk:0.1", link=FREE, encoding=encoding, speeds=s) for s in (None, speeds))
    assert slow.median == pytest.approx(4 * fast.median)
    assert slow.parts["idle"] == pytest.approx(7 / 8 * 3 / 4 * slow.median, rel=1e-3)


@pytest.mark.parametrize("compression", ["dense", "powersgd:2", "topk:0.1", "twolevel:topk:0.1"])
@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e8])
def test_bounds_of_overlap(compression: str, bandwidth: float) -> None:
    """Overlap never makes a step longer, nor shorter than its computation or its communication."""
    link = Link(1e-4, bandwidth, local_size=2, inside=Link(1e-6, 1e9))
    compute, alone = LogNormal(0.1, 0.2), Constant(0.0)
    runs = {
        overlap: job(compression, link=link, compute=compute, overlap=overlap)
        for overlap in (True, False)
    }
    communication = job(compression, link=link, compute=alone, overlap=False).step_seconds
    slowest = compute.draw(8, 10, 0).max(1)
    short = 1e-12
    assert (runs[True].step_seconds <= runs[False].step_seconds + short).all()
    assert (runs[True].step_seconds >= np.maximum(slowest, communication) - short).all()
    assert runs[False].step_seconds == pytest.approx(slowest + communication)


def test_overlap_hides_large_layers() -> None:
    """With two layers, the first message travels during the second half of the backward pass."""
    model = {"late": (2048, 1024), "early": (2048, 1024)}
    size = 2 * (7 / 8) * 4 * 2048 * 1024
    run = simulate_job(model, "dense", 8, 3, link=Link(0.0, size / 0.02), compute=Constant(0.12))
    assert run.step_seconds == pytest.approx(0.12 + 0.02)
    ready = {"early": 0.9, "late": 1.0}
    run = simulate_job(
        model, "dense", 8, 3, link=Link(0.0, size / 0.02), compute=Constant(0.12), ready=ready
    )
    assert run.step_seconds == pytest.approx(0.12 - 0.008 + 0.04)


def test_encoding_takes_the_training_thread() -> None:
    """Encoding and decoding add to the time of a step.

    TopK reads the gradient to encode, and the gradient and the messages of all ranks to decode.
    """
    free, model = Link(0.0, math.inf), {"a": (200, 100)}
    run = simulate_job(model, TopK(0.1), 8, 4, link=free, encoding=Throughput(1e6))
    message = (run.sent_by_rank - 2 * 8 * 7 + 8 * 7) / 7  # without the flag, which 7 others receive
    assert run.parts["encode"] == pytest.approx(80_000 / 1e6)
    assert run.parts["decode"] == pytest.approx((80_000 + 8 * message) / 1e6, rel=1e-3)
    assert run.median == pytest.approx(0.1 + run.parts["encode"] + run.parts["decode"])
    none = simulate_job(model, Dense(), 8, 4, link=free, encoding=Throughput(1e6))
    assert none.parts["encode"] == none.parts["decode"] == 0
    method = DiLoCo(4, compressor=TopK(0.1))  # 2 of 8 steps average, one tensor at a time
    averaged = simulate_job(model, method, 8, 8, link=free, encoding=Throughput(1e6))
    assert averaged.parts["encode"] == pytest.approx(0.08 / 4)


def test_parts_add_up() -> None:
    run = job("powersgd:2", link=Link(1e-3, 1e6), compute=Stragglers(), encoding=Throughput(1e7))
    assert sum(run.parts.values()) == pytest.approx(run.step_seconds.mean())
    assert run.seconds == pytest.approx(run.step_seconds.sum())
    assert all(seconds >= 0 for seconds in run.parts.values())
    assert run.median <= run.p99 <= run.step_seconds.max()


@pytest.mark.parametrize("method", [LocalSGD(5), WAGMA(4, 5), DPSGD("ring"), DiLoCo(4)], ids=repr)
def test_averages_take_as_long_as_with_models(method: Any) -> None:
    """A simulated job takes as long as `train`, which also runs the ranks' models."""
    link, compute = Link(1e-3, 1e6), LogNormal(0.1, 0.5)
    run = job(method, 16, 20, link=link, compute=compute)
    other = train(method, 16, 20, compute, link, size=BYTES)
    assert run.seconds == pytest.approx(other.seconds)
    waited = sum(run.parts.values()) - run.parts["compute"]
    assert waited == pytest.approx(other.waited)


def test_one_seed_one_outcome() -> None:
    def once(seed: int) -> JobOutcome:
        failures = Failures(3.0, detection=0.1, restart=0.2, commit_every=5)
        return job("topk:0.1", compute=Stragglers(), failures=failures, seed=seed, steps=40)

    first, second, third = once(1), once(1), once(2)
    assert (first.step_seconds == second.step_seconds).all()
    assert first.failures == second.failures and first.seconds == second.seconds
    assert first.seconds != third.seconds


# ------------------------------------------------------------------------------------ policies
def norms(name: str, step: int) -> float:
    return 1.0 + {"a": 5.0, "c": 0.2, "d": 2.0}[name] * math.exp(-step / 7)


def lr(step: int) -> float:
    return 0.1 if step < 30 else 0.01


def by_hand(policy: Any, names: list[str], steps: int) -> list[Any]:
    """Drive a policy as an exchange of one rank does; return its decisions."""
    for name in names:
        policy.current[name] = policy.start(name)
    for step in range(steps):
        rates = dict.fromkeys([*names, "e+1"], lr(step))
        if policy.due(rates):
            seen = {policy.evidence[0].key: {name: norms(name, step) for name in names}}
            policy.apply(policy.decide(seen, rates))
        policy.tick(rates)
    return policy.history


@pytest.mark.parametrize(
    "make",
    [
        lambda: Accordion(PowerSGD(4), PowerSGD(1), window=4, interval=2),
        lambda: Accordion(TopK(0.1), TopK(0.01), window=3, interval=1, threshold=0.1),
        lambda: AdaQS([PowerSGD(1), PowerSGD(2)], window=8, probes=2),
    ],
)
def test_decisions_are_those_of_the_policy(make: Callable[[], Any]) -> None:
    expected = by_hand(make(), ["d", "c", "a"], 40)
    run = job(make(), steps=40, evidence=norms, lr=lr)
    assert list(map(repr, run.decisions)) == list(map(repr, expected))
    assert len(expected) > 5


def test_the_levels_follow_the_decisions() -> None:
    policy = Accordion(PowerSGD(4), PowerSGD(1), window=4, interval=2)
    run = job(policy, steps=40, evidence=norms, lr=lr)
    served = {step: levels for step, levels in run.levels}
    assert min(served) == 0 and served[0]["a"] == "PowerSGD(rank=4)"
    changed = {(row.step, row.name): row.compressor for row in run.decisions}
    for (step, name), compressor in changed.items():
        latest = served[max(at for at in served if at <= step)]
        assert latest[name] == compressor
    assert {levels["a"] for levels in served.values()} == {"PowerSGD(rank=4)", "PowerSGD(rank=1)"}
    low, high = job("powersgd:4"), job("powersgd:1")
    assert high.sent_by_rank < run.sent_by_rank < low.sent_by_rank
    assert not policy.history  # the caller's policy is not touched


def test_a_byte_budget_is_kept() -> None:
    def make(budget: float) -> Accordion:
        return Accordion(TopK(0.2), TopK(0.01), window=4, interval=1, budget=budget)

    full, capped = (job(make(budget), 64, 40, evidence=norms) for budget in (10.0, 0.1))
    assert capped.sent_by_rank <= 0.1e6 + 2000 < full.sent_by_rank


def test_large_batches_compute_more() -> None:
    policy = Accordion(Dense(), Dense(), window=4, interval=1, batch_size=(8, 32))
    run = job(policy, steps=30, link=FREE, evidence=lambda name, step: 1.0)
    assert set(np.round(run.step_seconds, 6)) == {0.1, 0.4}


# ------------------------------------------------------------------------------------ failures
def test_a_failure_at_a_known_time() -> None:
    """A failure loses the time since the last commit.

    Steps take 1 s, and a commit of 0.5 s follows each fourth one: a failure at 10.25 s is 1.25 s
    after a commit.
    """
    failures = Failures(times=[10.25], detection=3, restart=4, commit_every=4, commit=0.5)
    run = job(steps=12, link=FREE, compute=Constant(1.0), failures=failures)
    (failure,) = run.failures
    assert (failure.time, failure.lost_steps, failure.down) == (10.25, 1, 7)
    assert failure.lost == pytest.approx(1.25)
    assert run.seconds == pytest.approx(12 + 3 * 0.5 + 7 + 1.25)
    assert run.goodput == pytest.approx(12 / run.seconds)
    assert len(run.step_seconds) == 12 and run.commit_seconds == 1.5


def test_a_failure_during_a_restart_begins_it_anew() -> None:
    failures = Failures(times=[2.5, 4.5], detection=1, restart=2, commit_every=1)
    run = job(steps=4, link=FREE, compute=Constant(1.0), failures=failures)
    assert [(x.time, x.down) for x in run.failures] == [(2.5, 5.0)]
    assert run.seconds == pytest.approx(4 + 0.5 + 5)


def test_random_failures_cost_what_theory_says() -> None:
    """A failure loses (e^q - 1 - q) / (q (e^q - 1)) of the seconds T between commits, q = T / mean.

    The fraction, about a half, is the mean time of the first failure within T, given that there is
    one.
    """
    mean, every = 40.0, 20
    failures = Failures(mean, detection=0.5, restart=1.5, commit_every=every)
    never = LocalSGD(10**9)  # messages take no time here
    run = job(never, 1, 20_000, link=FREE, compute=Constant(1.0), failures=failures)
    lost = np.array([failure.lost for failure in run.failures])
    q = every / mean
    expected = mean - every / (math.exp(q) - 1)
    assert len(lost) > 400
    assert lost.mean() == pytest.approx(expected, abs=4 * lost.std() / math.sqrt(len(lost)))
    down = sum(failure.down for failure in run.failures)
    assert run.seconds == pytest.approx(20_000 + lost.sum() + down)
    # each segment of T seconds needs e^q - 1 failures before it is committed
    assert len(lost) == pytest.approx(20_000 / every * (math.exp(q) - 1), rel=0.15)


@pytest.mark.parametrize("restart, every", [(50.0, 1), (0.0, 40)])
def test_a_hopeless_job_ends(restart: float, every: int) -> None:
    failures = Failures(1.0, detection=0.0, restart=restart, commit_every=every)
    with pytest.raises(RuntimeError, match="the job does not proceed"):
        job(LocalSGD(10**9), 1, 40, compute=Constant(1.0), failures=failures)


def test_an_elastic_job_goes_on_with_fewer_hosts() -> None:
    failures = Failures(times=[3.5, 8.5], detection=1, restart=1, commit_every=2, elastic=True)
    link = Link(1e-3, (1e6, 2e6, 3e6, 4e6), local_size=2)
    run = job("topk:0.1", 8, 10, link=link, compute=Constant(1.0), failures=failures)
    assert [failure.ranks for failure in run.failures] == [6, 4]
    left = {0, 1, 2, 3} - {host for failure in run.failures for host in failure.hosts}
    rest = Link(1e-3, tuple((host + 1) * 1e6 for host in sorted(left)), local_size=2)
    small = job("topk:0.1", 4, 10, link=rest, compute=Constant(1.0))
    assert run.step_seconds[-1] == pytest.approx(small.step_seconds[-1])
    gone = Failures(times=[0.5, 0.6, 0.7, 0.8], elastic=True)
    with pytest.raises(RuntimeError, match="all hosts have failed"):
        job("dense", 8, 10, link=link, compute=Constant(1.0), failures=gone)


# ------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "options, message",
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"speeds": [1.0]}, "speeds is"),
        ({"backward": 1.5}, "backward is 1.5"),
        ({"ready": {"z": 0.5}}, r"ready\['z'\] is 0.5"),
        ({"link": Link(bandwidth=(1e9, 1e9))}, "number of values of bandwidth is 2"),
        ({"compression": Accordion(Dense(), TopK(0.1), gate="auto")}, "gate is"),
        ({"compression": Accordion(Dense(), WAGMA(2))}, "compression is"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**options)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Link(bandwidth=0), "bandwidth is 0"),
        (lambda: Link(latency=-1), "latency is -1"),
        (lambda: Link(algorithm="star"), "algorithm is 'star'"),
        (lambda: Link(inside=Link((1.0, 2.0))), "inside is"),
        (lambda: Throughput(0), "rate is 0"),
        (lambda: Failures(times=[2, 1]), "times is"),
        (lambda: Failures(mean=0), "mean is 0"),
        (lambda: Failures(1.0, times=[2]), "times is"),
    ],
)
def test_refusals_of_parts(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ----------------------------------------------------------------------------------------- scale
MODEL = {f"layer{i}.{k}": s for i in range(50) for k, s in (("w", (512, 1024)), ("b", (512,)))}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec",
    ["dense", "powersgd:4", "topk:0.01", "twolevel:topk:0.01", "signsgd", "wagma"]
    + ["Accordion(PowerSGD(4), PowerSGD(1), window=5, interval=1)"],
)
def test_four_thousand_ranks(spec: str) -> None:
    """50 steps take less than 15 CPU seconds, so 1,000 steps take less than five minutes."""
    began = time.process_time()
    link = Link(2e-4, 1.25e9, local_size=8, inside=Link(5e-6, 1e11))
    run = simulate_job(MODEL, parse(spec), 4096, 50, link=link, compute=LogNormal(0.12, 0.05))
    assert time.process_time() - began < 15
    assert run.median > 0.12
