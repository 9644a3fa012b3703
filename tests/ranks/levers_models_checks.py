"""Tests of Accordion with `high=WAGMA(...)`, which averages gradients or models, in PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch
from harness import raises
from models_oracle import LR, MOMENTUM, PERIOD, SYNCHRONOUS, Oracle, centre, policy, rate

import accordion_hvd.torch as hvd
from accordion_hvd import DPSGD, WAGMA, Accordion, Dense, DiLoCo, LocalSGD, TopK
from accordion_hvd.policies.accordion import MODEL

INIT = hvd.init


class Model(torch.nn.Module):
    """A model of a matrix and a small vector, with a buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(40, 29, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
        self.register_buffer("seen", torch.full((1,), float(hvd.rank())))

    def flat(self) -> torch.Tensor:
        return torch.cat([self.w.reshape(-1), self.b])


def wrapped(model: Model, chosen: Accordion, make: Callable[..., Any] = torch.optim.SGD) -> Any:
    more = {"momentum": MOMENTUM} if make is torch.optim.SGD else {}
    inner = make(model.parameters(), lr=LR, **more)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), compression=chosen)


def take(model: Model, optimizer: Any, step: int, micro: int = 1) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for part in range(micro):
        optimizer.zero_grad()
        pull = torch.tensor(centre(hvd.rank(), step * micro + part))
        (0.5 * (model.flat() - pull).square().sum()).backward()
        optimizer.step()


def rows_of(x: torch.Tensor) -> np.ndarray:
    """Return all ranks' tensors as rows."""
    return hvd.allgather(x.detach().reshape(1, -1).clone(), name="check.rows").numpy()


def check_real_ranks_do_what_the_oracle_does() -> None:
    """The oracle predicts all models, all decisions, and the steps with equal replicas."""
    model, oracle = Model(), Oracle(hvd.size())
    optimizer = wrapped(model, policy())
    for step in range(60):
        due = oracle.take(step)
        take(model, optimizer, step)
        np.testing.assert_allclose(model.flat().detach().numpy(), due[hvd.rank()], atol=1e-12)
        rows = rows_of(model.flat())
        assert (rows == rows[0]).all() == (not oracle.averaging_models or oracle.settled), step
    history = [row for row in optimizer.exchange.policy.history if row["name"] == MODEL]
    assert [bool(row["level"]) for row in history] == [apart for _, apart in oracle.decisions]
    assert oracle.came_back()
    assert {row["compressor"] for row in history} == {repr(Dense()), repr(SYNCHRONOUS)}
    stats = optimizer.averaging.stats()
    assert stats["sent"] > 0 and optimizer.exchange.steps + stats["steps"] == 60


def check_slots_are_averaged_once_and_counts_are_not() -> None:
    """Moments are averaged once when gradients are averaged again; step counts are kept."""
    model = Model()
    optimizer = wrapped(model, policy(), torch.optim.Adam)
    alike = []
    for step in range(48):
        before = optimizer.exchange.policy.alternation.averaging_models
        own = {k: v.clone() for k, v in optimizer.state.get(model.w, {}).items()}
        take(model, optimizer, step)
        now = optimizer.state[model.w]
        rows = rows_of(now["exp_avg"])
        alike.append((rows == rows[0]).all())
        assert float(now["step"]) == step + 1
        apart = optimizer.exchange.policy.alternation.averaging_models
        assert alike[-1] == (not apart), step
        if before and not apart:
            gradient = now["exp_avg"] - 0.9 * torch.tensor(rows_of(own["exp_avg"]).mean(0)).view(
                40, 29
            )
            rows = rows_of(gradient)  # the rest is the averaged gradient
            assert np.abs(rows - rows[0]).max() < 1e-14
        elif own and not apart:
            rows_of(own["exp_avg"]), rows_of(own["exp_avg"])  # as many collectives as above
    assert len(set(alike)) == 2  # both models and gradients were averaged


def check_other_methods_and_levels() -> None:
    """Models are equal at each decision, even with a method that never makes them equal itself."""
    for high in (LocalSGD(PERIOD), DPSGD("ring"), DiLoCo(PERIOD)):
        model = Model()
        optimizer = wrapped(model, policy(high, low=TopK(0.1)))
        for step in range(45):
            was = optimizer.exchange.policy.alternation.averaging_models
            take(model, optimizer, step)
            now = optimizer.exchange.policy
            rows = rows_of(model.flat())
            equal = (rows == rows[0]).all()
            assert equal == (not now.alternation.averaging_models or now.alternation.equal), (
                high,
                step,
            )
            assert equal or now.alternation.averaging_models
            assert was or not now.alternation.averaging_models or len(now.history) >= 2
        levels = [row["level"] for row in now.history if row["name"] == MODEL]
        assert levels[:2] == [0, 1] and 0 in levels[2:], (high, levels)


def check_batches_grow_beside() -> None:
    """Batches grow while models are averaged, and weights do not change within a batch."""
    model = Model()
    sizes = (2 * hvd.size(), 4 * hvd.size())
    optimizer = wrapped(model, policy(batch_size=sizes, low=TopK(0.1)))
    for step in range(20):
        take(model, optimizer, step, micro=2)
    now = optimizer.exchange.policy
    assert now.large and now.alternation.averaging_models and optimizer.param_groups[0]["lr"] == LR
    before, steps = model.flat().detach().clone(), optimizer.averaging.steps
    optimizer.zero_grad()
    model.flat().sum().backward()
    optimizer.step()
    assert (model.flat() == before).all() and optimizer.averaging.steps == steps
    model.flat().sum().backward()
    optimizer.step()
    assert (model.flat() != before).all() and optimizer.averaging.steps == steps + 1
    optimizer.average_now(model)
    rows = rows_of(torch.cat([model.flat().detach(), model.seen.double()]))
    assert (rows == rows[0]).all() and np.isclose(rows[0, -1], (hvd.size() - 1) / 2)


def check_a_budget_for_models_only() -> None:
    """With a budget too small for gradients, models are averaged from the first step on."""
    model = Model()
    optimizer = wrapped(model, policy(LocalSGD(PERIOD), budget=0.005, threshold=0.0))
    for step in range(3 * PERIOD):
        take(model, optimizer, step)
        rows = rows_of(model.flat())
        assert (rows == rows[0]).all() == (step % PERIOD == PERIOD - 1)
    assert optimizer.exchange.steps == 0
    assert optimizer.averaging.stats()["sent"] <= 3 * PERIOD * 5000


def check_without_waiting() -> None:
    """With MPI, groups do not wait, and each return to averaging models starts a new thread."""
    model = Model()
    optimizer = wrapped(model, policy(WAGMA(2, PERIOD)))
    engines: list[Any] = []
    for step in range(60):
        take(model, optimizer, step)
        now, rows = optimizer.exchange.policy, rows_of(model.flat())
        assert (rows == rows[0]).all() or (
            now.alternation.averaging_models and not now.alternation.equal
        )
        present = getattr(optimizer.averaging._averages, "engine", None)
        if all(engine is not present for engine in engines):
            engines.append(present)
    mpi = "OMPI_COMM_WORLD_SIZE" in harness.os.environ
    assert optimizer.averaging.without_waiting == mpi
    running = [engine for engine in engines if engine is not None]
    assert len(running) == (2 if mpi else 0), "one for each time that models are averaged"
    assert not any(engine._thread.is_alive() for engine in running[:-1])
    stats = optimizer.averaging.stats()
    assert optimizer.exchange.steps + stats["steps"] == 60
    for count in ("late", "on_time", "sent") if mpi else ():
        assert stats[count] == sum(getattr(engine, count) for engine in running), count
    optimizer.averaging.close()


def check_resuming_equals_not_stopping() -> None:
    """A training resumes exactly from any step after which models are equal.

    After other steps, saving is refused.
    """
    oracle, wanted, apart, refused = Oracle(hvd.size()), [], [], []
    for step in range(40):
        wanted.append(oracle.take(step)[hvd.rank()])
        apart += [] if oracle.settled or not oracle.averaging_models else [step + 1]
    stops = (8, 18, 20, 34)
    for stop in stops:
        model = Model()
        optimizer = wrapped(model, policy())
        for step in range(stop):
            take(model, optimizer, step)
        folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
        if not optimizer.exchange.policy.alternation.equal:
            try:
                hvd.save_state(folder, only=[optimizer])
            except RuntimeError as error:
                assert "average_now" in str(error)
                refused.append(stop)
            else:
                raise AssertionError("models are not equal")
            continue
        hvd.save_state(folder, only=[optimizer])
        kept = model.state_dict(), optimizer.state_dict()
        model = Model()
        optimizer = wrapped(model, policy())
        hvd.load_state(folder, only=[optimizer])
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        for step in range(stop, 40):
            take(model, optimizer, step)
            due = wanted[step]
            np.testing.assert_allclose(model.flat().detach().numpy(), due, atol=1e-12)
    assert refused == [stop for stop in stops if stop in apart] and 18 in refused


def check_refusals() -> None:
    model = Model()
    newton = torch.optim.LBFGS(model.parameters())
    plain = torch.optim.SGD(model.parameters(), LR)
    wrap = hvd.DistributedOptimizer
    for action, words in (
        (lambda: wrap(newton, compression=policy()), "LBFGS"),
        (lambda: wrap(plain, compression=policy(), op=hvd.Sum), "hvd.Average"),
        (lambda: wrap(plain, compression=policy(), skip=["b"]), "skip"),
        (lambda: wrap(plain, compression=policy(), grad_scaler=object()), "grad_scaler"),
        (lambda: wrap(plain, compression=policy(WAGMA(99))), "group_size"),
    ):
        raises(ValueError, words, action)
    raises(RuntimeError, "models are equal already", wrap(plain, compression=Dense()).average_now)


if __name__ == "__main__":
    harness.main(globals())
