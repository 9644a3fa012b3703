"""Average models every 25 steps instead of gradients in each step (DiLoCo).

Each rank trains its own model with AdamW. After 25 steps, ranks average how far their models have
moved, and the outer optimizer, SGD with Nesterov momentum, moves the common model by the mean.

    torchrun --nproc-per-node 2 examples/pytorch/diloco.py

`horovodrun -np 2 python` starts the same script. Rank 0 prints the test accuracy on scikit-learn's
digits, and its bytes, with those of an average of gradients in each step.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import accordion_hvd.torch as hvd
from accordion_hvd import DiLoCo

STEPS, BATCH, PERIOD = 500, 32, 25


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
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=DiLoCo(PERIOD),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    draw = torch.Generator().manual_seed(hvd.rank())
    for step in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    optimizer.average_now(model)  # models are equal after an outer step only
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        sent = optimizer.averaging.stats()["sent"] / 1e6
        count = sum(p.numel() for p in model.parameters())
        dense = 2 * (1 - 1 / hvd.size()) * 4 * count * STEPS / 1e6  # of a ring allreduce
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
