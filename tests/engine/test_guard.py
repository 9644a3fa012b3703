"""Tests of the guard: it reports replicas that differ, with ranks and tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import laws
import numpy as np
import pytest
from frameworks import NUMPY, Framework, parameters
from threads import Threaded

from accordion_hvd import LocalSGD, PowerSGD, TopK, simulate
from accordion_hvd.comm import local
from accordion_hvd.comm.agreement import explain_disagreement, gather
from accordion_hvd.core.running import drive
from accordion_hvd.engine.averages import ModelParameters
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.guard import EARLY, Guard, ReplicasDiffer, describe
from accordion_hvd.engine.layout import TensorInfo, span
from accordion_hvd.engine.model_averager import ModelAverager
from accordion_hvd.optimizers import ZeroOneAdam
from accordion_hvd.resolve import as_policy, resolve
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep


def test_equal_replicas_are_no_news() -> None:
    assert describe(1, ["a", "b"], np.array([[1, 2], [1, 2], [1, 2]])) is None


def test_replicas_that_differ_are_named() -> None:
    table = np.array([[1, 2, 3], [1, 2, 3], [1, 9, 4], [1, 2, 3]])
    message = describe(40, ["a", "layer.weight", "c"], table)
    assert message is not None
    assert "after step 40" in message and "'layer.weight' and 1 more" in message
    assert "rank(s) [2] hold other values" in message
    assert "every step" in message
    first = describe(EARLY[0], ["a", "b", "c"], table)
    assert first is not None and "initial weights broadcast" in first


class OneModel(ModelParameters):
    """A model of one vector."""

    def __init__(self) -> None:
        self.x = np.zeros(20, np.float32)

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo("x", self.x.shape, "float32")]

    def read(self) -> list[np.ndarray]:
        return [self.x]

    def write(self, values: Any) -> None:
        self.x[...] = values[0]


@pytest.mark.parametrize("period", [3, 7])
def test_averaged_models_are_compared_as_soon_as_they_are_equal(period: int) -> None:
    """No due step need be one with an average."""
    hub, guards = Hub(2), [Guard(every=100), Guard(every=100)]

    def run(rank: int) -> int:
        link = Threaded(hub, rank, NUMPY.xp)
        averager = ModelAverager(LocalSGD(period), OneModel(), lambda _: link, guards[rank])
        averager._name = "same"
        averager.prepare()
        for step in range(1, 50):
            try:
                averager.average(0.1 * (1 + rank))  # rates differ between the ranks
            except ReplicasDiffer:
                return step
        return 0

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [period, period]


@pytest.mark.parametrize("framework", parameters())
def test_checksum_sees_one_bit(framework: Framework) -> None:
    x = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    base = int(framework.array(framework.xp.checksum(framework.tensor(x))))
    assert base == int(NUMPY.xp.checksum(x))
    for place in [(0, 0), (29, 39), (7, 3)]:
        y = x.copy()
        y[place] = np.nextafter(y[place], np.float32(9))
        assert int(framework.array(framework.xp.checksum(framework.tensor(y)))) != base


def test_when_it_looks() -> None:
    guard = Guard(every=50)
    assert scheduled(guard, 150) == [1, 2, 10, 50, 100, 150]
    assert scheduled(Guard(every=7), 22) == [1, 2, 7, 10, 14, 21]
    assert scheduled(Guard("off", every=1), 20) == []


def scheduled(guard: Guard, last: int) -> list[float]:
    steps = [guard.next_after(0)]
    while steps[-1] <= last:
        steps.append(guard.next_after(int(steps[-1])))
    return steps[:-1]


@pytest.mark.parametrize(("mode", "every"), [("loud", 1), ("error", 0), ("error", 1.5)])
def test_wrong_arguments(mode: str, every: Any) -> None:
    with pytest.raises(ValueError, match="DistributedOptimizer: guard"):
        Guard(mode, every)


def test_it_waits_until_weights_are_alike() -> None:
    """A comparison that is due in a local step is made at the next synchronization."""
    rule = ZeroOneAdam(var_freeze_step=3, local_step_scaler=2, local_step_clipper=4)
    world, guard = simulate(rule, 2), Guard(every=5)
    looks, spans, seen, due = [], [], [], guard.next_after(0)
    rng = np.random.default_rng(0)
    for step in range(1, 41):
        gradients = [{"w": rng.normal(size=(40, 50))} for _ in range(2)]
        if step == 17:  # skipped, with weights apart
            gradients[1]["w"][:] = np.nan
        laws.step(world, NUMPY, gradients)
        found = {span(exchange.bucket_states, exchange.counted) for exchange in world.exchanges}
        assert len(found) == 1
        spans += found
        first, second = (mine["w"] for mine in laws.weights_of(world, gradients))
        seen.append(np.array_equal(first, second))
        if step >= due and found != {0}:
            looks.append(step)
            due = guard.next_after(step)
    assert [one > 0 for one in spans] == seen
    steps = scheduled(guard, 40)
    assert len(looks) == len(steps) and not seen[int(steps[3]) - 1]
    for look, step in zip(looks, steps, strict=True):
        assert look == next(n for n in range(step, 50) if seen[n - 1])


class Told(SimulatedCommunicator):
    """One of two ranks; the values of the other one are given."""

    def __init__(self, theirs: np.ndarray, rank: int = 0) -> None:
        super().__init__(Hub(2), rank, NUMPY.xp)
        self.theirs = theirs

    def run(self, name: str, generator: Any) -> Any:
        def serve(requests: Any) -> list[Any]:
            parts = [requests[0].tensor, self.theirs]
            return [tuple(parts if self.rank == 0 else parts[::-1])]

        return drive(generator, serve)


def test_modes(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = np.array([1, 2]), np.array([1, 3])
    Guard().compare(Told(ours.copy()), 1, ["a", "b"], ours)
    with pytest.raises(ReplicasDiffer, match="'b'"):
        Guard().compare(Told(theirs), 1, ["a", "b"], ours)
    (record,) = caplog.records
    assert "'b'" in record.getMessage() and record.levelname == "ERROR"
    calm = Guard("warn")
    with pytest.warns(RuntimeWarning, match="'b'") as told:
        for step in (1, 2, 10, 100):
            calm.compare(Told(theirs), step, ["a", "b"], ours)
    assert len(told) == 1 and "continues" in str(told[0].message)
    with pytest.raises(ReplicasDiffer):
        Guard().compare(Told(theirs, rank=1), 1, ["a", "b"], ours)
    assert len(caplog.records) == 1  # only rank 0 speaks


@pytest.mark.parametrize("framework", parameters())
def test_gather(framework: Framework) -> None:
    hub = Hub(3)
    communicators = [SimulatedCommunicator(hub, rank, framework.xp) for rank in range(3)]
    generators = [gather(c, framework.tensor(np.int64([c.rank, 7]))) for c in communicators]
    for parts in lockstep(communicators, generators):
        np.testing.assert_array_equal(np.stack(parts), [[0, 7], [1, 7], [2, 7]])


def test_different_set_ups_are_explained() -> None:
    text = "topk\nlayer.weight (3, 4)\nlayer.bias (3,)"
    other = text.replace("(3, 4)", "(3, 5)")
    message = explain_disagreement([text, text, other, text])
    assert "ranks [2]" in message
    assert "rank 0 has 'layer.weight (3, 4)' where rank 2 has 'layer.weight (3, 5)'" in message
    message = explain_disagreement([text, text + "\nmore (1,)"])
    assert "rank 0 has 'nothing' where rank 1 has 'more (1,)'" in message
    message = explain_disagreement([text + "\nmore (1,)", text])
    assert "rank 0 has 'more (1,)' where rank 1 has 'nothing'" in message


def test_plans_that_differ_raise_on_every_rank() -> None:
    """If ranks have different levels or tensors, all ranks raise an error before the step."""
    for ranks in (2, 4, 7, 100):
        hub, exchanges = Hub(ranks), []
        for rank in range(ranks):
            communicator = SimulatedCommunicator(hub, rank, NUMPY.xp)
            tensors = [TensorInfo("odd" if rank == 1 else "even", (40, 50), "float32")]
            exchanges.append(Exchange(communicator, as_policy(TopK(0.1)), tensors))
        for exchange in exchanges:
            exchange.open(0.1)
            exchange.start(0, np.ones((40, 50), np.float32))
        for exchange in exchanges:
            with pytest.raises(RuntimeError, match="disagree"):
                exchange.advance()


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 13, 15])
def test_equal_plans_pass_when_the_mean_is_rounded(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal plans are accepted although Horovod rounds the mean of their numbers in fp32."""

    def reduce(xp: Any, parts: list[np.ndarray], op: str) -> np.ndarray:
        return sum(parts[1:], parts[0]) * np.float32(1 / len(parts))

    monkeypatch.setattr(local, "reduce", reduce)
    for name in map(str, range(20)):  # each name gives another number of the plan
        hub = Hub(ranks)
        tensors = [TensorInfo(name, (40, 50), "float32")]
        exchanges = [
            Exchange(SimulatedCommunicator(hub, rank, NUMPY.xp), as_policy(PowerSGD(2)), tensors)
            for rank in range(ranks)
        ]
        for exchange in exchanges:
            exchange.open(0.1)
            exchange.start(0, np.ones((40, 50), np.float32))
        hub.advance_all([exchange.advance for exchange in exchanges])


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("ours", [TopK(0.1), as_policy("powersgd")], ids=repr)
def test_stock_horovod_is_told_what_to_write(framework: Framework, ours: Any) -> None:
    tensor = framework.tensor(np.ones(3, np.float32))
    wanted = "torch" if framework.name == "torch" else "tensorflow"
    for call in (lambda: ours.compress(tensor), lambda: ours.decompress(tensor, None)):
        with pytest.raises(TypeError) as refusal:
            call()
        assert f"import accordion_hvd.{wanted} as hvd" in str(refusal.value)
        assert repr(ours) in str(refusal.value)


def test_horovods_own_compression_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Horovod's own compression the guard only warns, since Horovod compares nothing."""
    none = type("NoneCompressor", (), {"__module__": "horovod.torch.compression"})
    other = type("Halves", (), {"compress": lambda x: (x, None), "decompress": lambda x, _: x})
    monkeypatch.delenv("ACCORDION_HVD_COMPRESSION", raising=False)
    assert [resolve(theirs).guard for theirs in (none, other, other())] == ["warn"] * 3
    for ours in (TopK, TopK(0.1), "fp16", as_policy("powersgd")):
        assert resolve(ours).guard == "error"
    monkeypatch.setenv("ACCORDION_HVD_COMPRESSION", "topk")
    assert (resolve(none).guard, resolve(other).guard) == ("error", "warn")


def test_the_environment_says_what_a_script_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Guard().mode, Guard().every) == ("error", 100)
    assert Guard(default="warn").mode == "warn" and Guard("off", default="warn").mode == "off"
    monkeypatch.setenv("ACCORDION_HVD_GUARD", "error")
    assert Guard(default="warn").mode == "error"
    monkeypatch.setenv("ACCORDION_HVD_GUARD", "warn")
    monkeypatch.setenv("ACCORDION_HVD_GUARD_EVERY", "7")
    assert (Guard().mode, Guard().every) == ("warn", 7)
    assert (Guard("off", 5).mode, Guard("off", 5).every) == ("off", 5)
    monkeypatch.setenv("ACCORDION_HVD_GUARD_EVERY", "often")
    with pytest.raises(ValueError, match="guard_every is 'often'"):
        Guard()
    monkeypatch.setenv("ACCORDION_HVD_GUARD", "loud")
    with pytest.raises(ValueError, match="guard is 'loud'"):
        Guard()
