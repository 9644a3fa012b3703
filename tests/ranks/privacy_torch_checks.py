"""Tests of private training in PyTorch on real ranks: the noise and the budget."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from harness import refused

import accordion_hvd.torch as hvd
from accordion_hvd import Allreduce, BudgetSpent, PrivacyBudget, TopAgg
from accordion_hvd.comm.horovod.torch import HorovodCommunicator
from accordion_hvd.privacy import PoissonSampler
from accordion_hvd.privacy.ballot import Ballot
from accordion_hvd.privacy.torch import backward

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
torch.set_num_threads(1)
INIT = hvd.init
DELTA = 1e-5


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))


def wrapped(model: torch.nn.Module, method: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=method,
        **options,
    )


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
    x = torch.randn(30, 20, generator=generator)
    return x, torch.randint(0, 5, (30,), generator=generator)


def step(model: torch.nn.Module, optimizer: Any, seed: int = 0) -> None:
    x, y = data(seed)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allgather(tensor.detach().reshape(1, -1).clone(), name="check.everywhere")


@contextmanager
def shared_folder() -> Iterator[Path]:
    name = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    folder = Path(hvd.broadcast_object(name, 0, name="check.folder"))
    yield folder
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


# -------------------------------------------------------------------------------------------- wires
def check_small_integers_are_added() -> None:
    """Small integers, which Horovod refuses to add for PyTorch, are added; sums wrap around."""
    link = HorovodCommunicator()
    for kind in (np.int8, np.uint8, np.int16):
        top = np.iinfo(kind)
        parts = [
            np.random.default_rng([r, top.bits]).integers(top.min, top.max + 1, 37).astype(kind)
            for r in range(link.size)
        ]

        def generator(mine: torch.Tensor) -> Any:
            return (yield Allreduce(mine, op="sum"))

        found = link.run("check.small", generator(torch.from_numpy(parts[link.rank])))
        np.testing.assert_array_equal(found.numpy(), sum(parts[1:], parts[0]))


# -------------------------------------------------------------------------------------------- noise
def check_noise_is_added_once_to_everything() -> None:
    """The average has the noise of one draw per element, with one rank as with several.

    The noise is equal on all ranks and independent between steps.
    """
    model = network()
    optimizer = wrapped(model, TopAgg(1, None, 60.0))
    seen = []
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.synchronize()
        seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]) * hvd.size())
        with optimizer.skip_synchronize():
            optimizer.step()
    noise = torch.stack(seen)
    rows = everywhere(noise)
    assert (rows == rows[0]).all(), "ranks got other noise"
    assert (noise == noise.round()).all()
    deviation, count = float(noise.std()), noise.numel()
    assert abs(deviation / 60 - 1) < 5 / (2 * count) ** 0.5, deviation
    small = noise[:, -5:]  # the last biases
    assert (small != 0).float().mean() > 0.8
    near = np.corrcoef(noise.numpy())[np.triu_indices(4, 1)]
    assert np.abs(near).max() < 5 / noise.shape[1] ** 0.5, "noise repeats itself"


def check_seeds_do_not_repeat_the_noise() -> None:
    found = []
    for _ in range(2):
        np.random.seed(3)
        model = network(3)
        optimizer = wrapped(model, TopAgg(20, None, 30.0, 0.5))
        for number in range(3):
            step(model, optimizer, number)
        rows = everywhere(weights(model))
        assert torch.isfinite(rows).all() and (rows == rows[0]).all()
        found.append(weights(model))
    assert (found[0] != found[1]).float().mean() > 0.3


def check_a_bad_gradient_is_nobodys_business() -> None:
    """A NaN gradient on one rank raises no error, skips no step and leaves finite weights."""
    model = network()
    optimizer = wrapped(model, TopAgg(20, None, 30.0))
    x, y = data()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    (loss * (float("nan") if hvd.rank() == hvd.size() - 1 else 1.0)).backward()
    optimizer.step()
    assert torch.isfinite(weights(model)).all()
    assert optimizer.exchange.skipped == 0 and optimizer.exchange.steps == 1


# ------------------------------------------------------------------------------------------- budget
def check_training_stops_and_resumes() -> None:
    with shared_folder() as folder:
        method = TopAgg(20, None, 150.0, budget=PrivacyBudget(1.0, DELTA))
        room = method.budget.left(method.mechanism)
        assert room > 6
        model = network()
        optimizer = wrapped(model, method)
        for number in range(room - 2):
            step(model, optimizer, number)
        hvd.save_state(folder, only=[optimizer])
        spent = optimizer.exchange.stats()["privacy"]
        assert spent["releases"] == room - 2 and 0 < spent["epsilon"] <= 1

        again = TopAgg(20, None, 150.0, budget=PrivacyBudget(1.0, DELTA))
        resumed = wrapped(model, again)
        hvd.load_state(folder, only=[resumed])
        assert resumed.exchange.stats()["privacy"] == spent
        for number in range(2):
            assert resumed.exchange.policy.affords()
            step(model, resumed, number)
        before = weights(model)
        assert not resumed.exchange.policy.affords()
        with refused(BudgetSpent, "would exceed it", f"after {room}"):
            step(model, resumed)
        assert (weights(model) == before).all(), "the model is that of the last release"
        assert resumed.exchange.stats()["privacy"]["epsilon"] <= 1
        rows = everywhere(before)
        assert (rows == rows[0]).all()


# ----------------------------------------------------------------------------------------- examples
def check_examples_vote() -> None:
    """A model learns from lots whose sizes differ between ranks, one of which is empty."""
    size, rate = 600, 0.2
    sampler = PoissonSampler(size, rate, hvd.rank(), hvd.size())
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 20, generator=generator)
    y = x[:, :5].argmax(1)
    budget = PrivacyBudget(math.inf, DELTA)  # only counts
    options = {"contributors": sampler.expected, "rate": rate, "budget": budget}
    method = TopAgg(100, None, 5.0, unit="example", **options)
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.02),
        named_parameters=model.named_parameters(),
        compression=method,
    )
    loss = torch.nn.functional.cross_entropy
    for number in range(40):
        lot = sampler.draw() if (number, hvd.rank()) != (0, 0) else np.zeros(0, np.int64)
        optimizer.zero_grad()
        backward(model, loss, x[lot], y[lot])
        optimizer.step()
        assert all(p.grad_sample is None for p in model.parameters())
    rows = everywhere(weights(model))
    assert (rows == rows[0]).all()
    assert (model(x).argmax(1) == y).float().mean() > 0.4  # chance: 0.2
    assert optimizer.exchange.stats()["privacy"]["releases"] == 40
    with refused(ValueError, "grad_sample", "there are none"):
        step(model, optimizer)


# ------------------------------------------------------------------------------------------ ballots
def check_teachers_vote() -> None:
    """The votes of teachers spread unevenly over the ranks are averaged over all teachers."""
    total, link = 9, HorovodCommunicator()
    signs = np.sign(np.random.default_rng(6).standard_normal((total, 3, 50))).astype(np.float32)
    mine = signs[: 9 - 2 * (hvd.size() - 1)] if hvd.rank() == 0 else _two(signs)
    method = TopAgg(10, 1e-9, 0.0, unit="teacher", contributors=total, unprotected=True)
    votes = Ballot(method, link, "check.ballot").vote(torch.from_numpy(mine))
    rows = everywhere(votes)
    assert (rows == rows[0]).all()
    wanted = np.zeros((3, 50))
    for teacher in signs:
        wanted[:, :10] += teacher[:, :10]  # all alike: the first of equal magnitudes
    np.testing.assert_allclose(votes.numpy(), wanted / total, rtol=1e-6)


def _two(signs: np.ndarray) -> np.ndarray:
    end = len(signs) - 2 * (hvd.size() - 1 - hvd.rank())
    return signs[end - 2 : end]


# ----------------------------------------------------------------------------------------- refusals
def check_refusals() -> None:
    method = TopAgg(20, None, 30.0)
    if hvd.size() > 1:
        some = hvd.add_process_set([0])
        with refused(ValueError, "must serve all", "process set has 1"):
            wrapped(network(), method, process_set=some)
        hvd.remove_process_set(some)
    model = network()
    with refused(ValueError, "skip is ('*bias',)", "unprotected"):
        step(model, wrapped(model, method, skip=["*bias"]))
    examples = TopAgg(20, None, 30.0, unit="example", contributors=30)
    with refused(ValueError, "backward_passes_per_step is 2, but must be 1"):
        wrapped(model, examples, backward_passes_per_step=2)
    with refused(ValueError, "k is 100000, but must be an integer from 1 to"):
        step(model, wrapped(model, TopAgg(100_000, None, 30.0)))
    mixed = network()
    mixed[2].double()
    optimizer = wrapped(mixed, method)
    with refused(ValueError, "takes the entire model as one vector, but the parameters form 2"):
        for parameter in mixed.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    hvd.barrier()


def check_layers_that_come_later_are_refused() -> None:
    model = network()
    model[2].requires_grad_(False)
    optimizer = wrapped(model, TopAgg(20, None, 30.0))
    step(model, optimizer)
    model[2].requires_grad_(True)
    with refused(ValueError, "exist from the first step"):
        step(model, optimizer)


def check_sparse_gradients_are_not_gathered_beside() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(30, 8, sparse=True)
    optimizer = wrapped(table, TopAgg(5, None, 20.0))
    table(torch.tensor([1, 2, 3 + hvd.rank()])).sum().backward()
    optimizer.step()
    assert (table.weight.grad.to_dense() != 0).float().mean() > 0.9, "noise on all coordinates"
    rows = everywhere(table.weight)
    assert (rows == rows[0]).all()


if __name__ == "__main__":
    harness.main(globals())
