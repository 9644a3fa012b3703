"""Tests of the averaging that all frameworks share, with NumPy and ranks in threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY
from threads import Threaded

from accordion_hvd import Accordion, Dense, Fixed, PowerSGD, TopK, simulate
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.engine import checkpoint, membership
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.gradient_averager import GradientAverager
from accordion_hvd.engine.guard import Guard, ReplicasDiffer
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub

SHAPES = {"w": (40, 50), "v": (30, 40), "b": (7,)}


class NumPyAverager(GradientAverager[Exchange]):
    """The smallest possible adapter."""

    framework = "NumPy"

    def __init__(self, link: Callable[[], Any], compression: Any, **options: Any) -> None:
        self.link = link
        self.weights = {name: np.ones(shape, "f") for name, shape in SHAPES.items()}
        alone = SimpleNamespace(process_set_id=0, included=lambda: True)
        super().__init__(as_policy(compression), alone, **options)

    def connect(self) -> Any:
        return self.link()

    def make_exchange(self, tensors: Sequence[TensorInfo]) -> Exchange:
        return Exchange(self.communicator, self.policy, tensors, skip=self.skip, name=self.name)

    def tensors(self) -> dict[Any, TensorInfo]:
        return {name: TensorInfo(name, w.shape, "float32") for name, w in self.weights.items()}

    def replicas(self) -> dict[str, Any]:
        return self.weights

    def step(self, grads: dict[str, np.ndarray], lr: float = 0.1) -> dict[str, np.ndarray]:
        means = dict(grads) if self.idle else self._average(grads, lr)
        for name, mean in means.items():
            self.weights[name] = self.weights[name] - lr * mean
        step = self.exchange.steps
        if step and self.comparison_due(step):
            self.compare(step, self.checksums())
        return means

    def _average(self, grads: dict[str, np.ndarray], lr: float) -> dict[str, np.ndarray]:
        if not self.agreed:
            self.agree()
        exchange = self.exchange
        exchange.begin(lr)
        for index, unit in enumerate(exchange.layout.batches):
            parts = [grads[self.keys[member]].copy() for member in unit.members]
            exchange.start(index, exchange.layout.batches[index].pack(parts))
        exchange.finish()
        return {
            self.keys[member]: mean
            for index, unit in enumerate(exchange.layout.batches)
            for member, mean in zip(
                unit.members, exchange.layout.batches[index].unpack(), strict=True
            )
        }


def averagers(hub: Hub, compression: Any, **options: Any) -> list[NumPyAverager]:
    """Return an averager per rank of `hub`, with equal names as in separate processes."""
    made = []
    for rank in range(hub.ranks):
        link = Threaded(hub, rank, NUMPY.xp)
        made.append(NumPyAverager(lambda link=link: link, compression, **options))
        made[-1].name = "same"
    return made


def on_all(ranks: Sequence[NumPyAverager], action: Callable[[NumPyAverager, int], Any]) -> list:
    """Return the results or exceptions of all ranks."""

    def attempt(rank: int) -> Any:
        try:
            return action(ranks[rank], rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attempt, range(len(ranks))))


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.normal(size=shape).astype("f") for name, shape in SHAPES.items()}


@pytest.mark.parametrize("compression", ["dense", "topk:0.1", "powersgd:2"])
def test_it_averages_as_the_simulation_does(compression: str) -> None:
    ranks, world = averagers(Hub(3), compression, guard=Guard(every=1)), simulate(compression, 3)
    for step in range(4):
        means = on_all(ranks, lambda one, rank, step=step: one.step(gradients(rank, step)))
        expected = world.step([gradients(rank, step) for rank in range(3)])
        for mine, theirs in zip(means, expected, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_ranks_that_are_set_up_differently_are_told_so() -> None:
    hub = Hub(2)
    ranks = [averagers(hub, "topk:0.1")[0], averagers(hub, "topk:0.2")[1]]
    found = on_all(ranks, lambda one, rank: one.step(gradients(rank, 0)))
    for error in found:
        assert isinstance(error, RanksDisagree)
        assert "TopK(ratio=0.1)" in str(error) and "rank 1" in str(error)


@pytest.mark.parametrize("other", [Guard("off"), Guard(every=3)])
def test_guards_that_differ_are_told_so(other: Guard) -> None:
    """Else, the ranks that compare would wait for those that do not."""
    ranks = averagers(Hub(2), "topk:0.1", guard=Guard(every=100))
    ranks[1].guard = other
    for error in on_all(ranks, lambda one, rank: one.step(gradients(rank, 0))):
        assert isinstance(error, RanksDisagree) and "guard_every=" in str(error)


def test_a_gate_begins_anew_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins has measured nothing, and all must try the same."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    own = copy.deepcopy  # each rank has a policy of its own
    monkeypatch.setitem(globals(), "as_policy", lambda x, make=as_policy: make(own(x)))
    ranks = averagers(Hub(2), Fixed(TopK(0.05), gate="auto"), guard=Guard())
    for step in range(5):
        on_all(ranks, lambda one, rank, step=step: one.step(gradients(rank, step)))
    ranks, _ = change(ranks, (0,), 1, Fixed(TopK(0.05), gate="auto"))
    for step in range(5, 8):
        means = on_all(ranks, lambda one, rank, step=step: one.step(gradients(rank, step)))
        assert all((means[0][name] == means[1][name]).all() for name in SHAPES), means


def test_replicas_that_differ_are_named() -> None:
    ranks = averagers(Hub(3), "dense", guard=Guard())
    ranks[2].weights["v"] = ranks[2].weights["v"] + 1
    found = on_all(ranks, lambda one, rank: one.step(gradients(rank, 0)))
    assert all(isinstance(e, ReplicasDiffer) and "'v'" in str(e) for e in found), found


def test_flags_of_any_rank() -> None:
    ranks = averagers(Hub(3), "dense")
    mine = [[True, False, False], [False, False, False], [True, False, True]]
    found = on_all(ranks, lambda one, rank: one.on_any_rank(mine[rank]))
    assert found == [[True, False, True]] * 3


def test_a_snapshot_goes_on_where_it_was() -> None:
    ranks = averagers(Hub(2), "topk:0.05")
    on_all(ranks, lambda one, rank: one.step(gradients(rank, 0)))
    saved = [checkpoint.snapshot(one.exchange) for one in ranks]
    others = averagers(Hub(2), "topk:0.05")
    for one, rows, other in zip(ranks, saved, others, strict=True):
        other.adopt(rows)
        other.weights = dict(one.weights)
    mine = on_all(ranks, lambda one, rank: one.step(gradients(rank, 1)))
    theirs = on_all(others, lambda one, rank: one.step(gradients(rank, 1)))
    for a, b in zip(mine, theirs, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(a[name], b[name])
    ranks[0].adopt(None)
    assert ranks[0].exchange.steps == 0 and not ranks[0].agreed


class Gathering:
    """Gathering of objects from ranks in threads."""

    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.rows[rank] = value
            self.barrier.wait()
            rows = list(self.rows)
            self.barrier.wait()
            return rows

        return gather


def residuals(ranks: Sequence[NumPyAverager]) -> np.ndarray:
    """Return the mean of all ranks' residuals as one vector."""
    parts = [membership.part(one.exchange, False).buckets for one in ranks]
    return np.mean([[_residual(saved) for saved in buckets] for buckets in parts], 0)


def _residual(saved: Any) -> np.ndarray:
    rows = [np.ravel(value) for value in saved.residuals()]
    return np.pad(np.sum(rows, 0) if rows else np.zeros(0), (0, 2000))[:2000]


def change(
    ranks: list[NumPyAverager],
    stay: Sequence[int],
    joined: int,
    compression: Any,
    joined_first: bool = False,
    total: bool = False,
) -> tuple[list[NumPyAverager], list[Any]]:
    """Continue with the ranks `stay` and `joined` new ones; return these ranks and their groups."""
    old = [ranks[rank] for rank in stay]
    size = len(old) + joined
    hub = Hub(size)
    fresh = averagers(Hub(size), compression, guard=Guard(), total=total)[:joined]
    new = fresh + old if joined_first else old + fresh
    gathering = Gathering(size)
    for rank, one in enumerate(new):
        one.link = lambda rank=rank: Threaded(hub, rank, NUMPY.xp)
        if one in old:
            one.ranks_changed()
        else:  # Horovod broadcasts the weights
            one.communicator, one.weights = one.connect(), dict(old[0].weights)
    leader = new.index(old[0])
    groups = on_all(new, lambda one, rank: one.regroup(gathering.of(rank), leader))
    return new, groups


@pytest.mark.parametrize(
    "compression", ["dense", "topk:0.05", "powersgd:2", "dgc:0.1", "scalecom:0.05", "onebit"]
)
@pytest.mark.parametrize("joined_first", [False, True])
@pytest.mark.parametrize(
    "stay, joined", [((0, 1, 2), 2), ((1, 2), 0), ((2, 0), 2), ((1,), 0), ((2, 0, 1), 0)]
)
@pytest.mark.parametrize("total", [False, True])
def test_what_is_owed_outlives_changes_of_ranks(
    total: bool,
    compression: str,
    stay: tuple[int, ...],
    joined: int,
    joined_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean residual is owed to means, and the sum of all residuals to sums."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    ranks = averagers(Hub(3), compression, guard=Guard(), total=total)
    for step in range(3):
        on_all(ranks, lambda one, rank, step=step: one.step(gradients(rank, step)))
    before = residuals(ranks)
    if len(stay) < 3:
        gathering = Gathering(3)
        on_all(ranks, lambda one, rank: one.hand_over(gathering.of(rank)))
        np.testing.assert_allclose(residuals(ranks), before, rtol=1e-5, atol=1e-5)
    ranks, groups = change(ranks, stay, joined, compression, joined_first, total)
    assert all(group.lost == [] for group in groups), groups
    owed = before * (3 / len(ranks) if total else 1)
    np.testing.assert_allclose(residuals(ranks), owed, rtol=1e-5, atol=1e-5)
    means = on_all(ranks, lambda one, rank: one.step(gradients(rank, 3)))
    assert {one.exchange.steps for one in ranks} == {4}
    for mean in means:
        assert all((mean[name] == means[0][name]).all() for name in SHAPES)


def test_a_rank_that_dies_loses_its_last_commit_only() -> None:
    ranks = averagers(Hub(3), "topk:0.05", guard=Guard())
    on_all(ranks, lambda one, rank: one.step(gradients(rank, 0)))
    for one in ranks:
        one.commit()
    kept, norm = residuals([ranks[0], ranks[2]]) * 2 / 3, ranks[1].committed_norm()
    assert norm == pytest.approx(float(np.linalg.norm(residuals([ranks[1]]))), rel=1e-5)
    on_all(ranks, lambda one, rank: one.step(gradients(rank, 1)))
    for one in (ranks[0], ranks[2]):
        one.roll_back()
        assert one.exchange.steps == 1
    ranks, groups = change(ranks, (0, 2), 1, "topk:0.05")
    assert all(group.lost == [1] and group.joined == 1 for group in groups)
    np.testing.assert_allclose(residuals(ranks), kept, rtol=1e-5, atol=1e-5)


def test_a_failure_before_the_first_commit_returns_to_the_start() -> None:
    (one,) = averagers(Hub(1), "dgc:0.1")
    one.step(gradients(0, 0))
    one.roll_back()
    assert one.exchange.steps == 0 and not one.agreed


def test_comparisons_of_replicas_fall_on_the_same_steps_after_a_change() -> None:
    """Ranks that join compare replicas in the same steps as the others, so none waits."""
    ranks = averagers(Hub(2), Dense(), guard=Guard())
    for step in range(4):
        on_all(ranks, lambda one, rank, step=step: one.step(gradients(rank, step)))
    ranks, _ = change(ranks, (0, 1), 1, Dense())
    due = [one.comparison_due(step) for one in ranks for step in (5,)]
    assert len(set(due)) == 1
    means = on_all(ranks, lambda one, rank: one.step(gradients(rank, 4)))
    for name in SHAPES:
        expected = np.mean([gradients(rank, 4)[name] for rank in range(3)], 0)
        np.testing.assert_allclose(means[2][name], expected, rtol=1e-5, atol=1e-6)


def test_a_rank_alone_is_idle_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    (alone,) = averagers(Hub(1), TopK(0.1))
    assert alone.idle
    given = gradients(0, 0)
    assert all((alone.step(given)[name] == given[name]).all() for name in SHAPES)
    for needed in (
        averagers(Hub(1), "dgc:0.1"),
        averagers(Hub(1), Accordion(batch_size=(2, 4), window=5)),
        averagers(Hub(1), PowerSGD(2), with_settings=True),
    ):
        assert not needed[0].idle
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert not alone.idle


def test_sparse_tensors_leave_the_exchange_before_the_first_step_only() -> None:
    (one,) = averagers(Hub(1), "dgc:0.1")
    assert len(one.exchange.tensors) == 3
    one.expect_sparse(["v"])
    assert [tensor.name for tensor in one.exchange.tensors] == ["w", "b"]
    one.step({name: grad for name, grad in gradients(0, 0).items() if name != "v"})
    with pytest.raises(RuntimeError, match="sparse_as_dense=True"):
        one.expect_sparse([])
