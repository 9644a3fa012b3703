"""A training run in PyTorch on ranks that are simulated in this process, for many seeds."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from accordion_hvd import simulate
from accordion_hvd.simulation.one_process import World
from examples.config import Settings
from examples.data import Dataset, Shard
from examples.results import Record, Row
from examples.torch_training import build


def train(settings: Settings, data: Dataset, ranks: int) -> Row:
    """Train according to `settings`. Return the content of `result.json`.

    The ranks share one network, because their weights are equal after each step. Results differ
    from those of real ranks by rounding only.

    Args:
        settings: settings of the run.
        data: image set.
        ranks: number of simulated ranks.
    """
    torch.manual_seed(settings.seed)
    model = build(settings, data)
    optimizer = torch.optim.SGD(
        model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay
    )
    world = simulate(
        settings.policy() or "none", ranks, skip=settings.skip, momentum=settings.momentum
    )
    shards = [
        Shard(data, rank, ranks, settings.batch_size, settings.seed, "NCHW", settings.shift)
        for rank in range(ranks)
    ]
    record = Record(settings, "simulated", 0, ranks)
    for epoch in range(settings.epochs):
        lr = settings.lr_at(epoch)
        optimizer.param_groups[0]["lr"] = lr
        loss = _epoch(model, optimizer, world, shards, epoch, lr)
        record.epoch(lr, loss, _accuracy(model, shards), _first(world))
        world.end_window()
    return record.write(_first(world))


def _first(world: World) -> SimpleNamespace:
    """Return the attributes of rank 0's optimizer that a record reads."""
    return SimpleNamespace(exchange=world.exchanges[0], averaging=None)


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    shards: list[Shard],
    epoch: int,
    lr: float,
) -> float:
    """Train for an epoch; return the mean loss over all ranks."""
    model.train()
    for shard in shards:
        shard.shuffle(epoch)
    total, parameters = 0.0, dict(model.named_parameters())
    for step in range(len(shards[0])):
        gradients = []
        for shard in shards:
            optimizer.zero_grad()
            images, labels = (torch.from_numpy(part) for part in shard[step])
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            total += float(loss.detach()) / len(shards)
            gradients.append({name: x.grad for name, x in parameters.items()})
        weights = {name: x.detach() for name, x in parameters.items()}
        mean = world.step(gradients, lr, [weights] * len(shards))[0]
        for name, x in parameters.items():
            x.grad = None if mean is None else mean[name]
        optimizer.step()
    return total / len(shards[0])


@torch.no_grad()
def _accuracy(model: nn.Module, shards: list[Shard]) -> float:
    """Return the fraction of the test images that the network recognizes."""
    model.eval()
    batches = [batch for shard in shards for batch in shard.test_batches()]
    correct = sum(
        int((model(torch.from_numpy(images)).argmax(1).numpy() == labels).sum())
        for images, labels in batches
    )
    return correct / sum(len(labels) for _, labels in batches)
