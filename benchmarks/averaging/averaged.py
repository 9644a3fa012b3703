"""Accuracy of model averaging compared with gradient averaging.

Real ranks train small networks with momentum for the same number of epochs. All methods share
images, order, learning rates and seeds. Momentum stays local. Before evaluation, models and the
statistics of batch normalization are averaged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch.nn import functional as F

import accordion_hvd.torch as hvd
from accordion_hvd import WAGMA, Dense, LocalSGD
from benchmarks.report import spread
from examples.config import Settings
from examples.data import Shard, load
from examples.torch_training import build

TASKS = {
    "digits": Settings(
        data="digits", model="mlp", width=96, depth=3, epochs=60, batch_size=16, lr=0.1, shift=1
    ),
    "cifar10": Settings(
        data="cifar10", model="convnet", width=16, depth=3, epochs=20, batch_size=16, lr=0.1,
        shift=2, limit=10_000,
    ),
}  # fmt: skip
"""Settings of each task, by name."""

GRADIENTS = "gradients averaged"


def methods(group_size: int, period: int) -> dict[str, Any]:
    """Return the methods by name, including wait-avoiding WAGMA with half the period."""
    often = max(period // 2, 1)
    return {
        GRADIENTS: Dense(),
        f"local SGD({period})": LocalSGD(period),
        "WAGMA, groups that wait": WAGMA(group_size, period, wait_avoiding=False),
        "WAGMA, groups that do not": WAGMA(group_size, period, wait_avoiding=True),
        f"the same, period {often}": WAGMA(group_size, often, wait_avoiding=True),
    }


def measure(chosen: Any) -> Iterator[dict[str, Any]]:
    """Train each task with each method and seed; yield a row of results on every rank."""
    hvd.init()
    torch.set_num_threads(1)
    for seed in chosen.seeds:
        for task in chosen.tasks:
            settings = replace(TASKS[task], epochs=chosen.epochs or TASKS[task].epochs)
            data = load(settings.data, settings.limit, seed=0)
            for name, method in methods(chosen.group_size, chosen.period).items():
                accuracy = _train(settings, data, method, seed)
                yield {"task": task, "method": name, "seed": seed, "accuracy": accuracy}


def _train(settings: Settings, data: Any, method: Any, seed: int) -> float:
    torch.manual_seed(seed)
    model = build(settings, data)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=method,
    )
    shard = Shard(data, hvd.rank(), hvd.size(), settings.batch_size, seed, "NCHW", settings.shift)
    steps = settings.epochs * len(shard)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for epoch in range(settings.epochs):
        shard.shuffle(epoch)
        for step in range(len(shard)):
            images, labels = (torch.from_numpy(part) for part in shard[step])
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
    if isinstance(method, Dense):  # models are equal, but their running statistics are not
        for buffer in filter(torch.is_floating_point, model.buffers()):
            buffer.copy_(hvd.allreduce(buffer))
    else:
        optimizer.average_now(model)
        optimizer.close()
    return _accuracy(model, shard)


@torch.no_grad()
def _accuracy(model: torch.nn.Module, shard: Shard) -> float:
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # correct, tested
    for images, labels in shard.test_batches():
        correct = (model(torch.from_numpy(images)).argmax(1) == torch.from_numpy(labels)).sum()
        total += torch.tensor([float(correct), float(len(labels))])
    correct, tested = hvd.allreduce(total, op=hvd.Sum, name="tested").tolist()
    return correct / tested


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a table of mean accuracies, and differences to averaged gradients by seed."""
    found = pd.DataFrame(rows)
    accuracy = 100 * found.pivot_table("accuracy", "seed", ["task", "method"], sort=False)
    lines = []
    for (task, method), own in accuracy.items():
        points = (own - accuracy[task, GRADIENTS]).dropna()
        difference = spread(points, "{:+.2f}".format, statistics.mean, " to ")
        difference = difference if method != GRADIENTS else ""
        lines.append([task, method, f"{own.mean():.2f} %", difference, f"{own.count()}"])
    head = ["task", "average", "test accuracy", "difference in points", "seeds"]
    return pd.DataFrame(lines, columns=head)
