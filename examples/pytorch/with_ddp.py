"""Compress the gradients of PyTorch's DistributedDataParallel, by a communication hook.

    torchrun --nproc-per-node 2 examples/pytorch/with_ddp.py

The hook averages gradients during the backward pass, and the training loop does not change. Rank 0
prints the test accuracy on scikit-learn's digits, and its bytes, with those of averaged gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accordion_hvd import Accordion, PowerSGD, ddp

EPOCHS, BATCH = 10, 32  # images per rank and step


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    """Train and test."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    sampler: DistributedSampler = DistributedSampler(images)
    loader = DataLoader(TensorDataset(images, labels), BATCH, sampler=sampler)
    network = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader))
    state = ddp.register(model, policy, optimizer=optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    with torch.no_grad():
        accuracy = (network(test_images).argmax(1) == test_labels).float().mean().item()
    if dist.get_rank() == 0:
        stats = state.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
