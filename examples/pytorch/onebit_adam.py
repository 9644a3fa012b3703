"""Train with 1-bit Adam, which sends one bit per element after a warm-up.

In the warm-up, ranks average gradients, as for Adam. Afterwards the variance stays constant, and
ranks average the momentum with one bit per element.

    torchrun --nproc-per-node 2 examples/pytorch/onebit_adam.py

`horovodrun -np 2 python` starts the same script. Rank 0 prints the test accuracy on scikit-learn's
digits, and the bytes that it has sent and would have sent with Adam.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accordion_hvd.torch as hvd

EPOCHS, BATCH = 20, 32  # images per rank and step


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    """Train and test."""
    hvd.init()
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    sampler: DistributedSampler = DistributedSampler(images, hvd.size(), hvd.rank())
    loader = DataLoader(TensorDataset(images, labels), BATCH, sampler=sampler)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    # Replaces torch.optim.Adam, and is not wrapped in DistributedOptimizer. `floor` limits the
    # steps of weights whose gradients were close to zero in the warm-up.
    optimizer = hvd.OnebitAdam(
        model.parameters(), lr=1e-3, warmup_steps=3 * len(loader), floor=0.01
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
