"""A training run in PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import accordion_hvd.torch as hvd
from examples.config import Settings
from examples.data import Dataset, Shard
from examples.results import Record, Row, read_json


def train(settings: Settings, data: Dataset) -> Row:
    """Train according to `settings`; collective. Return the content of `result.json`."""
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    torch.manual_seed(settings.seed)
    device = _device()
    model = build(settings, data).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(
            model.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        ),
        named_parameters=model.named_parameters(),
        compression=settings.policy() or hvd.Compression.none,
        skip=settings.skip,
        ledger=settings.folder,
    )
    earlier = _resume(settings, model, optimizer) if settings.resume else None
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    part = (hvd.rank(), hvd.size(), settings.batch_size, settings.seed, "NCHW", settings.shift)
    shard = Shard(data, *part)
    record = Record(settings, "torch", hvd.rank(), hvd.size(), earlier)
    optimizer.end_window()  # windows are epochs: the loop below ends each one
    recorded = optimizer if hvd.size() > 1 else None
    show = settings.progress and hvd.rank() == 0
    with tqdm(
        total=settings.epochs, initial=len(record.rows), unit="epoch", disable=not show
    ) as bar:
        for epoch in range(len(record.rows), settings.epochs):
            loss, accuracy = _epoch(model, optimizer, shard, settings.lr_at(epoch), epoch, device)
            record.epoch(settings.lr_at(epoch), loss, accuracy, recorded)
            optimizer.end_window()
            if settings.checkpoint:
                _save(record.folder, model, optimizer)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")
    return record.write(recorded)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda")


def _epoch(
    model: nn.Module, optimizer: Any, shard: Shard, lr: float, epoch: int, device: torch.device
) -> tuple[float, float]:
    """Train for an epoch. Return the mean loss and the test accuracy over all ranks."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    shard.shuffle(epoch)
    model.train()
    total = torch.zeros(4, dtype=torch.float64)  # loss, steps, correct, tested
    for step in range(len(shard)):
        images, labels = (torch.from_numpy(part).to(device) for part in shard[step])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total[:2] += torch.tensor([float(loss.detach()), 1.0])
    if optimizer.averaging is not None:
        optimizer.average_now(model)
    model.eval()
    with torch.no_grad():
        for images, labels in shard.test_batches():
            predicted = model(torch.from_numpy(images).to(device)).argmax(1).cpu()
            correct = (predicted == torch.from_numpy(labels)).sum()
            total[2:] += torch.tensor([float(correct), float(len(labels))])
    loss_sum, steps, correct, tested = hvd.allreduce(total, op=hvd.Sum, name="epoch").tolist()
    return loss_sum / steps, correct / tested


# -------------------------------------------------------------------------------------- the models
def build(settings: Settings, data: Dataset) -> nn.Module:
    """Return the network that `settings.model` names."""
    height, width, channels = data.shape
    layers: list[nn.Module]
    if settings.model == "mlp":
        sizes = [height * width * channels, *[settings.width] * settings.depth]
        layers = [nn.Flatten()]
        for before, after in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        layers.append(nn.Linear(sizes[-1], data.classes))
    else:
        layers = _convolutions(settings, channels)
        side = settings.width * 2 ** (settings.depth - 1)
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * side, data.classes)]
    model = nn.Sequential(*layers)
    for layer in model:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def _convolutions(settings: Settings, channels: int) -> list[nn.Module]:
    """Return pairs of 3 x 3 convolutions. Each pair halves the image and doubles the channels."""
    layers: list[nn.Module] = []
    for pair in range(settings.depth):
        wide = settings.width * 2**pair
        for _ in range(2):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return layers


# -------------------------------------------------------------------------------------- checkpoints
def _save(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Save weights and momentum from rank 0, and residuals and levels from every rank."""
    place = folder / "checkpoint"
    if hvd.rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
        part = place / "model.pt.part"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.replace(place / "model.pt")
    if hvd.size() > 1:
        hvd.save_state(place, only=[optimizer])


def _resume(settings: Settings, model: nn.Module, optimizer: Any) -> Row | None:
    """Restore the last checkpoint and return its results, or None if there is no checkpoint."""
    folder = settings.folder
    place = folder / "checkpoint"
    if not (place / "model.pt").exists():
        return None
    saved = torch.load(place / "model.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if hvd.size() > 1:
        hvd.load_state(place, only=[optimizer])
    return read_json(folder / "result.json")
