"""Tests of rehearsals, which do the work of a job on one rank, and of predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from accordion_hvd.comm.recording import Operation
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops import numpy as xp
from accordion_hvd.resolve import resolve
from accordion_hvd.simulation import Link, simulate_job
from accordion_hvd.simulation.prediction import (
    COSTS,
    SEGMENT,
    Cluster,
    GlooLink,
    predict,
    wire_seconds,
)
from accordion_hvd.simulation.programs import Gradients, Program, Rehearsal

SHAPES = {"first": (64, 32), "bias": (64,), "second": (256, 128), "third": (300, 300)}
SPECS = (
    "dense", "fp16", "powersgd:2", "powersgd:2,alternate", "powersgd:2,wire='float16'",
    "topk:0.01", "qsgd:4", "efsignsgd",
    "randomk:0.1", "scalecom:0.01",
)  # fmt: skip


def gradients() -> tuple[Gradients, list[np.ndarray]]:
    infos = tuple(TensorInfo(k, x, "float32") for k, x in reversed(list(SHAPES.items())))
    ready = tuple((i + 1) / len(infos) for i in range(len(infos)))
    generator = np.random.default_rng(1)
    values = [generator.normal(size=x.shape).astype(np.float32) for x in infos]
    return Gradients(infos, ready), values


def rehearse(spec: str, ranks: int = 4, native_fp16: bool = True) -> list[Program]:
    known, values = gradients()
    rehearsal = Rehearsal(resolve(spec).serving, known, values, xp, ranks, native_fp16=native_fp16)
    return rehearsal.steps(0.0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("ranks", [2, 5])
def test_rehearsed_bytes_are_those_of_a_job(spec: str, ranks: int) -> None:
    steps = rehearse(spec, ranks)
    link = GlooLink(Cluster(ranks), COSTS["torch"])
    sent = sum(sum(map(link.sent, step.operations)) for step in steps) / len(steps)
    job = simulate_job(SHAPES, spec, ranks, 12, link=Link())
    assert sent == pytest.approx(job.sent_by_rank, rel=0.02, abs=64)


def test_steps_of_a_period_are_rehearsed_one_by_one() -> None:
    first, second = rehearse("powersgd:2,alternate")
    sizes = [sum(x.size for x in step.operations) for step in (first, second)]
    assert sizes[0] != sizes[1] and len(rehearse("powersgd:2")) == 1


def test_sixteen_bits_are_added_by_ranks_unless_the_engine_does() -> None:
    def kinds(native: bool) -> list[list[str]]:
        (step,) = rehearse("fp16", native_fp16=native)
        return [[x.kind for x in chain] for chain in step.groups[0].rounds[0]]

    assert ["alltoall", "allgather"] in kinds(False)
    assert ["allreduce"] in kinds(True) and ["alltoall", "allgather"] not in kinds(True)


def test_policies_that_change_the_compressor_are_refused() -> None:
    with pytest.raises(ValueError, match="one compressor, such as powersgd:4"):
        rehearse("Accordion(low=PowerSGD(4), high=PowerSGD(1))")


# ------------------------------------------------------------------------------------- predictions
def seconds(spec: str, engine: str = "torch", **settings: float) -> float:
    (step, *_) = rehearse(spec)
    cluster = Cluster(**{"hosts": 4, "bandwidth": 1e6, "cores": 4, **settings})  # type: ignore
    return predict([step], 0.01, cluster, COSTS[engine]).seconds


@pytest.mark.parametrize("engine", sorted(COSTS))
@pytest.mark.parametrize("spec", ["dense", "powersgd:2", "topk:0.01", "qsgd:4"])
def test_worse_links_and_shared_cores_take_longer(engine: str, spec: str) -> None:
    steps = rehearse(spec)

    def took(cluster: Cluster) -> float:
        return predict(steps, 0.01, cluster, COSTS[engine]).seconds

    best = Cluster(4, bandwidth=1e9, cores=4)
    for worse in (
        replace(best, bandwidth=1e6),
        replace(best, rtt=0.1),
        replace(best, cores=0.25),
    ):
        assert took(worse) > took(best) > 0.01


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_sent_late_arrives_late(overlap: bool) -> None:
    """The last group is launched after the backward pass and all encoding."""
    (step,) = rehearse("topk:0.01")
    cluster = Cluster(2, bandwidth=1e4)

    def took(encode: float) -> float:
        late = [replace(x, encode=encode, decode=(0.0,) * len(x.decode)) for x in step.groups]
        steps = [Program(tuple(late), encode)]
        return predict(steps, 0.01, cluster, COSTS["torch"], overlap=overlap).seconds

    assert took(0.5) - took(0.1) == pytest.approx(0.4, rel=1e-6)


def test_a_slow_link_takes_the_time_of_its_bytes() -> None:
    size = 4 * sum(math.prod(shape) for shape in SHAPES.values())
    assert seconds("dense") == pytest.approx(1.5 * size / 1e6, rel=0.1)


@pytest.mark.parametrize(("engine", "trips"), [("torch", 12), ("horovod", 24)])
def test_a_distant_link_takes_the_round_trips_of_its_rings(engine: str, trips: int) -> None:
    """Two reductions take six round trips each; with Horovod, six more precede each reduction.

    Horovod first waits for the present negotiation, of three round trips, and then negotiates.
    """
    took = [seconds("powersgd:1", engine, bandwidth=1e12, rtt=rtt) for rtt in (1.0, 2.0)]
    assert took[1] - took[0] == pytest.approx(trips, rel=0.05)


@pytest.mark.parametrize("rtt", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("bandwidth", [1e7, 1e8])
def test_the_bandwidth_follows_from_the_time_of_an_allreduce(
    bandwidth: float, ranks: int, rtt: float
) -> None:
    engine = replace(COSTS["torch"], byte=0.0, hop=0.0, window=1e12)
    link = GlooLink(Cluster(ranks, bandwidth=bandwidth, rtt=rtt), engine)
    size = ranks * float(SEGMENT)
    (took,) = link.run([(0.0, ((Operation("allreduce", size),),))])
    (least,) = GlooLink(link.cluster, engine).run([(0.0, ((Operation("allreduce", 4.0),),))])
    less = (ranks - 1) * rtt  # an element is one segment per rank, not two
    wire = wire_seconds(took - (least - less), ranks, rtt)
    assert 2 * (ranks - 1) / ranks * size / wire == pytest.approx(bandwidth, rel=0.05)


def test_ranks_of_a_host_send_nothing_to_other_hosts() -> None:
    steps = rehearse("dense")
    alone = predict(steps, 0.01, Cluster(1, 4, 1e6, 1.0, 4), COSTS["torch"])
    assert alone.sent == 0 and alone.seconds < 0.1
    shared = predict(steps, 0.01, Cluster(2, 2, 1e6, 0.0, 4), COSTS["torch"])
    own = predict(steps, 0.01, Cluster(4, 1, 1e6, 0.0, 4), COSTS["torch"])
    assert shared.sent == own.sent  # of a ring, one rank's messages leave each host


def test_no_step_is_shorter_than_its_work_on_shared_cores() -> None:
    steps = rehearse("topk:0.01")
    found = predict(steps, 0.01, Cluster(4, bandwidth=1e9, cores=0.5), COSTS["horovod"])
    assert found.compute == pytest.approx(0.02)
    assert found.seconds >= found.compute + found.work and found.exposed >= 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hosts": 0}, "hosts"),
        ({"hosts": 2, "cores": 0}, "cores"),
        ({"hosts": 2, "bandwidth": 0}, "bandwidth"),
        ({"hosts": 2, "rtt": -1}, "rtt"),
    ],
)
def test_invalid_clusters_are_refused(settings: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Cluster(**settings)  # type: ignore[arg-type]
