"""Tests of Accordion's growing batches between real ranks in PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
import torch
from harness import raises

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, Dense, PowerSGD, TopK
from accordion_hvd.policies.accordion import BATCH

INIT = hvd.init
LR, SMALL, RATIO, WINDOW = 0.02, 8, 4, 8


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)]
    return torch.nn.Sequential(*layers).double()


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` small batches of all ranks, concatenated."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * SMALL, 32, generator=generator, dtype=torch.float64)
    return x, x[:, :1] * 2 + 1


def mine(count: int) -> torch.Tensor:
    """Return the indices of this rank's examples: its share of each small batch."""
    share = SMALL // hvd.size()
    every = torch.arange(count * SMALL).view(count, hvd.size(), share)
    return every[:, hvd.rank()].reshape(-1)


def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def growing(**options: Any) -> Accordion:
    chosen = {"batch_size": (SMALL, RATIO * SMALL), "window": WINDOW, "interval": 1}
    return Accordion(**chosen | {"threshold": 99.0} | options)


def wrapped(model: torch.nn.Module, policy: Any, **more: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    named = model.named_parameters()
    return hvd.DistributedOptimizer(inner, named, compression=policy, **more)


def batches(count: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    (x, y), own = examples(count), mine(count)
    share = SMALL // hvd.size()
    for number in range(start, count):
        chosen = own[number * share : (number + 1) * share]
        yield x[chosen], y[chosen]


def train(model: torch.nn.Module, optimizer: Any, count: int, start: int = 0) -> None:
    for x, y in batches(count, start):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def reference(count: int, grown: int, clip: float | None = None) -> np.ndarray:
    """Return the weights of one process that trains with all ranks' examples.

    Batches are large after `grown` small batches.
    """
    model, (x, y), done = network(), examples(count), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    while done < count:
        more = 1 if done < grown else RATIO
        chosen = slice(done * SMALL, (done + more) * SMALL)
        optimizer.zero_grad()
        loss(model, x[chosen], y[chosen]).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = LR * more
        optimizer.step()
        done += more
    return weights(model)


def same_everywhere(model: torch.nn.Module) -> bool:
    rows = hvd.allgather(torch.tensor(weights(model))[None], name="check.rows")
    return bool((rows == rows[0]).all())


def check_accumulated_batches_are_large_ones() -> None:
    """Accumulation equals training with large batches and a proportional learning rate."""
    model = network()
    optimizer = wrapped(model, growing())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for x, y in batches(5 * WINDOW):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == LR, "schedules see the user's own rate"
    np.testing.assert_allclose(weights(model), reference(5 * WINDOW, 2 * WINDOW), atol=1e-13)
    assert same_everywhere(model)
    stats = optimizer.exchange.stats()
    assert stats["steps"] == 2 * WINDOW + 3 * WINDOW // RATIO and stats["batch_size"] == 32
    rows = [row for row in optimizer.exchange.policy.history if row["name"] == BATCH]
    assert [(row["step"], row["level"]) for row in rows] == [(WINDOW, 0), (2 * WINDOW, 1)]


def check_norms_are_those_of_the_sums() -> None:
    """The recorded norm is that of rank 0's gradients, summed over a window.

    The norm covers all tensors, and the gradients are those before compression.
    """
    model = network()
    optimizer = wrapped(model, growing(low=PowerSGD(2), high=PowerSGD(1)))
    total = [torch.zeros_like(p) for p in model.parameters()]
    norms = []
    for number, (x, y) in enumerate(batches(3 * WINDOW)):
        twin = network()
        twin.load_state_dict(model.state_dict())
        loss(twin, x, y).backward()
        for mean, p in zip(total, twin.parameters(), strict=True):
            mean += p.grad
        if (number + 1) % WINDOW == 0:
            norms.append(torch.cat([t.reshape(-1) for t in total]).norm().item())
            total = [torch.zeros_like(p) for p in model.parameters()]
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    norms = hvd.broadcast_object(norms, 0)
    found = [row for row in optimizer.exchange.policy.history if row["name"] == BATCH]
    np.testing.assert_allclose([row["norm"] for row in found], norms[:2], rtol=1e-6)


def check_nothing_is_sent_within_a_batch() -> None:
    model = network()
    optimizer = wrapped(model, growing())
    train(model, optimizer, 2 * WINDOW)
    for number, (x, y) in enumerate(batches(4 * WINDOW, 2 * WINDOW)):
        before, sent = weights(model).copy(), optimizer.exchange.stats()["sent"]
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        last = number % RATIO == RATIO - 1
        assert (weights(model) != before).any() == last
        assert (optimizer.exchange.stats()["sent"] > sent) == (last and hvd.size() > 1)


def check_clipping_and_closures() -> None:
    model = network()
    optimizer = wrapped(model, growing())
    for x, y in batches(4 * WINDOW):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        if optimizer.full:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    wanted = reference(4 * WINDOW, 2 * WINDOW, clip=0.5)
    np.testing.assert_allclose(weights(model), wanted, atol=1e-13)
    model = network()
    optimizer = wrapped(model, growing())
    for x, y in batches(4 * WINDOW):

        def closure(x: Any = x, y: Any = y) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model, x, y)
            found.backward()
            return found

        assert float(optimizer.step(closure).detach()) > 0
    np.testing.assert_allclose(weights(model), reference(4 * WINDOW, 2 * WINDOW), atol=1e-13)


def check_several_passes_make_a_small_batch() -> None:
    """Two backward passes of half the loss each are one small batch; windows count passes."""
    model = network()
    optimizer = wrapped(model, growing(window=2 * WINDOW), backward_passes_per_step=2)
    for x, y in batches(3 * WINDOW):
        optimizer.zero_grad()
        for _ in range(2):
            (loss(model, x, y) / 2).backward()
        optimizer.step()
    np.testing.assert_allclose(weights(model), reference(3 * WINDOW, 2 * WINDOW), atol=1e-13)


def check_loaders_that_resize() -> None:
    """If epochs are windows, the sampler gives full large batches from the third epoch on."""
    for workers in (0, 1):
        model, (x, y) = network(), examples(WINDOW)
        optimizer = wrapped(model, growing(window=None))
        data = torch.utils.data.TensorDataset(x, y)
        sampler = hvd.AccordionBatchSampler(mine(WINDOW).tolist(), optimizer)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
        lengths = []
        for _ in range(4 if workers == 0 else 3):
            lengths.append([len(b) * hvd.size() for b, _ in _epoch(model, optimizer, loader)])
            optimizer.end_window()
        assert lengths == [[8] * 8, [8] * 8, [32] * 2, [32] * 2][: len(lengths)], lengths
        assert len(sampler) == 2
        again, done = _again(len(lengths)), weights(model)
        np.testing.assert_allclose(done, again, atol=1e-13)
        rows = [row for row in optimizer.exchange.policy.history if row["name"] == BATCH]
        assert [(row["step"], row["level"]) for row in rows] == [(8, 0), (16, 1)]


def _epoch(model: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    for x, y in loader:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        yield x, y


def _again(epochs: int) -> np.ndarray:
    """Return the weights of one process after these epochs, the first two with small batches."""
    model, (x, y) = network(), examples(WINDOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    for epoch in range(epochs):
        more = 1 if epoch < 2 else RATIO
        optimizer.param_groups[0]["lr"] = LR * more
        for part in torch.arange(len(x)).split(more * SMALL):
            optimizer.zero_grad()
            loss(model, x[part], y[part]).backward()
            optimizer.step()
    return weights(model)


def check_levers_together_and_a_budget() -> None:
    """Replicas stay alike, levels and batches change, and each small batch keeps to the budget."""
    budget = 0.004
    policy = growing(low=Dense(), high=TopK(0.05), budget=budget)
    model = network()
    optimizer = wrapped(model, policy, guard_every=2)
    sent = []
    for x, y in batches(4 * WINDOW):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        sent.append(optimizer.exchange.stats()["sent"])
    assert same_everywhere(model)
    flags = 16 * len(optimizer.exchange.layout.groups)
    for window in range(2, 4):  # windows that large batches fill
        steps = (sent[(window + 1) * WINDOW - 1] - sent[window * WINDOW - 1]) / WINDOW
        assert steps <= 1e6 * budget + flags, (steps, budget)
    assert policy.large


def check_resuming_equals_not_stopping() -> None:
    """A resumed training equals a training that does not stop.

    A decision that is due at the restart is taken in the first step after it.
    """
    for stop in (2 * WINDOW, 3 * WINDOW):
        model = network()
        optimizer = wrapped(model, growing())
        train(model, optimizer, stop)
        folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
        hvd.save_state(folder, only=[optimizer])
        kept = (model.state_dict(), optimizer.state_dict())
        model = network()
        optimizer = wrapped(model, growing())
        hvd.load_state(folder, only=[optimizer])
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        train(model, optimizer, 5 * WINDOW, stop)
        wanted = reference(5 * WINDOW, 2 * WINDOW)
        np.testing.assert_allclose(weights(model), wanted, atol=1e-13)


def check_refusals() -> None:
    odd = Accordion(batch_size=(2 * hvd.size() + 1, 4 * hvd.size() + 2))
    plain, scaler = torch.optim.SGD(network().parameters(), LR), torch.amp.GradScaler("cpu")
    newton = torch.optim.LBFGS(network().parameters())
    wrap, sampler = hvd.DistributedOptimizer, hvd.AccordionBatchSampler
    cases: list[tuple[Any, str]] = [
        (lambda: wrapped(network(), odd), "multiples of"),
        (lambda: wrapped(network(), growing(), grad_scaler=scaler), "bfloat16"),
        (lambda: wrap(newton, compression=growing()), "LBFGS"),
        (lambda: sampler([1], wrapped(network(), Dense())), "batch_size=(small"),
        (lambda: sampler([1], plain), "SGD"),
    ]
    for action, words in cases:
        raises(ValueError, words, action)


if __name__ == "__main__":
    harness.main(globals())
