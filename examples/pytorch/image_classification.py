"""Classify images, with gradients compressed by Accordion.

Accordion serves each layer with PowerSGD of rank 4 in critical regimes, and of rank 1 elsewhere.
The images are scikit-learn's digits, which need no download.

    horovodrun --gloo -np 2 python examples/pytorch/image_classification.py

Without Horovod, `torchrun --nproc-per-node 2` starts the same script. Rank 0 prints the levels
after some epochs, the test accuracy, and the bytes that it has sent and would have sent.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD

EPOCHS, BATCH = 20, 32  # images per rank and step


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 1, 8, 8), and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
    return [*map(torch.from_numpy, train_test_split(images, labels, test_size=360, random_state=0))]


def main() -> None:
    """Train and test."""
    hvd.init()
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    sampler: DistributedSampler = DistributedSampler(images, hvd.size(), hvd.rank())
    loader = DataLoader(TensorDataset(images, labels), BATCH, sampler=sampler)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=Accordion(low=PowerSGD(4), high=PowerSGD(1), interval=5),
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [15], gamma=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        optimizer.end_window()  # Accordion's windows are epochs
        if hvd.rank() == 0 and epoch % 5 == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, levels {optimizer.exchange.levels()}")
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
