"""Train with Ray Train on two workers, with gradients compressed by a hook of DDP.

    python examples/pytorch/with_ray_train.py

Ray starts the workers, and torch.distributed connects them; Horovod is not needed. The script
prints the test accuracy on scikit-learn's digits, and the bytes of the first worker, with those of
averaged gradients.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accordion_hvd import Accordion, PowerSGD, ddp

EPOCHS, BATCH, WORKERS = 10, 32, 2  # images per worker and step


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def train() -> dict[str, float]:
    """Train on each worker; return the test accuracy and the bytes."""
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    network = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = prepare_model(network)
    loader = prepare_data_loader(DataLoader(TensorDataset(images, labels), BATCH, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader))
    state = ddp.register(model, policy, optimizer=optimizer)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (network(test_images).argmax(1) == test_labels).float().mean().item()
    return {"accuracy": accuracy} | state.exchange.stats()


if __name__ == "__main__":
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    # Ray's type hints know neither a function that returns a value nor the value.
    loop: Any = train
    trainer: Any = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=WORKERS))
    found = trainer.fit().return_value  # of the first worker
    sent, dense = found["sent"] / 1e6, found["dense_sent"] / 1e6
    print(f"test accuracy {found['accuracy']:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")
    ray.shutdown()
