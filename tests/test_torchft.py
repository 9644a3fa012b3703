"""Tests of torchft: replicas join, leave and die, and steps that do not commit change nothing."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import launch_job

from accordion_hvd import TopK, TwoLevel
from accordion_hvd.engine import checkpoint
from accordion_hvd.torch.torchft import average

LIMIT = 150
SPECS = ["topk:0.1", "powersgd:2"]

numbers = itertools.count(1)


class Manager:
    """Stand-in for a torchft Manager, without a lighthouse; `connect` sets its quorum.

    Attributes:
        refuses: whether steps do not commit.
        heals: whether this replica does not take part, as it waits for its weights.
    """

    _pg: Any = None
    _quorum_id = -1
    refuses = heals = False
    participants = 0
    error: Any = None

    def start_quorum(self) -> None:
        self.error = None

    def wait_quorum(self) -> None:
        assert self._quorum_id >= 0

    def errored(self) -> Any:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def is_participating(self) -> bool:
        return not self.heals

    def num_participants(self) -> int:
        return self.participants

    def should_commit(self) -> bool:
        return self.error is None and not self.refuses


class Replica:
    """A model, its manager and its averager.

    Attributes:
        unused: whether the loss does without the first layer.
    """

    unused = False

    def __init__(self, compression: str, frozen: bool = False, optimizer: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 4)
        )
        self.model[0].requires_grad_(not frozen)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.manager = Manager()
        known: Any = {"optimizer": self.optimizer} if optimizer else {"lr": lambda: 0.1}
        self.averager = average(self.manager, self.model, compression, **known)

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
        if self.unused:
            return self.model[2](x.repeat(1, 2)[:, :50]).square().mean()
        return (self.model(x) - x[:, :4]).square().mean()

    def step(self, seed: int) -> None:
        self.averager.start_quorum()
        self.optimizer.zero_grad()
        self.loss(seed).backward()
        if self.averager.should_commit():
            self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return copies of the policy's state and the compressors' tensors."""
        exchange = self.averager.exchange
        tensors = checkpoint.named(checkpoint.saved_of(exchange))
        return checkpoint.describe(exchange), {key: x.copy() for key, x in tensors.items()}


def at_once(actions: Sequence[Callable[[], Any]]) -> None:
    """Run actions that wait for each other, in threads."""
    errors: list[BaseException] = []

    def run(action: Callable[[], Any]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def connect(replicas: Sequence[Replica], seconds: float = 30) -> None:
    """Make these replicas, in this order, the members of a new quorum."""
    number, store = next(numbers), dist.HashStore()
    limit = datetime.timedelta(seconds=seconds)

    def join(rank: int, manager: Manager) -> None:
        group = dist.ProcessGroup(store, rank, len(replicas))
        kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        gloo = dist.ProcessGroupGloo(store, rank, len(replicas), limit)
        group._register_backend(torch.device("cpu"), kind, gloo)
        manager._pg, manager._quorum_id = group, number
        manager.participants = len(replicas)

    pairs = enumerate(replica.manager for replica in replicas)
    at_once([lambda i=i, manager=manager: join(i, manager) for i, manager in pairs])


def train(replicas: Sequence[Replica], steps: int = 1, seed: int = 0) -> None:
    for step in range(steps):
        seeds = [seed + 10 * step + i for i in range(len(replicas))]
        pairs = zip(replicas, seeds, strict=True)
        at_once([lambda replica=replica, s=s: replica.step(s) for replica, s in pairs])


def owed(replicas: Sequence[Replica]) -> np.ndarray:
    """Return the mean of all replicas' residuals as one vector."""
    rows = []
    for replica in replicas:
        saved = checkpoint.saved_of(replica.averager.exchange)
        rows.append(np.concatenate([np.ravel(x) for state in saved for x in state.residuals()]))
    return np.mean(rows, 0)


def assert_equal(replicas: Sequence[Replica]) -> None:
    """Check that the replicas have equal weights and policies."""
    first = replicas[0]
    for replica in replicas[1:]:
        assert torch.equal(replica.weights(), first.weights())
        assert replica.state()[0] == first.state()[0]


def group_of(compression: str, size: int = 2, steps: int = 3) -> list[Replica]:
    replicas = [Replica(compression) for _ in range(size)]
    connect(replicas)
    train(replicas, steps)
    return replicas


@pytest.mark.parametrize("compression", [*SPECS, "accordion(topk(0.2),topk(0.05),window=4)"])
def test_a_step_without_a_commit_leaves_nothing_behind(compression: str) -> None:
    replicas = group_of(compression)
    before, weights = [replica.state() for replica in replicas], replicas[0].weights()
    for replica in replicas:
        replica.manager.refuses = True
    train(replicas, seed=500)
    assert torch.equal(replicas[0].weights(), weights)
    for replica, (about, tensors) in zip(replicas, before, strict=True):
        now, found = replica.state()
        assert now == about and found.keys() == tensors.keys()
        assert all(np.array_equal(found[key], value) for key, value in tensors.items())
        replica.manager.refuses = False
    connect(replicas)  # as the lighthouse does when a replica has not committed
    train(replicas)
    assert_equal(replicas)
    assert np.linalg.norm(owed(replicas)) > 0


def test_the_first_step_may_fail() -> None:
    replicas = [Replica("topk:0.1") for _ in range(2)]
    for replica in replicas:
        replica.manager.refuses = True
    connect(replicas)
    train(replicas)
    assert all(replica.averager.exchange.steps == 0 for replica in replicas)
    for replica in replicas:
        replica.manager.refuses = False
    connect(replicas)
    train(replicas)
    assert_equal(replicas)


@pytest.mark.parametrize("compression", SPECS)
def test_a_replica_that_joins_takes_over_policy_and_a_share(
    compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = group_of(compression)
    new = Replica(compression)
    new.model.load_state_dict(replicas[0].model.state_dict())  # as the manager does
    replicas = [new, *replicas]  # the first replica of the quorum has no state
    connect(replicas)
    train(replicas)
    assert_equal(replicas)
    assert new.averager.exchange.steps == 4
    norms = [np.linalg.norm(owed([replica])) for replica in replicas]
    assert min(norms) > 0.2 * max(norms) and "handover" not in caplog.text


@pytest.mark.parametrize("compression", SPECS)
def test_an_orderly_change_keeps_the_mean_residual(
    compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = group_of(compression, 3)
    before = owed(replicas)
    at_once([replica.averager.hand_over for replica in replicas])
    np.testing.assert_allclose(owed(replicas), before, atol=1e-5)
    del replicas[1]
    connect(replicas)
    for replica in replicas:
        replica.manager.refuses = True
    train(replicas)  # a step that fails does not forget the handover
    for replica in replicas:
        replica.manager.refuses = False
        replica.averager._reducer._begun = True
    connect(replicas)
    at_once([replica.averager._reducer._join for replica in replicas])
    np.testing.assert_allclose(owed(replicas), before, atol=1e-5)
    assert "handover" not in caplog.text


@pytest.mark.parametrize("compression", SPECS)
def test_a_replica_that_dies_in_an_exchange(
    compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = group_of(compression, 3, steps=0)
    connect(replicas, seconds=1)
    train(replicas, 3)
    dead = replicas.pop()
    before = owed(replicas)
    train(replicas)
    assert all("a rank has ended" in str(replica.manager.error) for replica in replicas)
    np.testing.assert_array_equal(owed(replicas), before)
    connect(replicas)
    train(replicas)
    assert_equal(replicas)
    text = caplog.text
    assert text.count("replicas [2] of 3 ended without a handover") == 1, text
    assert dead.averager.exchange.steps == 3


def test_a_replica_that_misses_a_commit_counts_as_new(caplog: pytest.LogCaptureFixture) -> None:
    replicas = group_of("topk:0.1")
    replicas[0].manager.refuses = True
    train(replicas)
    replicas[0].manager.refuses = False
    replicas[0].model.load_state_dict(replicas[1].model.state_dict())  # as the manager does
    connect(replicas)
    train(replicas)
    assert_equal(replicas)
    assert "replicas [0] of 2" in caplog.text


def test_a_healing_replica_sends_zeros() -> None:
    one, two = replicas = [Replica("dense") for _ in range(2)]
    connect(replicas)
    two.manager.heals = True
    one.manager.participants = two.manager.participants = 1
    train(replicas)
    alone = Replica("dense")
    connect([alone])
    alone.step(0)
    torch.testing.assert_close(one.weights(), alone.weights())
    assert_equal(replicas)


def test_a_checkpoint_keeps_the_residuals() -> None:
    replicas = group_of("topk:0.1")
    before = owed(replicas)
    again = [Replica("topk:0.1") for _ in range(2)]
    for new, old in zip(again, replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
        new.averager.load_state_dict(old.averager.state_dict())
    np.testing.assert_array_equal(owed(again), before)
    for group in (replicas, again):
        connect(group)
        train(group, seed=300)
    np.testing.assert_array_equal(owed(again), owed(replicas))
    assert torch.equal(again[1].weights(), replicas[0].weights())


def test_a_refused_state_changes_nothing() -> None:
    replicas = group_of("topk:0.1")
    averager, before = replicas[0].averager, owed(replicas)
    saved, link = averager.state_dict()["exchange"], averager._reducer.communicator
    other = {**saved["about"], "compression": "another"}
    wrongs = [{k: x for k, x in saved.items() if k != key} for key in ("rank", "about", "tensors")]
    for wrong in (*wrongs, {**saved, "about": other}, {**saved, "tensors": {}}):
        with pytest.raises(ValueError, match="state|when saved"):
            averager.load_state_dict({"exchange": wrong})
        assert averager._reducer.communicator is averager.exchange.communicator is link
        np.testing.assert_array_equal(owed(replicas), before)
    with pytest.raises(ValueError, match="state_dict has no 'exchange'"):
        averager.load_state_dict({})
    train(replicas)
    assert_equal(replicas)


def test_the_end_of_a_window_outlives_a_failed_step() -> None:
    replicas = group_of("accordion(topk(0.2),topk(0.05))")
    for replica in replicas:
        replica.averager.end_window()
        replica.manager.refuses = True
    before = replicas[0].averager.policy.state_dict()
    train(replicas)
    assert replicas[0].averager.policy.state_dict() == before


def test_unfrozen_layers_take_part() -> None:
    replicas = [Replica("topk:0.3", frozen=True) for _ in range(2)]
    connect(replicas)
    train(replicas, 3)
    before = replicas[0].model[0].weight.detach().clone()
    for replica in replicas:
        replica.model[0].requires_grad_(True)
    train(replicas, 3, seed=3)
    assert torch.equal(replicas[0].weights(), replicas[1].weights())
    assert not torch.equal(before, replicas[0].model[0].weight)


def test_gradients_in_a_flat_buffer_stay_there() -> None:
    replicas, plain = [Replica("dense") for _ in range(2)], [Replica("dense") for _ in range(2)]
    flats = []
    for replica in replicas:
        parameters = [*replica.model.parameters()]
        sizes = [p.numel() for p in parameters]
        flats.append(torch.zeros(sum(sizes)))
        for p, part in zip(parameters, flats[-1].split(sizes), strict=True):
            p.grad = part.view_as(p)
        replica.optimizer.zero_grad = flats[-1].zero_  # type: ignore[method-assign]
    for group in (replicas, plain):
        connect(group)
        train(group, 3)
    assert torch.equal(replicas[0].weights(), plain[0].weights())
    for replica, flat in zip(replicas, flats, strict=True):
        places = {p.grad.untyped_storage().data_ptr() for p in replica.model.parameters()}
        assert places == {flat.untyped_storage().data_ptr()}


def test_what_is_owed_to_a_layer_outlives_steps_without_it() -> None:
    """The gradient of a layer that no replica has used stays None, and its residual as it is."""
    replicas = group_of("topk:0.1")
    before = [replica.state()[1] for replica in replicas]
    for replica in replicas:
        replica.unused = True
    train(replicas)
    for replica, was in zip(replicas, before, strict=True):
        assert replica.model[0].weight.grad is None
        found = replica.state()[1]
        changed = {key for key, x in found.items() if not np.array_equal(x, was[key])}
        names = [entry.bucket.name for entry in replica.averager.exchange.bucket_states]
        assert not any(key.startswith(f"{names.index('0.weight')}/") for key in changed), changed
        replica.unused = False
    train(replicas)
    assert_equal(replicas)


@pytest.mark.parametrize("what", ["learning rates", "2.bias"])
def test_replicas_that_differ_are_reported(what: str) -> None:
    """As soon as none of them heals, whose weights are old."""
    replicas = [Replica("topk:0.1", optimizer=True) for _ in range(2)]
    if what == "learning rates":
        replicas[1].optimizer.param_groups[0]["lr"] = 0.2
    else:
        replicas[1].model[2].bias.data += 1.0
    connect(replicas)
    replicas[1].manager.heals = True
    train(replicas)
    replicas[1].manager.heals = False
    with pytest.raises(AssertionError, match=f"ReplicasDiffer.*{what}"):
        train(replicas)


def test_what_a_hook_cannot_serve_is_refused() -> None:
    replicas = [Replica("topk:0.1") for _ in range(2)]
    connect(replicas)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    at_once([lambda r=r: scaler.scale(r.loss(0)).backward() for r in replicas])
    for replica in replicas:
        with pytest.raises(ValueError, match="torchft.average: grad_scaler is None"):
            scaler.step(replica.optimizer)
    with pytest.raises(AssertionError, match="pass passes="):
        at_once([lambda r=r: r.loss(0).backward() for r in replicas])


def test_bad_input_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="manager is a int, but must be a torchft.Manager"):
        average(3, model, TopK(0.1))
    with pytest.raises(ValueError, match="does not need to know hosts"):
        average(Manager(), model, TwoLevel(TopK(0.1)))
    replica = Replica("topk:0.1")
    connect([replica])
    replica.model(torch.randn(1, 40)).sum().backward()
    assert replica.manager.should_commit()
    with pytest.raises(RuntimeError, match="call should_commit.. of the averager"):
        replica.model(torch.randn(1, 40)).sum().backward()


@pytest.mark.launch
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize(
    "compression",
    [SPECS[0], *(pytest.param(spec, marks=pytest.mark.nightly) for spec in SPECS[1:])],
)
def test_a_replica_is_killed_and_heals(compression: str) -> None:
    """A replica that is killed heals and trains on; afterwards, another one leaves in order."""
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed")
    report, told = launch_job("torchft_job.py", [compression], LIMIT)
    found = f"status {report.status} after {report.seconds:.0f} s; told: {told}\n{report.output}"
    assert report.status == 0, found
    assert sorted((row["number"], row["life"]) for row in told) == [(0, 1), (1, 2), (2, 1)], found
    survivor, healed, left = sorted(told, key=lambda row: row["number"])
    for key in ("step", "steps", "levels", "weights"):
        assert survivor[key] == healed[key], found
    assert survivor["step"] == survivor["steps"] > left["step"] == left["steps"], found
    assert survivor["restored"] and all(ok for row in told for ok in row["restored"]), found
    for row in (survivor, left):
        assert sum(row["losses"][-5:]) < sum(row["losses"][:5]) / 2, found
    assert "replicas [1] of 3 ended without a handover" in report.output, found
    assert survivor["paused"] < 60, found
