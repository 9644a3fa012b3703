"""Shard a model within each host with FSDP2, and compress the averages between hosts.

Four ranks stand for two hosts of two ranks. Each host holds a replica of the model, and each of its
ranks half of the parameters. FSDP averages gradients within a host; their averages between the two
hosts are compressed.

    torchrun --nproc-per-node 4 examples/pytorch/with_fsdp.py

Rank 0 prints the test accuracy on scikit-learn's digits, and the bytes that it has sent to the
other host, with those of uncompressed averages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accordion_hvd import PowerSGD, fsdp

STEPS, BATCH, RANKS_PER_HOST = 200, 32, 2


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    """Train and test."""
    dist.init_process_group("gloo")
    hosts = dist.get_world_size() // RANKS_PER_HOST
    mesh = init_device_mesh("cpu", (hosts, RANKS_PER_HOST), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    state = fsdp.between(model, mesh["replicas"], PowerSGD(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if dist.get_rank() == 0:
        stats = state.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
