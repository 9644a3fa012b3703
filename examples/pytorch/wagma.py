"""Average models instead of gradients, without waiting for late ranks (WAGMA).

In each step, a rank drawn at random is late by 20 ms. With `WAGMA(wait_avoiding=False)` the others
wait for it. With `WAGMA()`, which needs MPI, they average the model that it published last.

    mpirun -np 4 --bind-to none python examples/pytorch/wagma.py

Rank 0 prints, for both, the test accuracy on scikit-learn's digits, the bytes that it sent, with
those of averaged gradients, the seconds that it spent in averages and waiting for them, and how
often it was late itself.
"""

from __future__ import annotations

import random
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import accordion_hvd.torch as hvd
from accordion_hvd import WAGMA

STEPS, BATCH, DELAY = 150, 32, 0.02


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def train(method: WAGMA) -> None:
    """Train and test with one method."""
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=method,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    draw, late = torch.Generator().manual_seed(hvd.rank()), random.Random(0)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if late.randrange(hvd.size()) == hvd.rank():  # every rank draws the same numbers
            time.sleep(DELAY)
        optimizer.step()
    optimizer.average_now(model)  # models differ between two averages over all ranks
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    stats = optimizer.averaging.stats()
    optimizer.close()
    if hvd.rank() == 0:
        dense = 2 * (1 - 1 / hvd.size()) * 4 * sum(p.numel() for p in model.parameters()) * STEPS
        print(
            f"test accuracy {accuracy:.1%}, {stats['sent'] / 1e6:.2f} MB sent instead of "
            f"{dense / 1e6:.2f} MB, {stats['seconds']:.2f} s in averages, late in "
            f"{stats.get('late', 0)} of {STEPS} steps, with {method}"
        )


if __name__ == "__main__":
    hvd.init()
    train(WAGMA(wait_avoiding=False))
    train(WAGMA())
